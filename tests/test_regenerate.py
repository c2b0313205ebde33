"""The target's own answers: what they say, and that a kill at any byte costs nothing but time."""

import dataclasses
import json

import pytest
from tiny_run import files_of_at_most, tiny_target, user

from dflash_jax.config import DecodeConfig
from dflash_jax.conversations import tokenize_conversation
from dflash_jax.errors import ConfigError, DataError, DFlashError
from dflash_jax.generate import generate
from dflash_jax.lock import only_process
from dflash_jax.regenerate import regenerate
from dflash_jax.targets import DenseTarget

pytestmark = pytest.mark.one_cell

STOPS = (2, *range(20, 40))
"""Enough of the vocabulary that random answers end at different lengths"""
GREEDY = DecodeConfig(max_new_tokens=24)
TEXTS = ["a", "b", "hello", "12", "x y z", "q"]


@pytest.fixture(scope="module")
def target():
    plain = tiny_target()
    return DenseTarget(dataclasses.replace(plain.config, stop_token_ids=STOPS), plain.params, plain.tokenizer)


def prompts(*texts, prefix="p"):
    return [{"id": f"{prefix}{i}", "set": "s", "turns": [text] if isinstance(text, str) else text} for i, text in enumerate(texts)]


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_id(path):
    rows = rows_of(path)
    assert len({row["id"] for row in rows}) == len(rows), "an answer is there twice"
    return {row["id"]: row for row in rows}


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory):
    """Greedy answers to all texts, four rows at a time."""
    path = tmp_path_factory.mktemp("answers") / "deep" / "out.jsonl"
    assert regenerate(target, prompts(*TEXTS), path, GREEDY, batch_size=4) == 6
    return path


def test_a_foreign_last_line_without_newline_is_kept(target, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "x", "turns": ["precious"]}')
    with pytest.raises(DataError, match="its last line is not one that regenerate wrote"):
        regenerate(target, prompts("a"), path, GREEDY, batch_size=1)
    assert path.read_text() == '{"id": "x", "turns": ["precious"]}'


def test_one_process_at_a_time(target, tmp_path):
    path = tmp_path / "out.jsonl"
    path.touch()
    with only_process(path), pytest.raises(ConfigError, match=r"out\.jsonl is being written by another process"):
        regenerate(target, prompts("a"), path, GREEDY, batch_size=1)


def test_an_edited_prompt_file_is_refused(target, answers):
    """Prompts are known by id, so an id that now asks something else would otherwise keep the old answer."""
    before = answers.read_bytes()
    edited = prompts(*TEXTS)
    edited[4]["turns"] = ["another question"]
    with pytest.raises(DataError, match="its answer to p4 is to another prompt of that id: give another output file"):
        regenerate(target, edited, answers, GREEDY, batch_size=4)
    assert answers.read_bytes() == before


@pytest.mark.parametrize(
    "other", [{"max_new_tokens": 25}, {"temperature": 0.5, "seed": 1}], ids=["longer answers", "sampled answers"]
)
def test_other_settings_do_not_join_a_file(target, answers, other):
    before = answers.read_bytes()
    refused = r"out\.jsonl:1: an answer decoded with \{'max_new_tokens': 24, 'target': ''\}, not with .*: give another output file"
    with pytest.raises(ConfigError, match=refused):
        regenerate(target, prompts(*TEXTS), answers, dataclasses.replace(GREEDY, **other), batch_size=4)
    with pytest.raises(ConfigError, match=refused):
        regenerate(target, prompts(*TEXTS), answers, GREEDY, batch_size=4, target_name="another")
    assert answers.read_bytes() == before
    # what a greedy answer does not depend on may change, and lines that do not say their settings are taken as they are
    assert regenerate(target, prompts(*TEXTS), answers, dataclasses.replace(GREEDY, seed=5, top_k=3), batch_size=4) == 0
    silent = answers.parent / "silent.jsonl"
    silent.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "decode"}) + "\n" for row in rows_of(answers)))
    assert regenerate(target, prompts(*TEXTS), silent, dataclasses.replace(GREEDY, **other), batch_size=4) == 0


def test_a_full_disk_is_named_and_costs_nothing(target, answers, tmp_path):
    path = tmp_path / "out.jsonl"
    whole = answers.read_bytes()
    with files_of_at_most(len(whole) // 2), pytest.raises(OSError, match=r"File too large: .*out\.jsonl"):
        regenerate(target, prompts(*TEXTS), path, GREEDY, batch_size=4)
    regenerate(target, prompts(*TEXTS), path, GREEDY, batch_size=4)
    assert by_id(path) == by_id(answers)


def test_half_a_character_is_refused_by_prompt(target, tmp_path):
    with pytest.raises(DFlashError, match="prompt p1: the text holds half a character"):
        regenerate(target, prompts("a", "b \ud800"), tmp_path / "out.jsonl", GREEDY, batch_size=4)


def test_answers_are_generates(target, answers):
    """Batched, rows filled again as others end, and yet what each prompt alone gives."""
    rows = by_id(answers)
    assert set(rows) == {f"p{i}" for i in range(6)}
    lengths = set()
    for i, text in enumerate(TEXTS):
        alone = generate(target, None, [target.tokenizer.encode_chat([user(text)])], max_new_tokens=24)
        row = rows[f"p{i}"]
        assert row["answer_tokens"] == alone.tokens[0]
        assert row["finish_reason"] == alone.finish_reason[0]
        said = target.tokenizer.decode(alone.tokens[0])
        assert row["messages"] == [user(text), {"role": "assistant", "content": said}]
        assert row["set"] == "s"
        lengths.add(len(alone.tokens[0]))
    assert len(lengths) > 2, f"rows should end at different rounds: {lengths}"
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}


def test_training_reads_what_was_decoded(target, answers):
    """The supervised tokens are the decoded ones, though their text would be encoded in another way."""
    for row in rows_of(answers):
        tokens, mask = tokenize_conversation(target.tokenizer, row["messages"], row["finish_reason"], row["answer_tokens"])
        assert tokens[mask].tolist() == row["answer_tokens"]
        assert tokens[~mask].tolist() == target.tokenizer.encode_chat(row["messages"][:1])


def test_a_kill_at_any_byte_costs_nothing(target, answers, tmp_path):
    """Whatever is left of the file, running again gives the same six answers, and what was whole is not touched."""
    whole, want = answers.read_bytes(), by_id(answers)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    cuts = {0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[2] - 7, ends[3], ends[4] + 40, ends[4] + 2, len(whole) - 1, len(whole)}
    inside = next(i for i, byte in enumerate(whole) if byte >= 0xC0)
    cuts.add(inside + 1)  # in the middle of a character
    for cut in sorted(cuts):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(whole[:cut])
        finished = sum(end - 1 <= cut for end in ends)  # a line that only lacks its newline is whole
        assert regenerate(target, prompts(*TEXTS), path, GREEDY, batch_size=4) == 6 - finished
        assert by_id(path) == want, f"cut at byte {cut}"
        assert path.read_bytes()[: ends[finished - 1] if finished else 0] == whole[: ends[finished - 1] if finished else 0]


def test_a_kill_while_decoding_keeps_what_was_written(target, answers, tmp_path, monkeypatch):
    import dflash_jax.regenerate as module

    path, calls, decode = tmp_path / "out.jsonl", [], module.decode

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, "decode", killed)
        with pytest.raises(KeyboardInterrupt):
            regenerate(target, prompts(*TEXTS), path, GREEDY, batch_size=2)
    written = len(rows_of(path))
    assert 0 < written < 6
    assert regenerate(target, prompts(*TEXTS), path, GREEDY, batch_size=2) == 6 - written
    assert by_id(path) == by_id(answers)


def test_more_prompts_may_come_later(target, answers, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answers.read_bytes())
    assert regenerate(target, prompts(*TEXTS, "new"), path, GREEDY, batch_size=4) == 1
    assert regenerate(target, prompts(*TEXTS, "new"), path, GREEDY, batch_size=4) == 0


def test_several_turns(target, tmp_path, answers):
    """Every turn reads the answers before it; a system message comes first; answer_tokens are those of the last turn."""
    path = tmp_path / "out.jsonl"
    finished = next(text for i, text in enumerate(TEXTS) if by_id(answers)[f"p{i}"]["finish_reason"] == "stop")
    asked = [*prompts([finished, "b"]), {"id": "s", "set": "s", "turns": ["c"], "system": "be brief"}]
    assert regenerate(target, asked, path, GREEDY, batch_size=2) == 2
    rows = by_id(path)
    messages = rows["p0"]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    for end in (1, 3):
        out = generate(target, None, [target.tokenizer.encode_chat(messages[:end])], max_new_tokens=24)
        assert messages[end]["content"] == target.tokenizer.decode(out.tokens[0])
    assert rows["p0"]["answer_tokens"] == out.tokens[0]
    assert rows["s"]["messages"][0] == {"role": "system", "content": "be brief"}


def test_prompts_that_do_not_fit_are_counted(target, tmp_path, capsys):
    """The context holds 128 tokens; a prompt may take what max_new_tokens leaves."""
    path = tmp_path / "out.jsonl"
    overhead = len(target.tokenizer.encode_chat([user("")]))
    fits, long = "x" * (104 - overhead), "x" * (105 - overhead)
    assert regenerate(target, prompts(long, fits, long), path, GREEDY, batch_size=2) == 1
    assert [row["id"] for row in rows_of(path)] == ["p1"]
    assert "2 prompts left out: longer than 104 tokens (context 128 - max_new_tokens)" in capsys.readouterr().out


def test_sampled_answers(target, tmp_path, answers):
    """Seeded: the same seed writes the same file, another seed another; rows of the same text draw apart."""

    def sampled(name, seed):
        config = DecodeConfig(max_new_tokens=24, temperature=1.0, top_k=50, seed=seed)
        assert regenerate(target, prompts("a", "a", "b"), tmp_path / name, config, batch_size=2) == 3
        return by_id(tmp_path / name)

    first = sampled("a", 0)
    assert sampled("b", 0) == first
    assert sampled("c", 10) != first
    assert first["p0"]["answer_tokens"] != first["p1"]["answer_tokens"]
    assert first["p0"]["answer_tokens"] != by_id(answers)["p0"]["answer_tokens"]
    assert all(len(row["answer_tokens"]) <= 24 for row in first.values())


def test_rows_are_filled_again(target, tmp_path):
    """Many prompts through one batch of unequal answers, whose rows are no power of two, twice as many as it has rows and not a
    multiple of a refill: each is what it is alone."""
    batch_size = 24
    asked = prompts(*[chr(97 + i % 26) * (1 + i % 3) for i in range(2 * batch_size + 3)])
    path = tmp_path / "out.jsonl"
    assert regenerate(target, asked, path, GREEDY, batch_size=batch_size) == len(asked)
    rows = by_id(path)
    for prompt in asked:
        alone = generate(target, None, [target.tokenizer.encode_chat([user(prompt["turns"][0])])], max_new_tokens=24)
        assert rows[prompt["id"]]["answer_tokens"] == alone.tokens[0]


def test_sampled_answers_do_not_depend_on_their_batch(target, tmp_path):
    """Other batches, or a resumed run, draw every prompt's answer the same; and no two batches share their draws."""
    config = DecodeConfig(max_new_tokens=24, temperature=1.0, seed=3)
    asked = prompts("a", "b", ["c", "d"], "a", "a")
    regenerate(target, asked, tmp_path / "whole", config, batch_size=2)
    regenerate(target, asked[2:4], tmp_path / "resumed", config, batch_size=1)
    regenerate(target, asked, tmp_path / "resumed", config, batch_size=1)
    whole = by_id(tmp_path / "whole")
    assert whole == by_id(tmp_path / "resumed")
    assert len({str(whole[name]["answer_tokens"]) for name in ("p0", "p3", "p4")}) == 3


def test_a_file_of_something_else_is_left_alone(target, tmp_path):
    path = tmp_path / "out.jsonl"
    for theirs in ('{"turns": ["a"]}\n', '{"id": "p0", "messages": null}\n', '{"id": "p0", "messages": {}}\n'):
        path.write_text(theirs)
        with pytest.raises(DataError, match=r"out\.jsonl:1: not a line that regenerate wrote: give another output file"):
            regenerate(target, prompts("a"), path, GREEDY, batch_size=2)
    for theirs in ('{"turns": ["a"]}', "a note without a newline", '{"turns": ["a"]}\n{"turns": ["b"]}', "note\nnote"):
        path.write_text(theirs)
        with pytest.raises(DataError, match=r"out\.jsonl.*: give another output file|out\.jsonl:1: not valid JSON"):
            regenerate(target, prompts("a"), path, GREEDY, batch_size=2)
        assert path.read_text() == theirs


def test_an_answer_cut_by_the_cap_ends_its_conversation(target, tmp_path):
    """Nobody answers a torso, and an earlier turn would be trained on with an end it never had."""
    asked = prompts(["a", "b"], ["b", "c"], ["hello", "q"], ["q", "hello"])
    regenerate(target, asked, tmp_path / "out.jsonl", DecodeConfig(max_new_tokens=4), batch_size=4)
    turns = {row["finish_reason"]: len(row["messages"]) for row in rows_of(tmp_path / "out.jsonl") if len(row["messages"]) == 2}
    assert turns == {"length": 2}


def test_two_prompts_of_one_name(target, tmp_path):
    """After a kill the second could not be told from the first."""
    with pytest.raises(DataError, match=r"two prompts are called p0: give each its own id"):
        regenerate(target, [*prompts("a"), *prompts("b")], tmp_path / "out.jsonl", GREEDY, batch_size=2)
    assert not (tmp_path / "out.jsonl").exists()


def test_nothing_to_answer(target, tmp_path):
    assert regenerate(target, [], tmp_path / "out.jsonl", GREEDY, batch_size=2) == 0
