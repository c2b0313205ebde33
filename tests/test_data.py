"""Conversations as tokens, and batches that are fixed by (seed, epoch) and resume exactly."""

import dataclasses
import gzip
import importlib
import json
import sys

import numpy as np
import pytest
from tiny_text import tiny_tokenizer

from dflash_jax.config import DataConfig
from dflash_jax.conversations import expand_files, read_jsonl, read_prompts, tokenize_conversation
from dflash_jax.data import ConversationDataset
from dflash_jax.errors import ConfigError, DataError
from dflash_jax.packing import FILLER_ID, documents, plan_epoch

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


LINES = b'{"a": 1}\n\n{"b": "\xc3\xa9"}\n' + b'{"c": 2}\n' * 500


def zstd():
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", lambda data: zstd().compress(data))])
def test_compressed_files(tmp_path, suffix, compress):
    path, data = tmp_path / f"a.jsonl{suffix}", compress(LINES)
    path.write_bytes(data)
    places = []
    rows = list(read_jsonl(path, seen=places.append))
    assert rows[:2] == [(1, {"a": 1}), (3, {"b": "é"})]
    assert len(rows) == 502
    assert places == sorted(places)
    assert places[-1] <= len(data)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"a\.jsonl\{suffix} cannot be decompressed .*: fetch or write the file again"):
        list(read_jsonl(path))
    path.write_bytes(LINES)
    with pytest.raises(DataError, match=rf"a\.jsonl\{suffix} cannot be decompressed"):
        list(read_jsonl(path))


def test_zst_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a\.jsonl\.zst needs .*zstd to be read: pip install 'dflash_jax\[zstd\]'"):
        list(read_jsonl(tmp_path / "a.jsonl.zst"))


def test_globs(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "[x].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    paths = lambda *names: [str(tmp_path / name) for name in names]
    assert expand_files(paths("sub/c.jsonl", "?.jsonl"), "f") == paths("sub/c.jsonl", "a.jsonl", "b.jsonl")
    assert expand_files(paths("**/*.jsonl"), "f") == paths("[x].jsonl", "a.jsonl", "b.jsonl", "sub/c.jsonl")
    assert expand_files(paths("[x].jsonl", "absent.jsonl"), "f") == paths("[x].jsonl", "absent.jsonl")
    with pytest.raises(DataError, match=r"data\.train: .*\*\.gz matches no file"):
        expand_files(paths("*.gz"), "data.train")
    with pytest.raises(ConfigError, match=r"data\.train names .*a\.jsonl twice"):
        expand_files(paths("*.jsonl", "sub/../a.jsonl"), "data.train")


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

CONFIG = DataConfig(max_length=64, packing=False, buckets=[64, 24, 40], batch_size=4, num_epochs=2, seed=5)
PROMPT_LENGTH = len(TOKENIZER.encode_chat([user("a")]))


def over(tmp_path, rows, **changes):
    """CONFIG over these rows in a file."""
    path = write_lines(tmp_path / "t.jsonl", rows)
    return dataclasses.replace(CONFIG, **({"train": [path], "records": str(tmp_path / "records")} | changes))


def fifty(folder):
    """Fifty conversations of 1 to 70 letters in two files."""
    rows = [{"messages": [user("a"), assistant("x" * (1 + (7 * i) % 70))]} for i in range(50)]
    train = [write_lines(folder / "a.jsonl", rows[:20]), write_lines(folder / "b.jsonl", rows[20:])]
    return dataclasses.replace(CONFIG, train=train, records=str(folder / "records"))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return fifty(tmp_path_factory.mktemp("fifty"))


def conversation(row_id):
    """What row `row_id` of `fifty` holds."""
    tokens, mask = tokenize_conversation(TOKENIZER, [user("a"), assistant("x" * (1 + (7 * row_id) % 70))])
    return tokens[: CONFIG.max_length], mask[: CONFIG.max_length]


def as_lists(batches):
    return [{name: value.tolist() for name, value in batch.items()} for batch in batches]


def test_an_epoch_holds_every_row_once(config):
    dataset = ConversationDataset(config, TOKENIZER, pad_token_id=3)
    batches = list(dataset.iterator(dataset.steps_in(1)))
    assert len(batches) == dataset.steps_in(1) == 13
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
            want, want_mask = conversation(int(row_id))
            length = len(want)
            assert lengths[row] == length
            np.testing.assert_array_equal(tokens[row, :length], want)
            np.testing.assert_array_equal(mask[row, :length], want_mask)
            assert set(tokens[row, length:]) <= {3}
            assert not mask[row, length:].any()


def test_packed_rows_hold_every_conversation_once(config):
    dataset = ConversationDataset(dataclasses.replace(config, packing=True), TOKENIZER, pad_token_id=3)
    batches = list(dataset.iterator(dataset.steps_in(1)))
    assert len(batches) < 13
    found = []
    for batch in batches:
        shape = batch["tokens_BT"].shape
        assert batch["doc_BT"].shape == batch["loss_mask_BT"].shape == shape == (4, 64)
        assert (batch["doc_BT"].dtype, batch["length_B"].dtype) == (np.int32, np.int32)
        empty = np.ones(shape, bool)
        for row, start, length, row_id in documents(batch):
            slots = slice(start, start + length)
            want, want_mask = conversation(row_id)
            np.testing.assert_array_equal(batch["tokens_BT"][row, slots], want)
            np.testing.assert_array_equal(batch["loss_mask_BT"][row, slots], want_mask)
            assert (batch["doc_BT"][row, slots] == row_id).all()
            assert start > 0 or batch["id_B"][row] == row_id
            empty[row, slots] = False
            found.append(row_id)
        np.testing.assert_array_equal(np.maximum((~empty).sum(1), 1), batch["length_B"])
        assert (batch["tokens_BT"][empty] == 3).all()
        assert not batch["loss_mask_BT"][empty].any()
        assert (batch["doc_BT"][empty] == -1).all()
    assert sorted(found) == list(range(50))
    assert "doc_BT" not in dataset.sample(8), "sizes are measured on conversations, not on rows"


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
    assert len(both) == dataset.steps_in(2) == 26
    first, second = both[:13], both[13:]
    assert first != second
    assert both == as_lists(ConversationDataset(config, TOKENIZER).iterator())
    assert first == as_lists(dataset.iterator(13))
    other = ConversationDataset(dataclasses.replace(config, seed=6), TOKENIZER)
    assert first != as_lists(other.iterator(13))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("taken", [0, 7, 13, 20])
def test_resume_is_exact(config, taken, packing):
    config = dataclasses.replace(config, packing=packing, num_epochs=4 if packing else 2)
    iterator = ConversationDataset(config, TOKENIZER).iterator()
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    rest = as_lists(iterator)
    resumed = ConversationDataset(config, TOKENIZER).iterator()
    resumed.set_state(state)
    assert as_lists(resumed) == rest
    assert len(rest) == ConversationDataset(config, TOKENIZER).steps_in(config.num_epochs) - taken > 0
    assert len(json.dumps(state)) < 200


@pytest.mark.parametrize("packing", [False, True])
def test_processes_share_every_batch(config, packing):
    config = dataclasses.replace(config, packing=packing)
    whole = list(ConversationDataset(config, TOKENIZER).iterator())
    datasets = [ConversationDataset(config, TOKENIZER, process_rows=np.arange(2) + 2 * i) for i in range(2)]
    samples = [dataset.sample(3) for dataset in datasets]
    for name, of_first in samples[0].items():  # what a run measures at its start must not differ between hosts
        np.testing.assert_array_equal(of_first, samples[1][name])
    assert len(samples[0]["id_B"]) == 3
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
    config = over(tmp_path, [row])
    dataset = ConversationDataset(config, TOKENIZER, vocab_size=spare + 1)
    assert spare in dataset.sample(8)["tokens_BT"]
    with pytest.raises(DataError, match=rf"t\.jsonl:1: answer_tokens must be a list of token ids in 0\.\.{spare - 1}"):
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
    dataset = ConversationDataset(over(tmp_path, rows), TOKENIZER)
    supervised = 5 + (64 - PROMPT_LENGTH) + 2
    assert dataset.report == {
        "read": 6,
        "kept": 3,
        "cut": 2,
        "no assistant turn": 1,
        "no two supervised tokens in a row": 1,
        "answer lies past max_length": 1,
        "tokens": PROMPT_LENGTH * 3 + supervised,
        "supervised_tokens": supervised,
        "cut_tokens": (PROMPT_LENGTH + 99 + 5 - 64) + (PROMPT_LENGTH + 101 - 64),
    }
    assert len(dataset) == 3
    assert dataset.records.ids_N.tolist() == [0, 4, 5]
    assert dataset.steps_in(1) == 1
    summary = dataset.summary()
    assert "3 of 6 conversations" in summary
    assert "dropped: 1 no assistant turn, 1 no two supervised tokens in a row, 1 answer lies past max_length" in summary


def test_fingerprint_follows_the_data(config, tmp_path):
    one = ConversationDataset(config, TOKENIZER).fingerprint
    assert one == ConversationDataset(config, TOKENIZER).fingerprint
    less = dataclasses.replace(config, train=config.train[:1])
    assert one != ConversationDataset(less, TOKENIZER).fingerprint
    assert one != ConversationDataset(dataclasses.replace(config, seed=9), TOKENIZER).fingerprint
    assert one != ConversationDataset(dataclasses.replace(config, packing=True), TOKENIZER).fingerprint
    copied = fifty(tmp_path)
    assert one == ConversationDataset(copied, TOKENIZER).fingerprint, "the same text from other files"


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
    with pytest.raises(DataError, match=message):
        ConversationDataset(over(tmp_path, [{"messages": [user("a"), assistant("b")]}, row]), TOKENIZER)


def test_refused_runs(tmp_path):
    rows = [{"messages": [user("a")]}]
    for change, message in [
        ({"train": []}, r"data\.train names no file"),
        ({"buckets": []}, r"data\.buckets is \[\]"),
        ({"max_length": 65}, r"data\.max_length 65 exceeds the widest"),
        ({"batch_size": 0}, r"data\.batch_size is 0: it must be at least 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ConversationDataset(over(tmp_path, rows, **change), TOKENIZER)
    with pytest.raises(DataError, match=r"no conversation can be trained on .*'no assistant turn': 1"):
        ConversationDataset(over(tmp_path, rows), TOKENIZER)
