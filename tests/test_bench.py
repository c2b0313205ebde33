"""The measuring command: what it prints, what it counts, and what it refuses."""

import dataclasses
import json
import math

import numpy as np
import pytest
from tiny_models import scripted_drafter
from tiny_run import MASK, VOCAB, drafter_folder, tiny_run, tiny_target, user, write_lines

import dflash_jax.bench as module
from dflash_jax.bench import bench
from dflash_jax.config import DecodeConfig
from dflash_jax.conversations import first_messages
from dflash_jax.decode import decode
from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError, ConfigError, DataError, PromptError
from dflash_jax.generate import compiled, generate, start
from dflash_jax.widths import WidthTable

pytestmark = pytest.mark.one_cell

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


class Clock:
    """Stands for `time_decoding`: seconds and tokens by (speculative?, dtype, prompt), and the calls in their order."""

    def __init__(self, seconds, texts):
        self.seconds, self.texts, self.calls = seconds, texts, []

    def __call__(self, target, drafter, prompt, options, widths=None):
        kind, dtype = "plain", target.config.dtype
        if drafter is not None:
            kind = "speculative" if np.any(drafter.params["fuser"]["fc"]["kernel"][...]) else "useless"
            assert drafter.config.dtype == dtype
        kind = f"adaptive {kind}" if widths is not None else kind
        assert options.block_size == 3
        self.calls.append((kind, dtype, prompt[0]))
        tokens = self.texts(kind, dtype, prompt[0])
        rounds = len(tokens) - 1 if "useless" in kind else 2
        return module.Timing(tokens, len(tokens) - 1, self.seconds[kind, dtype], rounds)


@pytest.mark.parametrize("plain_best", ["float32", "bfloat16"])
def test_timing(config, monkeypatch, plain_best, tmp_path):
    """Each kind is timed in its faster dtype, in turn, and its text is compared in the dtype that was timed."""
    seconds = {
        ("plain", "float32"): 2.0,
        ("plain", "bfloat16"): 4.0,
        ("speculative", "float32"): 3.0,
        ("speculative", "bfloat16"): 1.0,
        ("useless", "bfloat16"): 6.0,
        ("adaptive speculative", "bfloat16"): 0.5,
        ("adaptive useless", "bfloat16"): 1.6,
    }
    if plain_best == "bfloat16":
        seconds["plain", "bfloat16"] = 1.5

    def texts(kind, dtype, prompt):
        """bfloat16 has another text than float32; prompt 4 has another one in wide passes."""
        return [prompt, int(dtype == "bfloat16"), int(prompt == 4 and kind == "speculative"), 0, 0]

    clock = Clock(seconds, texts)
    monkeypatch.setattr(module, "time_decoding", clock)
    config = dataclasses.replace(config, decode=DecodeConfig(block_size=3, widths=str(tmp_path / "widths.json")))
    result = module._speed(tiny_target(), config, [[i, i] for i in range(5)])
    assert (result["plain_dtype"], result["dtype"]) == (plain_best, "bfloat16")
    assert result["plain_tokens_per_second"] == pytest.approx(4 / seconds["plain", plain_best], abs=0.01)
    assert result["tokens_per_second"] == pytest.approx(4.0)
    assert result["speedup"] == pytest.approx(seconds["plain", plain_best], abs=1e-3)
    assert result["identical_timed"] == pytest.approx(4 / 5)
    assert result["diverged_beyond_rounding"] == 1, "the two tokens are no near-tie in the tiny target"
    assert result["break_even_acceptance_length"] == pytest.approx(6 / seconds["plain", plain_best], abs=1e-3)
    assert result["adaptive_speedup"] == pytest.approx(2 * seconds["plain", plain_best], abs=1e-3)
    assert result["adaptive_speedup_of_a_useless_drafter"] == pytest.approx(seconds["plain", plain_best] / 1.6, abs=1e-3)
    trial = [(kind, dtype, i) for i in range(3) for dtype in ("float32", "bfloat16") for kind in ("plain", "speculative")]
    assert clock.calls[:12] == trial
    timed = [call for call in clock.calls[12:] if call[2] >= 3]
    twin = [("plain", "bfloat16")] if plain_best == "float32" else []  # what the text is compared with; not in the rate
    adaptive = ("adaptive speculative", "bfloat16")
    assert [call[:2] for call in timed] == 2 * [("plain", plain_best), ("speculative", "bfloat16"), adaptive, *twin]
    useless = [call for call in clock.calls if "useless" in call[0]]
    assert useless == [(kind, "bfloat16", i) for i in range(3) for kind in ("useless", "adaptive useless")]


def test_pooled_and_macro(config, capsys, monkeypatch):
    """A drafter with luck of its own in every prompt: tau 1, 2 and 4 there."""
    target = tiny_target()
    encoded = sorted((target.tokenizer.encode_chat([user(text)]) for text in TEXTS), key=len)
    answers = generate(target, None, encoded, max_new_tokens=NEW + 4, stop_token_ids=()).tokens
    texts = [prompt + answer for prompt, answer in zip(encoded, answers, strict=True)]
    sizes = {
        "vocab_size": VOCAB,
        "target_hidden_dim": 32,
        "draft_hidden_dim": 32,
        "num_target_layers": 4,
        "target_layer_ids": (0, 2),
    }
    lucky = scripted_drafter(texts, good=[0, 1, 3], **sizes, block_size=4, mask_token_id=MASK)
    monkeypatch.setattr(module, "load_drafter", lambda *args, **options: lucky)
    monkeypatch.setattr(module, "_speed", lambda *args: {"speedup": 1.0})
    assert bench(dataclasses.replace(config, bench=dataclasses.replace(config.bench, batch_size=4))) == 0
    _, result = report(capsys)
    emitted = [len(generate(target, None, [prompt], max_new_tokens=NEW).tokens[0]) - 1 for prompt in encoded]
    rounds = [math.ceil(n / tau) for n, tau in zip(emitted, (1, 2, 4), strict=True)]
    taus = [n / r for n, r in zip(emitted, rounds, strict=True)]
    assert result["acceptance_length"] == pytest.approx(sum(emitted) / sum(rounds), abs=1e-4)
    assert result["acceptance_length_macro"] == pytest.approx(sum(taus) / 3, abs=1e-4)
    assert result["acceptance_length_macro"] > 1.1 * result["acceptance_length"], "else the two could be swapped unseen"


def test_system_message_is_read_and_several_turns_are_refused(config, tmp_path):
    rows = [{"messages": [{"role": "system", "content": "be brief"}, user("a")]}, {"turns": ["a", "b"]}]
    alone = write_lines(tmp_path / "system.jsonl", rows[:1])
    assert first_messages(module.read_prompts([alone])[0]) == rows[0]["messages"]
    both = write_lines(tmp_path / "both.jsonl", rows)
    with pytest.raises(DataError, match=r"prompt both:2 has 2 turns, but one is measured at a time"):
        bench(dataclasses.replace(config, bench=dataclasses.replace(config.bench, prompts=[both])))


def test_a_prompt_that_is_too_long_is_named(config, tmp_path):
    long = write_lines(tmp_path / "long.jsonl", [{"turns": ["a"]}, {"turns": ["ab " * 200], "id": "x7"}])
    with pytest.raises(PromptError, match=r"^prompt x7: it has \d+ tokens; the context has room for"):
        bench(dataclasses.replace(config, bench=dataclasses.replace(config.bench, prompts=[long])))


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


@pytest.mark.parametrize(
    ("sets", "count", "wanted"),
    [
        ("hchchcccccccccc", 6, [0, 2, 4, 1, 7, 11]),
        ("hcccc", 4, [0, 1, 2, 3]),
        ("hc", 9, [0, 1]),
        ("cccc", 2, [0, 2]),
    ],
)
def test_timed_prompts_are_as_many_of_each_set(sets, count, wanted):
    assert module.timed_prompts(sets, count) == sorted(wanted)


def test_limit_counts_a_set(config):
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


def test_time_is_that_of_decoding_alone(tmp_path, monkeypatch):
    """Timed and untimed decoding give the same text; the prefill's token is not counted."""
    target = tiny_target()
    prompt = target.tokenizer.encode_chat([user("a")])
    drafter = Drafter(*(getattr(module.load_drafter(drafter_folder(), target, dtype="float32"), n) for n in ("config", "params")))
    table = WidthTable(tmp_path / "widths.json")
    monkeypatch.setattr("dflash_jax.widths.measure_widths", lambda *_: {1: 1.0, 3: 1.0})
    for d, widths in ((None, None), (drafter, None), (drafter, table)):
        options = DecodeConfig(max_new_tokens=NEW, block_size=3)
        compiled(target, d, start(target, d, [prompt], options if d else DecodeConfig(NEW))[0], "match", widths)
        programs = decode._cache_size()
        timing = module.time_decoding(target, d, prompt, options, widths)
        assert decode._cache_size() == programs, "the clock ran while something was compiled"
        assert timing.tokens == generate(target, None, [prompt], max_new_tokens=NEW).tokens[0]
        assert timing.emitted == len(timing.tokens) - 1
        assert timing.seconds > 0
        assert timing.rounds <= timing.emitted
    assert table.path.exists()


@pytest.mark.usefixtures("one_dtype")
@pytest.mark.parametrize("rule", ["match", "block"])
def test_sampled(config, capsys, rule):
    """A sample of `match` is compared with the plain one of the same seed; the other rules' samples are their own."""
    how = DecodeConfig(temperature=0.9, top_p=0.95, seed=4, verify=rule)
    assert bench(dataclasses.replace(config, decode=how)) == 0
    _, result = report(capsys)
    assert (result["temperature"], result["verify"]) == (0.9, rule)
    assert result["identical"] is (True if rule == "match" else None)
    assert result["identical_prompts"] == (3 if rule == "match" else None)
    assert (result["identical_timed"] is None) == (rule == "block")
    assert result["acceptance_length"] >= 1
