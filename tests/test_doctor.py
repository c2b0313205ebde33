"""The doctor: every check names a fault that is planted, and says nothing about a sound pair."""

import dataclasses
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_drafter import random_drafter
from tiny_models import CONTEXT, VOCAB, dense_drafter, dense_target
from tiny_run import STOP, drafter_folder, target_folder, tiny_target, write_lines
from tiny_text import tiny_tokenizer

import dflash_jax as dj
import dflash_jax.__main__ as commands
import dflash_jax.doctor as module
import dflash_jax.wiring as wiring
from dflash_jax.blocks import slot_weights
from dflash_jax.cli import run
from dflash_jax.doctor import (
    FEW_REACHED,
    acceptance_check,
    feature_checks,
    measured_checks,
    reading_check,
    text_checks,
    weight_check,
    wiring_check,
)
from dflash_jax.drafter import Drafter
from dflash_jax.findings import stated, stated_checks, tokenizer_check
from dflash_jax.generate import generate
from dflash_jax.model_config import RopeConfig
from dflash_jax.wiring import NEW_TOKENS, PROMPTS, Outcome, Sample, Trials, answer, other_wirings, tap_features

pytestmark = pytest.mark.one_cell

SHIPPED = Path(__file__).parents[1] / "assets" / "smollm2-135m-dflash"


def status_of(argv):
    with pytest.raises(SystemExit) as stopped:
        run(commands.main, ["doctor", *argv])
    return stopped.value.code


def levels(findings):
    return {finding.check: finding.level for finding in findings}


def only(findings, check):
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


def edited(tmp_path, change, folder=None):
    """A drafter folder like `folder` with a changed config.json."""
    copy = tmp_path / "edited"
    shutil.copytree(folder or drafter_folder(), copy)
    values = json.loads((copy / "config.json").read_text())
    change(values)
    (copy / "config.json").write_text(json.dumps(values))
    return str(copy)


# ---------------------------------------------------------------------------------------------------------------------
# What config.json states: a folder with one fault, through the command


def nested(**fields):
    """These stand at the top level too."""
    return lambda values: (values.update(fields), values["dflash_config"].update(fields))


def top(**fields):
    return lambda values: values.update(fields)


def sliding(window):
    return top(use_sliding_window=True, sliding_window=window, layer_types=["sliding_attention"], is_causal=False)


def no_mask(values):
    values.pop("mask_token_id")
    values["dflash_config"].pop("mask_token_id")


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
STATED = {
    "sound": (top(), 0, "ok   taps: [0, 2] of 4 layers, ascending"),
    "tap out of range": (nested(target_layer_ids=[0, 7]), 1, "FAIL taps: [0, 7] do not all lie in 0..3"),
    "tap twice": (nested(target_layer_ids=[2, 2]), 1, "FAIL taps: [2, 2] name a layer twice"),
    "last layer": (nested(target_layer_ids=[0, 3]), 1, "FAIL taps: [0, 3] hold the last layer"),
    "tap order": (nested(target_layer_ids=[2, 0]), 1, "WARN taps: [2, 0] are not ascending"),
    "mask out of range": (nested(mask_token_id=267), 1, "FAIL mask: 267 is outside the 267 embedding rows"),
    "mask is a stop": (nested(mask_token_id=STOP), 1, "FAIL mask: 2 '<|im_end|>' is a stop or pad token"),
    "no mask": (no_mask, 1, "FAIL mask: mask_token_id is missing"),
    "width": (top(hidden_size=64), 1, "FAIL width: made for a target with 64, but this has 32"),
    "depth": (top(num_target_layers=5), 1, "FAIL layers: made for a target with 5, but this has 4"),
    "vocabulary": (top(vocab_size=300), 1, "FAIL vocabulary: made for a target with 300, but this has 267"),
    "theta": (top(rope_theta=5e5, rope_parameters=None), 1, "WARN rope: theta 500000.0 (target 10000.0)"),
    "scaling": (top(rope_scaling=LINEAR, rope_parameters=LINEAR), 1, "WARN rope: type linear (target default), factor 4.0"),
    "partial rotary": (
        top(partial_rotary_factor=0.5, rope_parameters=None),
        1,
        "WARN rope: partial_rotary_factor 0.5 (target 1.0)",
    ),
    "short window": (sliding(2), 1, "FAIL window: sliding_window 2 is shorter than a block of 4"),
    "window": (sliding(16), 0, "ok   window: 16 tokens"),
    "short context": (top(max_position_embeddings=64), 1, "WARN window: max_position_embeddings is 64, the target's 128"),
    "unknown field": (top(speed=3), 1, "FAIL drafter: "),
}


@pytest.fixture
def stated_only(monkeypatch):
    """No forward pass."""
    monkeypatch.setattr(module, "load_target", lambda path, dtype: tiny_target())
    monkeypatch.setattr(module, "answer", lambda *args: None)
    monkeypatch.setattr(module, "measured_checks", lambda *args: iter(()))


@pytest.mark.parametrize("name", STATED)
def test_stated(name, tmp_path, stated_only, capsys):
    change, status, line = STATED[name]
    assert status_of(["--target", "t", "--drafter", edited(tmp_path, change)]) == status
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert any(shown.startswith(line) for shown in lines), out
    wrong = [shown for shown in lines[:-1] if not shown.startswith("ok ")]
    assert all(" -> " in shown or shown.startswith("FAIL drafter: ") for shown in wrong), "each with its mend"
    checks = {shown.split(":")[0][5:] for shown in wrong}
    assert checks <= {line.split(":")[0][5:], "drafter"}, "and nothing else is said to be wrong"
    summary = "nothing found" if not wrong else lines[-1]
    assert lines[-1].startswith(f"{len(lines) - 1} checks: ")
    assert all(check in summary for check in checks)


def test_a_refused_folder_still_shows_all_it_can(tmp_path, stated_only, capsys):
    """A width of its own kind, a learned mask and a short window, beside the field that is refused."""

    def change(values):
        no_mask(values)
        sliding(2)(values)
        values |= {"speed": 3, "target_hidden_size": 64}
        values["dflash_config"]["dflash_jax"] |= {"learned_mask_embedding": True, "own_embedding": True, "own_head": True}

    assert status_of(["--target", "t", "--drafter", edited(tmp_path, change)]) == 1
    out = capsys.readouterr().out
    for line in ("FAIL width: made for a target with 64, but this has 32", "FAIL window: sliding_window 2", "FAIL drafter: "):
        assert line in out, out
    assert " mask: " not in out


def test_a_refused_folder_of_speculators_is_read_too():
    values = {"speed": 3, "transformer_layer_config": {"hidden_size": 32, "mask_token_id": 9}, "aux_hidden_state_layer_ids": [2, 4]}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values | {"speculators_model_type": "dflash"}))
        found = stated(folder)
    assert (found.target_hidden_dim, found.mask_token_id, found.target_layer_ids, found.rope) == (32, 9, (1, 3), None)


def test_a_mask_that_two_places_dispute_is_not_called_missing(tmp_path, stated_only, capsys):
    assert status_of(["--target", "t", "--drafter", edited(tmp_path, top(mask_token_id=9))]) == 1
    out = capsys.readouterr().out
    assert "mask_token_id is missing" not in out
    assert "make them agree" in out


@pytest.mark.parametrize("text", ["{", "[]"])
def test_damaged_config(text, tmp_path, stated_only, capsys):
    folder = edited(tmp_path, top())
    (Path(folder) / "config.json").write_text(text)
    assert status_of(["--target", "t", "--drafter", folder]) == 1
    assert f"FAIL drafter: {folder}" in capsys.readouterr().out


def test_missing_folders(stated_only, tmp_path, monkeypatch, capsys):
    assert status_of(["--target", "t", "--drafter", "absent-folder"]) == 1
    assert "FAIL drafter: absent-folder does not exist" in capsys.readouterr().out
    assert status_of(["--target", "t"]) == 2
    assert "arguments are required: drafter" in capsys.readouterr().err
    assert status_of(["--target", "t", "--drafter", "d", "--prompts", "absent.jsonl"]) == 1
    assert "error: absent.jsonl cannot be read" in capsys.readouterr().err
    monkeypatch.undo()
    assert status_of(["--target", str(tmp_path / "absent"), "--drafter=" + drafter_folder()]) == 1
    assert capsys.readouterr().out.startswith("FAIL target: ")


def test_options(monkeypatch, tmp_path):
    """They reach the doctor, in both ways to write an option."""
    seen = []
    monkeypatch.setattr(commands, "doctor", lambda *args: seen.append(args) or 0)
    prompts = write_lines(tmp_path / "p.jsonl", [{"turns": ["a"]}])
    assert commands.main(["doctor", "--target", "t", "--drafter=d"]) == 0
    assert commands.main(["doctor", "--target", "t", "--drafter", "d", "--dtype=float32", "--prompts", prompts]) == 0
    assert seen == [("t", "d", "bfloat16", ()), ("t", "d", "float32", [{"id": "p:1", "set": "p", "turns": ["a"]}])]


def test_tokenizers(tmp_path):
    target = tiny_target()
    assert tokenizer_check(target, drafter_folder()).level == "ok"
    smaller = dj.targets.DenseTarget(dataclasses.replace(target.config, vocab_size=200), target.params, target.tokenizer)
    assert "267 tokens, but 200 embedding rows" in str(tokenizer_check(smaller, drafter_folder()))
    assert tokenizer_check(smaller, drafter_folder()).level == "FAIL"
    none = tokenizer_check(dataclasses.replace(target, tokenizer=None), drafter_folder())
    assert none.level == "WARN"
    assert "random token ids" in none.seen
    folder = edited(tmp_path, top())
    shutil.copy(Path(target_folder()) / "tokenizer.json", folder)
    assert tokenizer_check(target, folder).level == "ok"
    other = json.loads(tiny_tokenizer().backend.to_str())
    other["model"]["merges"] = []
    (Path(folder) / "tokenizer.json").write_text(json.dumps(other))
    finding = tokenizer_check(target, folder)
    assert finding.level == "FAIL"
    assert "other ids" in finding.seen


# ---------------------------------------------------------------------------------------------------------------------
# Weights, text, features


def with_value(drafter, value):
    """One entry of a projection replaced."""
    return Drafter(drafter.config, jax.tree.map(lambda x: x.at[0, 0].set(value) if x.shape == (32, 40) else x, drafter.params))


def test_weights():
    drafter = random_drafter()
    assert weight_check(drafter).level == "ok"
    for value in (np.inf, np.nan):
        finding = weight_check(with_value(drafter, value))
        assert finding.level == "FAIL"
        assert "layers" in finding.seen
        assert "gate_proj" in finding.seen
        assert "o_proj" not in finding.seen
    finding = weight_check(with_value(drafter, -7e4))
    assert finding.level == "WARN"
    assert "7e+04, infinite in float16" in finding.seen


def test_a_weight_too_large_for_bfloat16(tmp_path, stated_only, capsys):
    """Finite in the file, infinite once loaded."""
    folder = edited(tmp_path, top())
    tensors = load_file(Path(folder) / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"][0, 0] = np.float32(3.4e38)
    save_file(tensors, Path(folder) / "model.safetensors")
    assert weight_check(dj.load_drafter(folder, tiny_target())).level == "WARN"
    assert "up_proj" in weight_check(dj.load_drafter(folder, tiny_target(), dtype="bfloat16")).seen


def hand_sample(answers, prompt=2):
    """Rows of token 1 with these answers."""
    rows = [[1] * prompt + row for row in answers]
    tokens_BT = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        tokens_BT[i, : len(row)] = row
    return Sample(tokens_BT, np.full(len(rows), prompt, np.int32), np.asarray([len(row) for row in rows], np.int32))


def test_text():
    d = random_drafter(draft_token_ids=(3, 4, 5)).config
    sound = hand_sample([[3, 4, 5, 4], [5, 6]])
    assert sound.answers().tolist() == [3, 4, 5, 4, 5, 6]
    assert levels(text_checks(d, sound)) == {"sample": "ok", "mask in text": "ok", "draft vocabulary": "ok"}
    masked = hand_sample([[3, 4, 60, 4], [5, 60]])
    assert only(text_checks(d, masked), "mask in text")[:3] == (
        "FAIL",
        "mask in text",
        "the target wrote the mask token 60 2 times",
    )
    rare = only(text_checks(d, hand_sample([[3, 6, 7, 4]])), "draft vocabulary")
    assert rare.level == "WARN"
    assert rare.seen.startswith("50% of the answers' tokens are among the 3")


def features(**changes):
    random = np.random.default_rng(0)
    taps = {i: (i * random.standard_normal((3, 9, 8))).astype(np.float32) for i in (1, 3, 5)}
    length_B = np.asarray([9, 6, 4], np.int32)
    for x_BTD in taps.values():
        x_BTD[:, 0] = 1e30  # the first position does not count, nor does padding
        x_BTD[np.arange(9) >= length_B[:, None]] = np.nan
    return taps, length_B


FAULTY_FEATURES = {
    "sound": (lambda taps: None, "ok", "ok", "vary"),
    "not finite": (lambda taps: taps[3].__setitem__((1, 4, 2), np.inf), "FAIL", None, "taps [3] are not finite"),
    "constant": (lambda taps: taps[3].__setitem__(slice(None), taps[3][0, 1]), "FAIL", "ok", "taps [3] are the same"),
    "zero": (lambda taps: taps[1].__setitem__(slice(None), 0), "FAIL", "WARN", "taps [1] are the same"),
    "twice": (lambda taps: taps.__setitem__(5, taps[3] * 1.0001), "FAIL", "ok", "taps [(3, 5)] are equal"),
    "out of line": (lambda taps: taps.__setitem__(5, taps[5] * 5e3), "ok", "WARN", "[5] out of line"),
    "float16": (lambda taps: taps[5].__setitem__((0, 3, 0), 7e4), "ok", "WARN", "infinite in float16"),
}


@pytest.mark.parametrize("name", FAULTY_FEATURES)
def test_features(name):
    change, vary, size, words = FAULTY_FEATURES[name]
    taps, length_B = features()
    change(taps)
    findings = list(feature_checks(taps, length_B))
    assert levels(findings) == {"features": vary} | ({"feature size": size} if size else {})
    assert any(words in finding.seen for finding in findings)


# ---------------------------------------------------------------------------------------------------------------------
# Acceptance


def blocks_that_accept(shares, blocks=1000):
    """accepted [1, A], where slot k + 1 stands in a share of the blocks."""
    accepted = np.zeros((1, blocks), int)
    for share in shares:
        accepted[0, : round(share * blocks)] += 1
    return accepted, np.ones((1, blocks, len(shares) + 1), bool)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([0.5, 0.24, 0.12], None),
        ([0.9, 0.8, 0.7], None),
        ([0.04, 0.02, 0.0], "flat zero"),
        ([0.0, 0.0, 0.0], "flat zero"),
        ([0.2, 0.18, 0.15], "first slot low"),
        ([0.6, 0.1, 0.05], "decays too fast at slot 2"),
        ([0.8, 0.7, 0.2], "decays too fast at slot 3"),
        ([0.4, 0.04, 0.0], "decays too fast at slot 2"),
        ([0.5, 0.2, 0.02], "decays too fast at slot 3"),
        ([0.3, 0.04, 0.0], "decays too fast at slot 2"),
        ([0.6, 0.35, 0.2, 0.04, 0.0], "decays too fast at slot 4"),
    ],
)
def test_acceptance_shapes(shares, words):
    finding = acceptance_check(*blocks_that_accept(shares))
    assert finding.level == ("FAIL" if words else "ok")
    assert finding.seen == (f"{words}, " if words else "") + "slots " + " ".join(f"{share:.2f}" for share in shares)


def test_few_blocks_say_nothing_about_a_later_slot():
    """Slot 3 stands in none of the blocks that reach it, but these are few."""
    accepted, supervised = blocks_that_accept([0.6, 0.4, 0.0])
    supervised[0, FEW_REACHED - 1 :, 3] = False
    assert acceptance_check(accepted, supervised).level == "ok"
    supervised[0, FEW_REACHED - 1, 3] = True
    assert "decays too fast at slot 3" in acceptance_check(accepted, supervised).seen


def test_acceptance_does_not_count_slots_past_the_end():
    """Half of the blocks end after slot 1: slot 2 stands in every block that has it."""
    accepted, supervised = blocks_that_accept([1.0, 0.5])
    supervised[0, 500:, 2] = False
    assert acceptance_check(accepted, supervised).seen == "slots 1.00 1.00"


@pytest.mark.parametrize("token", [5, 6])
def test_a_mask_that_stops_or_pads(tiny_pair, token):
    target, drafter, *_ = tiny_pair
    config = dataclasses.replace(drafter.config, mask_token_id=token)
    assert only(stated_checks(config, target), "mask").level == "FAIL"


@pytest.fixture(scope="module")
def tiny_pair():
    """A dense target without tokenizer, its answers, and a random drafter that drafts some tokens only."""
    target = dense_target(stop_token_ids=(5,), pad_token_id=6)
    drafter = dense_drafter(draft_token_ids=tuple(range(0, VOCAB - 1, 2)))
    sample = answer(target, mask=60)
    return target, drafter, sample, tap_features(target, sample, (0, 1))


def test_answers_without_a_tokenizer(tiny_pair):
    """Random prompts without special ids, and the target's greedy answers to them."""
    target, _, sample, _ = tiny_pair
    prompts = [row[:n].tolist() for row, n in zip(sample.tokens_BT, sample.prompt_B, strict=True)]
    assert len(prompts) == len(PROMPTS)
    assert not {5, 6, 60} & {token for prompt in prompts for token in prompt}
    out = generate(target, None, prompts, max_new_tokens=NEW_TOKENS)
    for row, prompt, length, tokens in zip(sample.tokens_BT, prompts, sample.length_B, out.tokens, strict=True):
        assert row[:length].tolist() == prompt + tokens
    assert len({len(tokens) for tokens in out.tokens}) > 1, "some stop early"


def test_answers_with_a_tokenizer(monkeypatch):
    """With a chat template, and without one; no answer is decoded here."""
    monkeypatch.setattr(wiring, "generate", lambda *args, **options: SimpleNamespace(tokens=[[7, 8]]))
    target = tiny_target()
    for template in (target.tokenizer.chat_template, None):
        bare = dataclasses.replace(target, tokenizer=tiny_tokenizer(template=template))
        sample = answer(bare, [{"id": "x", "set": "s", "turns": ["hello"]}])
        prompt = sample.tokens_BT[0, : sample.prompt_B[0]].tolist()
        text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n" if template else "hello"
        assert bare.tokenizer.decode(prompt, skip_special=False) == text
        assert sample.answers().tolist() == [7, 8]


def test_trials_equal_drafting_one_by_one(tiny_pair):
    """accepted and score of single blocks, from the cached context and a Python loop."""
    target, drafter, sample, taps = tiny_pair
    trials = Trials(target, drafter, sample, taps)
    d, length = drafter.config, sample.tokens_BT.shape[1]
    weights_K = np.asarray(slot_weights(d.block_size, d.loss_decay_gamma))
    positions_1T = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    def one(taps_1TM, token_1, anchor):
        cache = drafter.extend_context(drafter.params, taps_1TM, positions_1T, drafter.init_cache(1, length))
        block = drafter.embed_block(drafter.params, token_1, d.block_size, lambda ids: target.embed(target.params, ids))
        hidden = drafter.propose(drafter.params, block, anchor + jnp.arange(d.block_size, dtype=jnp.int32)[None], cache)
        return target.unembed(target.params, hidden)[0]

    chosen = np.argwhere(trials.valid_BA & (trials.given.accepted_BA > 0))[:2].tolist()
    ends = [[b, int(trials.valid_BA[b].sum()) - 1] for b in (0, 3)]
    assert len(chosen) == 2, "else the loop below proves little"
    for b, a in [*chosen, *ends]:
        anchor = int(sample.prompt_B[b]) + a
        taps_1TM = jnp.asarray(np.concatenate([taps[0], taps[1]], -1)[b : b + 1])
        logits_KV = np.asarray(one(taps_1TM, jnp.asarray(sample.tokens_BT[b, anchor])[None], jnp.int32(anchor)))
        logits_KV = logits_KV.astype(np.float64)[:, list(d.draft_token_ids)]
        chance_KV = np.exp(logits_KV - logits_KV.max(-1, keepdims=True))
        chance_KV /= chance_KV.sum(-1, keepdims=True)
        accepted, score, standing = 0, 0.0, True
        for k in range(1, d.block_size):
            if anchor + k >= sample.length_B[b]:
                break
            label = int(sample.tokens_BT[b, anchor + k])
            standing = standing and d.draft_token_ids[int(np.argmax(logits_KV[k]))] == label
            accepted += standing
            if label in d.draft_token_ids:
                score += weights_K[k] * chance_KV[k, d.draft_token_ids.index(label)]
        assert trials.given.accepted_BA[b, a] == accepted
        assert trials.given.score_BA[b, a] == pytest.approx(score, rel=1e-4)
    assert not trials.given.accepted_BA[~trials.valid_BA].any()
    assert trials.given.finite


def test_a_random_drafter_is_flat_zero(tiny_pair):
    """Through all measured checks: nothing is said of wirings that are no better."""
    target, drafter, sample, _ = tiny_pair
    findings = list(measured_checks(target, drafter, sample))
    assert only(findings, "acceptance").seen.startswith("flat zero")
    assert levels(findings)["wiring"] == "ok"
    short = sample._replace(length_B=sample.prompt_B + 3)
    assert only(measured_checks(target, drafter, short), "acceptance").level == "WARN"


def test_infinite_activations(tiny_pair):
    """Finite weights whose products are not."""
    target, drafter, sample, _ = tiny_pair
    huge = Drafter(drafter.config, jax.tree.map(lambda x: x * 1e30 if x.ndim == 2 else x, drafter.params))
    findings = list(measured_checks(target, huge, sample))
    assert levels(findings)["weights"] == "WARN"
    assert findings[-1][:3] == ("FAIL", "activations", "the drafter's hidden states are not finite")


def test_compare_is_a_paired_t_test(tiny_pair):
    target, drafter, sample, taps = tiny_pair
    trials = Trials(target, drafter, sample, taps)
    random = np.random.default_rng(0)
    first, second = (Outcome(trials.given.accepted_BA, random.random(trials.valid_BA.shape) + up, True) for up in (0, 0.1))
    sums = []
    for b in range(trials.valid_BA.shape[0]):
        for start in range(0, trials.valid_BA.shape[1], drafter.config.block_size):
            group = [a for a in range(start, start + drafter.config.block_size) if a < NEW_TOKENS - 1 and trials.valid_BA[b, a]]
            if group:
                sums.append(sum(second.score_BA[b, a] - first.score_BA[b, a] for a in group))
    z = np.mean(sums) / (np.std(sums, ddof=1) / np.sqrt(len(sums)))
    assert z > 1
    assert trials.compare(first, second) == pytest.approx(z)
    assert trials.compare(second, first) == pytest.approx(-z)
    assert trials.compare(first, first) == 0


def names(d, target, context=CONTEXT):
    return {wiring.name: (wiring.config, wiring.taps) for wiring in other_wirings(d, target.config, context)}


def test_other_wirings():
    """What is tried: each once, none that is no other, no tap below layer 0 or at the last layer."""
    target = dense_target(num_layers=12, rope=RopeConfig(100.0))
    d = dense_drafter(num_target_layers=12, target_layer_ids=(1, 5, 9)).config
    found = names(d, target)
    taps = {"reversed": (9, 5, 1), "- 1": (0, 4, 8), "+ 1": (2, 6, 10)}
    assert {f"target_layer_ids {name}": (d, ids) for name, ids in taps.items()} == {
        name: value for name, value in found.items() if name.startswith("target")
    }, "the default spread is the given one"
    assert set(found) - {f"target_layer_ids {name}" for name in taps} == {"is_causal true"}
    assert found["is_causal true"] == (dataclasses.replace(d, causal=(True, True)), (1, 5, 9))
    odd = dataclasses.replace(
        d,
        target_layer_ids=(10, 0),
        rope=RopeConfig(7.0, "linear", 4.0),
        sliding_window=(20, None),
        causal=(True, False),
    )
    found = names(odd, target)
    assert set(found) == {
        "target_layer_ids reversed", "target_layer_ids of the default spread", "the target's rope", "plain rope", "is_causal false",
        "no sliding window",
    }  # fmt: skip
    assert found["the target's rope"][0].rope == target.config.rope
    assert found["plain rope"][0].rope == RopeConfig(7.0)
    assert found["no sliding window"][0].sliding_window == (None, None)
    assert "no sliding window" not in names(odd, target, context=20)


# ---------------------------------------------------------------------------------------------------------------------
# The shipped pair

# What the target answers to the first ten prompts, in place of a decode.
ANSWERS = [
    "```python\ndef is_palindrome(s):\n    return s == s[::-1]\n```\n\nThis function uses Python's slicing feature to "
    "reverse the string `s` and then checks if it's equal to the original",
    "The capital of France is Paris. It is a city renowned for its historical landmarks, culture, and the iconic Eiffel "
    "Tower. Paris is also known for its cultural institutions, including the Louvre Museum, Notre-Dame Cathedral, and",
    "1. **Learn a New Language**: The most effective way to learn a new language is by immersion. This means that you "
    "should immerse yourself in the language and culture.\n\n2. **Learn a New Language**: The best way to learn",
    "```python\ndef largest_of_list(lst):\n    return max(lst)\n```\n\nThis function uses the built-in `max` function to "
    "find the largest number in the list. If the list is empty,",
    "The sky is blue because of a process called Rayleigh scattering. When sunlight reaches our planet, it's made up of "
    "different colors of light. Blue light has shorter wavelengths than other colors of light, which makes it scattered "
    "in different directions.",
    "To solve this problem, we need to consider the time it takes for the train to cover 60 miles at a rate of 30 miles "
    "per hour. This is a classic example of a classic equation: 60 * ",
    "Dear Huggles,\n\nI hope this letter finds you well.\n\nI am writing to express my gratitude for your support and "
    "guidance in my academic journey. I am writing to thank you for your unwavering dedication to my education and",
    "I'm glad you asked for a recipe. Here's a simple and delicious recipe for pancakes:\n\n**Ingredients:**\n\n* 2 100g "
    "pancake crunches\n* 1 cup all-purpose flour",
    "```python\nclass BankAccount:\n    def __init__(self, account_number, initial_balance=0):\n        "
    "self.account_number = account_number\n        self.balance = initial_balance\n\n    def deposit(self,",
    "The main causes of climate change are multifaceted and interconnected. Climate change refers to the alteration of "
    "the Earth's climate system, primarily driven by human activities such as burning fossil fuels, deforestation, and "
    "the emission of greenhouse gases like carbon dioxide. However",
]


@pytest.fixture(scope="module")
def shipped():
    """Target, sample and drafter; a run of the same config and features is done once for all tests."""
    target = dj.load_target("smollm2-135m")
    rows = []
    for prompt, text in zip(PROMPTS, ANSWERS, strict=False):
        encoded = target.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        rows.append((encoded, target.tokenizer.encode(text)[:NEW_TOKENS]))
    tokens_BT = np.zeros((len(rows), max(len(prompt) + len(text) for prompt, text in rows)), np.int32)
    for row, (prompt, text) in enumerate(rows):
        tokens_BT[row, : len(prompt) + len(text)] = prompt + text
    prompt_B = np.asarray([len(prompt) for prompt, _ in rows], np.int32)
    sample = Sample(tokens_BT, prompt_B, prompt_B + np.asarray([len(text) for _, text in rows], np.int32))
    every = tap_features(target, sample, tuple(range(29)))
    done, once = {}, Trials.run

    def run_once(self, config, taps_BTM):
        key = (dataclasses.replace(config, target_layer_ids=()), hashlib.sha256(np.ascontiguousarray(taps_BTM)).digest())
        if key not in done:
            done[key] = once(self, config, taps_BTM)
        return done[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trials, "run", run_once)
        patch.setattr(module, "load_target", lambda path, dtype: target)
        patch.setattr(module, "answer", lambda *args: sample)
        patch.setattr(module, "tap_features", lambda target, sample, layers: {i: every[i] for i in layers})
        yield target, sample, dj.load_drafter(SHIPPED, target), every


def test_the_shipped_drafter_is_sound(shipped, capsys):
    assert status_of(["--target", "smollm2-135m", "--drafter", str(SHIPPED)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in lines[:-1])
    assert lines[-1] == f"{len(lines) - 1} checks: nothing found"
    shown = next(line for line in lines if "acceptance: slots" in line).split("slots ")[1].split()
    # at random anchors of 112 evaluation answers (docs/log.md, 2026-12-01)
    assert [float(share) for share in shown[:3]] == pytest.approx([0.558, 0.302, 0.169], abs=0.06)


def test_reversed_taps_through_the_command(shipped, tmp_path, capsys):
    folder = edited(tmp_path, nested(target_layer_ids=[27, 20, 14, 8, 1]), SHIPPED)
    assert status_of(["--target", "smollm2-135m", "--drafter", folder]) == 1
    out = capsys.readouterr().out
    assert "FAIL acceptance: flat zero" in out
    assert "FAIL features read" in out
    assert "with target_layer_ids reversed (z " in out
    assert "-> set target_layer_ids to [1, 8, 14, 20, 27]\n" in out
    assert "3 FAIL (acceptance, features read, wiring); 1 WARN (taps)" in out


MISWIRED = {
    "taps one too high": ({"target_layer_ids": (2, 9, 15, 21, 28)}, "target_layer_ids - 1", None),
    "two taps exchanged": ({"target_layer_ids": (1, 8, 20, 14, 27)}, "target_layer_ids ascending", None),
    "theta": ({"rope": RopeConfig(1e3)}, "the target's rope", None),
    "causal": ({"causal": (True, True, True)}, "is_causal false", None),
    "window": ({"sliding_window": (8, 8, 8)}, "no sliding window", None),
}


@pytest.mark.parametrize("fault", MISWIRED)
def test_wirings_of_the_shipped_drafter(fault, shipped):
    """The fault costs acceptance only, and the right wiring is named. Others than the right one are tried in the tests above."""
    changes, right, shape = MISWIRED[fault]
    target, sample, sound, every = shipped
    drafter = Drafter(dataclasses.replace(sound.config, **changes), sound.params)
    trials = Trials(target, drafter, sample, every)
    wirings = [w for w in other_wirings(drafter.config, target.config, sample.tokens_BT.shape[1]) if w.name == right]
    finding = wiring_check(trials, wirings)
    assert finding.level == "FAIL"
    assert f"with {right} (z " in finding.seen
    assert finding.mend == wirings[0].mend
    accepted = acceptance_check(trials.given.accepted_BA, trials.supervised_BAK)
    assert accepted.level == ("FAIL" if shape else "ok")
    assert accepted.seen.startswith(shape or "slots")


def test_features_that_do_not_vary(shipped):
    """The drafter runs, but what it reads says nothing."""
    target, sample, sound, every = shipped
    same = {i: np.broadcast_to(x_BTD[1, 40], x_BTD.shape) for i, x_BTD in every.items()}
    assert reading_check(Trials(target, sound, sample, same)).level == "FAIL"
    assert reading_check(Trials(target, sound, sample, every)).level == "ok"
