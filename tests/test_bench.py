"""The measuring command: what it prints, what it counts, and what it refuses."""

import json

import pytest
from tiny_run import drafter_folder, tiny_run, tiny_target, user, write_lines

import dflash_jax.bench as module
from dflash_jax.bench import bench
from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError, ConfigError, DataError
from dflash_jax.generate import generate

TEXTS = ["a", "hello", "12 xyz"]
NEW = 12


@pytest.fixture
def config(tmp_path):
    prompts = write_lines(
        tmp_path / "mine.jsonl", [{"turns": [text], "set": name} for text, name in zip(TEXTS, ("one", "two", "one"), strict=True)]
    )
    return tiny_run(
        tmp_path / "r", drafter__path=drafter_folder(), bench__prompts=[prompts], bench__max_new_tokens=NEW, bench__batch_size=1,
        bench__timed_prompts=2,
    )  # fmt: skip


@pytest.fixture
def one_dtype(monkeypatch):
    """Half of the compilations; both are tried in one test."""
    monkeypatch.setattr(module, "DTYPES", ("float32",))


def report(capsys):
    lines = capsys.readouterr().out.strip().splitlines()
    return lines, json.loads(lines[-1])


def test_report(config, capsys):
    """The last line is JSON with the keys that are promised; a random drafter has one token a pass and changes no text."""
    assert bench(config) == 0
    lines, result = report(capsys)
    promised = {
        "acceptance_length", "acceptance_length_macro", "plain_tokens_per_second", "tokens_per_second", "speedup", "identical",
        "identical_timed", "prompts",
    }  # fmt: skip
    assert promised <= set(result)
    assert result["identical"] is True
    assert result["prompts"] == result["identical_prompts"] == 3
    assert 1 <= result["acceptance_length"] < 1.3
    assert 1 <= result["acceptance_length_macro"] < 1.3
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"], rel=1e-2)
    assert 0 <= result["identical_timed"] <= 1
    assert {result["dtype"], result["plain_dtype"]} <= {"float32", "bfloat16"}
    assert (result["block_size"], result["max_new_tokens"], result["timed_prompts"]) == (4, NEW, 2)
    assert any(line.startswith("one: acceptance length ") for line in lines)
    assert any(line.startswith("two: acceptance length ") for line in lines)


def test_numbers_are_those_of_generate(config, capsys, monkeypatch):
    """Pooled and macro tau of a drafter with some luck: one that proposes the plain answer in every other prompt."""
    monkeypatch.setattr(module, "_speed", lambda *args: {"speedup": 1.0})
    assert bench(config) == 0
    _, result = report(capsys)
    target = tiny_target()
    drafter = module.load_drafter(drafter_folder(), target, dtype="float32")
    rows = [
        generate(target, drafter, [target.tokenizer.encode_chat([user(text)])], max_new_tokens=NEW).stats.pooled for text in TEXTS
    ]
    pooled = sum(row.emitted for row in rows) / sum(row.rounds for row in rows)
    assert result["acceptance_length"] == pytest.approx(pooled, abs=1e-4)
    assert result["acceptance_length_macro"] == pytest.approx(sum(row.emitted / row.rounds for row in rows) / 3, abs=1e-4)


@pytest.mark.usefixtures("one_dtype")
def test_a_text_that_differs_is_reported(config, capsys, monkeypatch):
    """If decoding were wrong, the bench would say so and fail."""

    def wrong(target, drafter, prompts, **options):
        out = generate(target, drafter, prompts, **options)
        if drafter is not None and len(prompts[0]) == len(target.tokenizer.encode_chat([user("12 xyz")])):
            out.tokens[0][3] += 1
        return out

    monkeypatch.setattr(module, "generate", wrong)
    monkeypatch.setattr(module, "_speed", lambda *args: {"speedup": 1.0})
    assert bench(config) == 1
    _, result = report(capsys)
    assert result["identical"] is False
    assert result["identical_prompts"] == 2


def test_limit_counts_a_set(config):
    import dataclasses

    def kept(limit):
        return [
            p["turns"][0]
            for p in module._prompts(dataclasses.replace(config, bench=dataclasses.replace(config.bench, limit=limit)))
        ]

    assert kept(0) == TEXTS
    assert kept(1) == ["a", "hello"]
    with pytest.raises(ConfigError, match=r"bench\.limit is -1"):
        kept(-1)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"drafter__path": None}, ConfigError, r"drafter\.path is not set: name the drafter to measure"),
        ({"drafter__path": "absent"}, CheckpointError, r"absent"),
        ({"bench__prompts": ["absent.jsonl"]}, DataError, r"absent\.jsonl cannot be read"),
        ({"bench__timed_prompts": 0}, ConfigError, r"bench\.timed_prompts is 0: it must be at least 1"),
        ({"bench__max_new_tokens": 1}, ConfigError, r"bench\.max_new_tokens is 1: it must be at least 2"),
        ({"bench__batch_size": 0}, ConfigError, r"bench\.batch_size is 0"),
    ],
)
def test_refused_measurements(tmp_path, changes, kind, message):
    prompts = write_lines(tmp_path / "p.jsonl", [{"turns": ["a"]}])
    with pytest.raises(kind, match=message):
        bench(tiny_run(tmp_path / "r", **({"drafter__path": drafter_folder(), "bench__prompts": [prompts]} | changes)))


def test_time_is_that_of_decoding_alone(config):
    """Timed and untimed decoding give the same text; the prefill's token is not counted."""
    target = tiny_target()
    prompt = target.tokenizer.encode_chat([user("a")])
    drafter = Drafter(*(getattr(module.load_drafter(drafter_folder(), target, dtype="float32"), n) for n in ("config", "params")))
    for d in (None, drafter):
        timing = module.time_decoding(target, d, prompt, NEW, None)
        assert timing.tokens == generate(target, None, [prompt], max_new_tokens=NEW).tokens[0]
        assert timing.emitted == len(timing.tokens) - 1
        assert timing.seconds > 0
