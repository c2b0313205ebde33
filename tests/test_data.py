"""Conversations as tokens, and batches that are fixed by (seed, epoch) and resume exactly."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_text import tiny_tokenizer

from dflash_jax.config import DataConfig
from dflash_jax.data import FILLER_ID, ConversationDataset, plan_epoch, read_jsonl, read_prompts, tokenize_conversation
from dflash_jax.errors import ConfigError, DataError

IM_START, IM_END = 1, 2
TOKENIZER = tiny_tokenizer()


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def supervised_text(tokens, mask):
    return TOKENIZER.decode(tokens[mask].tolist(), skip_special=False)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_read_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"a": 1}\r\n\n  \n{"b": "é"}'.encode())
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (4, {"b": "é"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"x\.jsonl:2: not valid JSON"),
        (b'{"a": 1}\n\n[1]\n', r"x\.jsonl:3: the line holds a list, not an object"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"x\.jsonl:2: not valid JSON"),
        (b'{"a": 1}\n{"a": "\\ud800"}\n', r"x\.jsonl:2: not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}\n", r"x\.jsonl:1: not valid JSON"),
        (b"[" * 100_000 + b"\n", r"x\.jsonl:1: not valid JSON"),
        (b"\n", r"x\.jsonl holds no lines"),
        (b"", r"x\.jsonl holds no lines"),
    ],
)
def test_broken_lines_are_named(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_jsonl(path))


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl cannot be read \(No such file"):
        list(read_jsonl(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="cannot be read"):
        list(read_jsonl(tmp_path))


def test_read_prompts(tmp_path):
    rows = [
        {"turns": ["one", "two"]},
        {"id": "q7", "set": "mt", "turns": ["three"]},
        {"messages": [{"role": "system", "content": "be brief"}, user("four"), assistant("old answer"), user("five")]},
    ]
    assert read_prompts([write_lines(tmp_path / "mine.jsonl", rows)]) == [
        {"id": "mine:1", "set": "mine", "turns": ["one", "two"]},
        {"id": "q7", "set": "mt", "turns": ["three"]},
        {"id": "mine:3", "set": "mine", "turns": ["four", "five"], "system": "be brief"},
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"p\.jsonl:2: neither 'turns' nor 'messages' among its keys \['prompt'\]"),
        ({"turns": []}, r"p\.jsonl:2: a prompt needs at least one user turn"),
        ({"turns": ["a", ""]}, r"p\.jsonl:2: a prompt needs at least one user turn"),
        ({"turns": "text"}, r"p\.jsonl:2: a prompt needs at least one user turn"),
        ({"messages": [assistant("x")]}, r"p\.jsonl:2: a prompt needs at least one user turn"),
        ({"messages": [{"role": "human", "content": "x"}]}, r"p\.jsonl:2: message 0 needs a role \(system, user, assistant\)"),
        ({"messages": "x"}, r"p\.jsonl:2: a conversation needs a list 'messages'"),
    ],
)
def test_read_prompts_refusals(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        read_prompts([write_lines(tmp_path / "p.jsonl", [{"turns": ["fine"]}, row])])


# ---------------------------------------------------------------------------------------------------------------------
# Tokens and masks


def test_one_answer():
    tokens, mask = tokenize_conversation(TOKENIZER, [user("12"), assistant("hello")])
    prefix = TOKENIZER.encode_chat([user("12")])
    assert tokens.tolist() == [*prefix, TOKENIZER.token_id("hello"), IM_END]
    assert mask.tolist() == [False] * len(prefix) + [True, True]
    assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)


def test_several_answers_and_trailing_user():
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("one"), user("b"), assistant("two"), user("c")]
    tokens, mask = tokenize_conversation(TOKENIZER, messages)
    assert supervised_text(tokens, mask) == "one<|im_end|>two<|im_end|>"
    assert TOKENIZER.decode(tokens.tolist(), skip_special=False) == TOKENIZER.render_chat(messages[:5], False).removesuffix("\n")
    assert not mask[np.flatnonzero(tokens == IM_END)[2] + 1], "the newline after an end-of-turn token is the template's"


def test_answer_is_encoded_apart_from_the_prompt():
    """The prompt ends in a newline and this answer begins with two: together they make a token that decoding could not write."""
    both = TOKENIZER.token_id("ĊĊ")
    messages = [user("a"), assistant("\n\nx")]
    assert both in TOKENIZER.encode(TOKENIZER.render_chat(messages, False))
    tokens, mask = tokenize_conversation(TOKENIZER, messages)
    assert both not in tokens
    assert supervised_text(tokens, mask) == "\n\nx<|im_end|>"


def test_cut_answers_have_no_end_of_turn():
    messages = [user("a"), assistant("one"), user("b"), assistant("two")]
    tokens, mask = tokenize_conversation(TOKENIZER, messages, finish_reason="length")
    assert supervised_text(tokens, mask) == "one<|im_end|>two"
    assert tokens[-1] != IM_END


def test_answer_tokens_are_taken_as_they_are():
    letters = TOKENIZER.encode("h") + TOKENIZER.encode("e") + TOKENIZER.encode("llo")  # not how "hello" is encoded
    answer = [*letters, IM_END]
    for finish_reason in ("stop", "length"):
        tokens, mask = tokenize_conversation(TOKENIZER, [user("a"), assistant("hello")], finish_reason, answer)
        assert tokens.tolist() == TOKENIZER.encode_chat([user("a")]) + answer
        assert mask.sum() == len(answer)


def test_templates_that_drop_old_thoughts_leave_old_answers_unsupervised():
    template = (
        "{% for m in messages %}[{{ m.role }}]"
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = tiny_tokenizer(template=template)
    messages = [user("a"), assistant("hm</think>one"), user("b"), assistant("ho</think>two")]
    tokens, mask = tokenize_conversation(tokenizer, messages)
    assert supervised_text(tokens, mask) == "ho</think>two<|im_end|>"
    assert tokenizer.decode(tokens[~mask].tolist(), skip_special=False) == tokenizer.render_chat(messages[:3])


def test_refused_conversations():
    with pytest.raises(DataError, match="no assistant turn"):
        tokenize_conversation(TOKENIZER, [user("a")])
    odd = tiny_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}GO{% endif %}")
    with pytest.raises(DataError, match="does not begin an answer with its generation prompt"):
        tokenize_conversation(odd, [user("a"), assistant("b")])


# ---------------------------------------------------------------------------------------------------------------------
# Batches

CONFIG = DataConfig(max_length=64, buckets=[64, 24, 40], batch_size=4, num_epochs=2, seed=5)
PROMPT_LENGTH = len(TOKENIZER.encode_chat([user("a")]))


@pytest.fixture
def config(tmp_path):
    rows = [{"messages": [user("a"), assistant("x" * (1 + (7 * i) % 70))]} for i in range(50)]
    return dataclasses.replace(
        CONFIG, train=[write_lines(tmp_path / "a.jsonl", rows[:20]), write_lines(tmp_path / "b.jsonl", rows[20:])]
    )


def as_lists(batches):
    return [{name: value.tolist() for name, value in batch.items()} for batch in batches]


def test_an_epoch_holds_every_row_once(config):
    dataset = ConversationDataset(config, TOKENIZER, pad_token_id=3)
    batches = list(dataset.iterator(num_epochs=1))
    assert len(batches) == dataset.batches_per_epoch == 13
    ids = np.concatenate([batch["id_B"] for batch in batches])
    assert sorted(ids[ids != FILLER_ID]) == list(range(50))
    assert (ids == FILLER_ID).sum() == 2
    for batch in batches:
        tokens, mask, lengths = batch["tokens_BT"], batch["loss_mask_BT"], batch["length_B"]
        assert tokens.shape == mask.shape == (4, tokens.shape[1])
        assert tokens.shape[1] in config.buckets
        assert (tokens.dtype, mask.dtype, lengths.dtype, batch["id_B"].dtype) == (np.int32, np.bool_, np.int32, np.int32)
        for row, row_id in enumerate(batch["id_B"]):
            if row_id == FILLER_ID:
                assert (lengths[row], mask[row].any(), set(tokens[row])) == (1, False, {3})
                continue
            answer = "x" * (1 + (7 * int(row_id)) % 70)
            want, want_mask = tokenize_conversation(TOKENIZER, [user("a"), assistant(answer)])
            length = min(len(want), config.max_length)
            assert lengths[row] == length
            np.testing.assert_array_equal(tokens[row, :length], want[:length])
            np.testing.assert_array_equal(mask[row, :length], want_mask[:length])
            assert set(tokens[row, length:]) <= {3}
            assert not mask[row, length:].any()


def test_few_rows_are_padded_far():
    """Only what is left of a bucket moves to a wider one."""
    buckets = np.repeat([0, 1, 2], [41, 42, 43])
    plan = plan_epoch(buckets, 3, 4, seed=0, epoch=0)
    moved = sum((buckets[rows[rows != FILLER_ID]] != bucket).sum() for bucket, rows in plan)
    assert moved <= 2 * 3
    assert len(plan) == -(-len(buckets) // 4)


def test_epochs_differ_and_repeat_exactly(config):
    dataset = ConversationDataset(config, TOKENIZER)
    both = as_lists(dataset.iterator())
    assert len(both) == 2 * dataset.batches_per_epoch
    first, second = both[:13], both[13:]
    assert first != second
    assert both == as_lists(ConversationDataset(config, TOKENIZER).iterator())
    assert first == as_lists(dataset.iterator(num_epochs=1))
    other = ConversationDataset(dataclasses.replace(config, seed=6), TOKENIZER)
    assert first != as_lists(other.iterator(num_epochs=1))


@pytest.mark.parametrize("taken", [0, 1, 7, 13, 20])
def test_resume_is_exact(config, taken):
    iterator = ConversationDataset(config, TOKENIZER).iterator()
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    rest = as_lists(iterator)
    resumed = ConversationDataset(config, TOKENIZER).iterator()
    resumed.set_state(state)
    assert as_lists(resumed) == rest
    assert len(rest) == 26 - taken


def test_processes_share_every_batch(config):
    whole = list(ConversationDataset(config, TOKENIZER).iterator())
    datasets = [ConversationDataset(config, TOKENIZER, process_index=i, process_count=2) for i in range(2)]
    samples = [dataset.sample() for dataset in datasets]
    for name, of_first in samples[0].items():  # what a run measures at its start must not differ between hosts
        np.testing.assert_array_equal(of_first, samples[1][name])
    assert len(samples[0]["id_B"]) == config.batch_size
    shares = [list(dataset.iterator()) for dataset in datasets]
    scattered = ConversationDataset(config, TOKENIZER, process_rows=np.asarray([1, 3])).iterator()
    for batch, *parts, some in zip(whole, *shares, scattered, strict=True):
        for name, value in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)
            np.testing.assert_array_equal(some[name], value[[1, 3]])


def test_tokens_that_the_target_has_and_its_tokenizer_has_not(tmp_path):
    """Heads are often padded past the tokenizer's vocabulary, and a target may write such an id: then it is trained on."""
    spare = TOKENIZER.vocab_size
    row = {"messages": [user("a"), assistant("b")], "answer_tokens": [spare, 5], "finish_reason": "length"}
    config = dataclasses.replace(CONFIG, train=[write_lines(tmp_path / "a.jsonl", [row])])
    dataset = ConversationDataset(config, TOKENIZER, vocab_size=spare + 1)
    assert spare in dataset.sample()["tokens_BT"]
    with pytest.raises(DataError, match=rf"a\.jsonl:1: answer_tokens must be a list of token ids in 0\.\.{spare - 1}"):
        ConversationDataset(config, TOKENIZER)


def test_report_and_dropped_rows(tmp_path):
    rows = [
        {"messages": [user("a"), assistant("fine")]},
        {"messages": [user("a")]},
        {"messages": [user("a"), assistant("")]},  # its end-of-turn token alone
        {"messages": [user("a" * 100), assistant("fine")]},  # cut before the answer
        {"messages": [user("a"), assistant("x" * 100)]},
        {"messages": [user("a"), assistant("xy")], "finish_reason": "length", "answer_tokens": [5, 6]},
    ]
    config = dataclasses.replace(CONFIG, train=[write_lines(tmp_path / "a.jsonl", rows)])
    dataset = ConversationDataset(config, TOKENIZER)
    supervised = 5 + (64 - PROMPT_LENGTH) + 2
    assert dataset.report == {
        "read": 6,
        "kept": 3,
        "cut": 2,
        "no assistant turn": 1,
        "no two supervised tokens in a row": 2,
        "tokens": PROMPT_LENGTH * 3 + supervised,
        "supervised_tokens": supervised,
    }
    assert len(dataset) == 3
    assert dataset.ids_N.tolist() == [0, 4, 5]
    assert dataset.batches_per_epoch == 1


def test_fingerprint_follows_the_data(config, tmp_path):
    one = ConversationDataset(config, TOKENIZER).fingerprint
    assert one == ConversationDataset(config, TOKENIZER).fingerprint
    less = dataclasses.replace(config, train=config.train[:1])
    assert one != ConversationDataset(less, TOKENIZER).fingerprint
    assert one != ConversationDataset(dataclasses.replace(config, seed=9), TOKENIZER).fingerprint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"turns": ["a"]}, r"t\.jsonl:2: .* run `python -m dflash_jax regenerate`"),
        ({"messages": [user("a"), {"role": "assistant", "content": None}]}, r"t\.jsonl:2: message 1 needs a role"),
        (
            {"messages": [user("a"), assistant("b")], "answer_tokens": [1, 999]},
            r"t\.jsonl:2: answer_tokens must be a list of token ids",
        ),
        ({"messages": [user("a"), assistant("b")], "answer_tokens": "b"}, r"t\.jsonl:2: answer_tokens must be a list of token ids"),
    ],
)
def test_refused_rows(tmp_path, row, message):
    path = write_lines(tmp_path / "t.jsonl", [{"messages": [user("a"), assistant("b")]}, row])
    with pytest.raises(DataError, match=message):
        ConversationDataset(dataclasses.replace(CONFIG, train=[path]), TOKENIZER)


def test_refused_runs(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", [{"messages": [user("a")]}])
    for change, message in [
        ({"train": []}, r"data\.train names no file"),
        ({"buckets": []}, r"data\.buckets is \[\]"),
        ({"max_length": 65}, r"data\.max_length 65 exceeds the widest"),
        ({"batch_size": 3}, r"data\.batch_size 3 cannot be shared by 2 processes"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ConversationDataset(dataclasses.replace(CONFIG, **({"train": [path]} | change)), TOKENIZER, process_count=2)
    with pytest.raises(DataError, match=r"no conversation can be trained on .*'no assistant turn': 1"):
        ConversationDataset(dataclasses.replace(CONFIG, train=[path]), TOKENIZER)
