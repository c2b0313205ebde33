"""Whole runs: what they leave behind, that they continue bit for bit, and that they stop cleanly."""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run
from tiny_run import MASK, STOP, assistant, drafter_folder, leaves, target_folder, tiny_target, user, write_lines

import dflash_jax.trainer as trainer
from dflash_jax.config import Config, DecodeConfig, DrafterSource, to_json
from dflash_jax.data import ConversationDataset
from dflash_jax.errors import CheckpointError, ConfigError, DataError, DFlashError, NonFiniteLossError, PromptError
from dflash_jax.features import Memory
from dflash_jax.generate import generate
from dflash_jax.hf import load_drafter
from dflash_jax.lock import only_process
from dflash_jax.regenerate import regenerate

make_train_step = trainer.make_train_step
STEPS = {}
"""Compiled steps by what decides them: restarted runs here use the program of the first, as a compilation cache would"""


def remembered_step(config, target, drafter, tx, mesh):
    train = dataclasses.replace(config.train, run_dir="", resume=False, save_every=1, log_every=1, max_skipped=1, init="random")
    key = repr((config.data, config.optim, train, drafter.config, target.config, mesh))
    return STEPS.setdefault(key, make_train_step(config, target, drafter, tx, mesh))


def on_one_device(patch):
    patch.setattr(trainer, "make_mesh", lambda config: tiny_run.mesh())
    patch.setattr(trainer, "make_train_step", remembered_step)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    on_one_device(monkeypatch)


@pytest.fixture
def seen_rows(monkeypatch):
    """Row ids of every step of the runs of a test."""
    ids = []
    place_batch = trainer.place_batch

    def watched(raw, mesh):
        ids.append(raw["id_B"].tolist())
        return place_batch(raw, mesh)

    monkeypatch.setattr(trainer, "place_batch", watched)
    return ids


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """A shell's background jobs ignore SIGINT, and so would our handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def before_step(monkeypatch, step, act):
    """Call `act(state)` before that step of the next run; what it returns replaces the state."""
    remembered = trainer.make_train_step

    def made(*args):
        real = remembered(*args)

        def stepped(state, *rest):
            if int(state.step) == step - 1:
                state = act(state) or state
            return real(state, *rest)

        return stepped

    monkeypatch.setattr(trainer, "make_train_step", made)


def interrupt(state):
    """Ctrl-C while the step is on its way: it ends, and is saved."""
    signal.raise_signal(signal.SIGINT)


def metrics_of(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def final_state(run_dir, step):
    """All arrays of a checkpoint by name, read with Orbax alone."""
    folder = (Path(run_dir) / "checkpoints" / str(step) / "state").absolute()
    return {name: np.asarray(x) for name, x in ocp.StandardCheckpointer().restore(folder).items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert len(a) > 40
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps without a break."""
    with pytest.MonkeyPatch.context() as patch:
        on_one_device(patch)
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        assert trainer.fit(tiny_run.tiny_run(run_dir)) == 0
    return run_dir


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves behind


@pytest.mark.one_cell
def test_metrics(whole):
    lines = metrics_of(whole)
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert set(line) == {
            "loss", "unweighted_loss", "acceptance_length", "accuracy_per_position", "grad_norm", "anchors_per_second",
            "tokens_per_second", "step", "learning_rate", "skipped_steps", "data_wait_share", "flops_per_second",
        }  # fmt: skip
        assert line["skipped_steps"] == 0
        assert len(line["accuracy_per_position"]) == 3
        assert all(0 <= share <= 1 for share in line["accuracy_per_position"])
        assert 1 <= line["acceptance_length"] <= 4
        assert 0 < line["loss"] < 20
        assert line["anchors_per_second"] > 0
        assert 0 <= line["data_wait_share"] < 1
        assert line["flops_per_second"] > 1e3
        assert line["tokens_per_second"] > line["anchors_per_second"], "a row of 20 tokens has 3 anchors"
    assert lines[0]["learning_rate"] == pytest.approx(1e-2), "the second step is at the top of the schedule"
    assert lines[1]["learning_rate"] < lines[0]["learning_rate"]


@pytest.mark.one_cell
def test_diagnostics_are_means_over_the_window(tmp_path, monkeypatch):
    """And TensorBoard events are written beside them."""
    seen = []
    read = trainer._Loop._read

    def note(self, *args):
        seen.append(read(self, *args))
        return seen[-1]

    monkeypatch.setattr(trainer._Loop, "_read", note)
    run_dir = tmp_path / "r"
    assert trainer.fit(tiny_run.tiny_run(run_dir, train__diagnostics=True, train__tensorboard=True)) == 0
    for line, values in zip(metrics_of(run_dir), (seen[:2], seen[2:]), strict=True):
        for name, shape in (("attention_entropy_L", (1,)), ("context_feature_norm", ())):
            assert np.shape(line[name]) == shape
            np.testing.assert_allclose(line[name], np.mean([v[name] for v in values], axis=0), rtol=1e-6)
            assert not np.array_equal(values[0][name], values[1][name])
    assert list((run_dir / "tensorboard").iterdir())


@pytest.mark.one_cell
def test_config_is_saved_merged(whole):
    saved = json.loads((whole / "config.json").read_text())
    assert saved == json.loads(to_json(tiny_run.tiny_run(whole)))
    assert saved["optim"]["beta2"] == Config().optim.beta2, "defaults are written too"


@pytest.mark.one_cell
def test_the_drafter_loads_and_drafts(whole):
    target = tiny_target()
    drafter = load_drafter(whole / "drafter", target, dtype="float32")
    assert (drafter.config.block_size, drafter.config.mask_token_id) == (4, MASK)
    trained = {name: value for name, value in final_state(whole, 4).items() if name.startswith(".params")}
    for (name, ours), theirs in zip(leaves(drafter.params).items(), trained.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2**-8, atol=1e-6, err_msg=f"{name}: bfloat16 of what was trained")
    prompt = target.tokenizer.encode_chat([user("a")])
    plain, fast = (generate(target, d, [prompt], max_new_tokens=12) for d in (None, drafter))
    assert fast.tokens == plain.tokens
    assert fast.stats.pooled.rounds > 0


@pytest.mark.one_cell
def test_only_the_last_checkpoints_stay(whole):
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["2", "4"]
    names = final_state(whole, 4)
    assert sum(".params" in name for name in names) * 3 < len(names), "parameters, two moments of each, and counters"
    assert not any("embed_tokens" in name for name in names), "the target is not in it"


# ---------------------------------------------------------------------------------------------------------------------
# Stopping and continuing


@pytest.mark.parametrize("features", ["online", "memory"])
def test_two_steps_and_two_more_are_four(tmp_path, monkeypatch, capsys, seen_rows, features):
    """Ctrl-C in step 2 saves step 2, says how to go on, and going on gives the same bits from the same rows."""
    config = tiny_run.tiny_run(tmp_path / "parts", train__features=features, train__save_every=100)
    straight = tiny_run.tiny_run(tmp_path / "straight", train__features=features, train__save_every=100)
    assert trainer.fit(straight) == 0
    rows, seen_rows[:] = list(seen_rows), []
    assert len({tuple(ids) for ids in rows}) == 4
    with monkeypatch.context() as patch:
        before_step(patch, 2, interrupt)
        assert trainer.fit(config) == 130
    assert "stopped at step 2 of 4; continue with the same command and --resume" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()) == ["2"]
    resumed = dataclasses.replace(config, train=dataclasses.replace(config.train, resume=True))
    assert trainer.fit(resumed) == 0
    assert "resumed from step 2" in capsys.readouterr().out
    assert seen_rows == rows
    assert_equal(final_state(tmp_path / "parts", 4), final_state(tmp_path / "straight", 4))
    last = [metrics_of(tmp_path / name)[-1] for name in ("parts", "straight")]
    assert last[0]["loss"] == last[1]["loss"]


@pytest.mark.one_cell
def test_packed_rows_train_continue_and_keep_features(tmp_path, monkeypatch, capsys):
    """Rows of several conversations: the same bits after Ctrl-C, and kept features of single conversations fit their places."""
    packed = {"data__packing": True, "data__buckets": [96], "data__batch_size": 2, "train__anchors_per_document": 2}
    straight, config, kept = (tmp_path / name for name in ("straight", "parts", "kept"))
    assert trainer.fit(tiny_run.tiny_run(straight, **packed)) == 0
    assert "12 of 12 conversations" in (out := capsys.readouterr().out)
    assert float(out.split(" conversations a row")[0].split()[-1]) > 2
    with monkeypatch.context() as patch:
        before_step(patch, 3, interrupt)
        assert trainer.fit(tiny_run.tiny_run(config, **packed)) == 130
    assert trainer.fit(tiny_run.tiny_run(config, train__resume=True, **packed)) == 0
    assert_equal(final_state(config, 4), final_state(straight, 4))
    assert trainer.fit(tiny_run.tiny_run(kept, train__features="memory", **packed)) == 0
    for ours, online in zip(metrics_of(kept), metrics_of(straight), strict=True):
        assert ours["loss"] == pytest.approx(online["loss"], rel=1e-2)


@pytest.mark.one_cell
def test_sigterm_saves_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    before_step(monkeypatch, 3, lambda state: signal.raise_signal(signal.SIGTERM))
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r")) == 143
    said = capsys.readouterr()
    assert "stopped at step 3 of 4; continue with the same command and --resume" in said.out
    assert "SIGTERM: saving after this step" in said.err
    assert (tmp_path / "r" / "checkpoints" / "3" / "seal.json").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.one_cell
def test_the_loop_never_waits_for_the_device(tmp_path, monkeypatch):
    """No transfer that was not asked for, and metrics of a step are asked for when the next one is on its way. Steps 3 to 5 are
    recorded by the profiler."""
    events = []
    read, run = trainer._Loop._read, trainer._Loop.run
    remembered = trainer.make_train_step

    def made(*args):
        step = remembered(*args)

        def noted(state, *rest):
            events.append("start")
            return step(state, *rest)

        return noted

    def fetched(self, *args):
        events.append("fetch")
        return read(self, *args)

    def guarded(self, state):
        with jax.transfer_guard("disallow"):
            return run(self, state)

    monkeypatch.setattr(trainer, "make_train_step", made)
    monkeypatch.setattr(trainer._Loop, "_read", fetched)
    monkeypatch.setattr(trainer._Loop, "run", guarded)
    config = tiny_run.tiny_run(
        tmp_path / "r", train__steps=8, train__save_every=100, train__log_every=1, train__profile_steps=[3, 5]
    )
    assert trainer.fit(config) == 0
    assert events == ["start", *["start", "fetch"] * 7, "fetch"]
    assert [line["step"] for line in metrics_of(tmp_path / "r")] == list(range(1, 9))
    assert list((tmp_path / "r" / "profile").rglob("*.xplane.pb"))


@pytest.mark.one_cell
def test_what_is_said(tmp_path, capsys):
    """Cost before and after the first steps, and at the end what the drafter accepts and what to do with it."""
    heldout = write_lines(tmp_path / "p.jsonl", [{"turns": ["a"]}])
    changes = {"train__steps": 8, "data__heldout": [heldout], "train__eval_every": 4, "train__eval_max_new_tokens": 4}
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", **changes, train__peak_tflops=1e-6)) == 0
    said = capsys.readouterr().out
    assert "memory a device: target 0.00, drafter and optimizer 0.00, gradients 0.00: 0.00 GiB, and activations" in said
    assert re.search(r"estimate: \S+ s a step, .* for the 2 steps left", said)
    assert re.search(r"acceptance length on held-out prompts\n +step +pooled +macro\n +4 +1\.\d+ .*\n +8 +1\.\d+", said)
    folder = tmp_path / "r" / "drafter"
    assert f"export --to zlab --drafter {folder} --target {target_folder()} --out {tmp_path / 'r' / 'target-dflash'}" in said
    line = next(line for line in metrics_of(tmp_path / "r") if "loss" in line)
    assert line["mfu"] == pytest.approx(line["flops_per_second"] / 1e6)


@pytest.mark.one_cell
def test_the_best_drafter_is_written_too(tmp_path, monkeypatch, capsys):
    taus = iter([1.5, 1.25])
    monkeypatch.setattr(
        trainer._Loop, "_decode", lambda *_: dict.fromkeys(("eval_acceptance_length", "eval_acceptance_length_macro"), next(taus))
    )
    heldout = write_lines(tmp_path / "p.jsonl", [{"turns": ["a"]}])
    run = tiny_run.tiny_run(tmp_path / "r", data__heldout=[heldout], train__eval_every=2, train__save_every=3, train__keep=1)
    assert trainer.fit(run) == 0
    assert sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir()) == ["2", "4"]
    for folder, step in (("drafter-best", 2), ("drafter", 4)):
        exported = leaves(load_drafter(tmp_path / "r" / folder, tiny_target(), dtype="float32").params)
        trained = [value for name, value in final_state(tmp_path / "r", step).items() if name.startswith(".params")]
        for (name, ours), theirs in zip(exported.items(), trained, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2**-8, atol=1e-6, err_msg=name)
    assert f"that of step 2, which accepted more, to {tmp_path / 'r' / 'drafter-best'}" in capsys.readouterr().out
    # resumed at its end, with the best one damaged meanwhile: the run still ends well
    shutil.rmtree(tmp_path / "r" / "drafter-best")
    (tmp_path / "r" / "checkpoints" / "2" / "identity" / "metadata").write_bytes(b"")
    assert trainer.fit(dataclasses.replace(run, train=dataclasses.replace(run.train, resume=True))) == 0
    said = capsys.readouterr().out
    assert "warning: no drafter-best: " in said
    assert "export --to zlab" in said
    assert not (tmp_path / "r" / "drafter-best").exists()


@pytest.mark.one_cell
def test_bfloat16_trains_like_float32(tmp_path, whole):
    """Products of bfloat16 in target and drafter; parameters, losses and sums stay float32; with TensorBoard."""
    changes = {"target__dtype": "bfloat16", "drafter__dtype": "bfloat16", "train__tensorboard": True}
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", **changes)) == 0
    for ours, exact in zip(metrics_of(tmp_path / "r"), metrics_of(whole), strict=True):
        assert ours["loss"] == pytest.approx(exact["loss"], rel=3e-2)
        assert ours["loss"] != exact["loss"]
    assert {x.dtype for name, x in final_state(tmp_path / "r", 4).items() if ".params" in name} == {np.dtype("float32")}
    (events,) = (tmp_path / "r" / "tensorboard").iterdir()
    assert all(name in events.read_bytes() for name in (b"loss", b"learning_rate", b"accuracy_per_position/3"))


@pytest.mark.one_cell
def test_kept_features_train_like_those_of_the_step(tmp_path, whole):
    """bfloat16 apart; the fourth step sees rows for the second time."""
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__features="memory")) == 0
    for kept, online in zip(metrics_of(tmp_path / "r"), metrics_of(whole), strict=True):
        assert kept["loss"] == pytest.approx(online["loss"], rel=1e-2)


@pytest.mark.one_cell
def test_eight_devices_and_another_mesh_after(tmp_path, monkeypatch, whole):
    """Two steps on 2 x 2 x 2, the rest on one device: the losses of one device alone."""
    config = tiny_run.tiny_run(tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "make_mesh", lambda config: tiny_run.mesh(2, 2, 2))
        before_step(patch, 2, interrupt)
        assert trainer.fit(config) == 130
    assert trainer.fit(dataclasses.replace(config, train=dataclasses.replace(config.train, resume=True))) == 0
    for ours, theirs in zip(metrics_of(tmp_path / "r"), metrics_of(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


@pytest.mark.one_cell
def test_another_config_cannot_continue(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    config = tiny_run.tiny_run(tmp_path / "r", train__resume=True, optim__learning_rate=0.5, train__anchors_per_row=4)
    with pytest.raises(
        CheckpointError, match=r"optim\.learning_rate: 0\.01 there, 0\.5 now; train\.anchors_per_row: 3 there, 4 now"
    ):
        trainer.fit(config)
    config = tiny_run.tiny_run(tmp_path / "r", train__resume=True, data__seed=1)
    with pytest.raises(CheckpointError, match=r"another config \(data: "):
        trainer.fit(config)
    assert_equal(final_state(tmp_path / "r", 4), final_state(whole, 4))
    assert json.loads((tmp_path / "r" / "config.json").read_text())["data"]["seed"] == 0, "nothing was written"


@pytest.mark.one_cell
def test_a_run_folder_in_use_is_left_alone(whole):
    before = (whole / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"holds a run that reached step 4: --resume it, or give another train\.run_dir"):
        trainer.fit(tiny_run.tiny_run(whole, optim__beta1=0.5))
    assert (whole / "metrics.jsonl").read_text() == before
    assert json.loads((whole / "config.json").read_text())["optim"]["beta1"] == 0.9


def test_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint: start without --resume"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__resume=True))


@pytest.mark.one_cell
def test_a_finished_run_may_be_resumed(tmp_path, whole):
    """It only writes the drafter again."""
    shutil.copytree(whole, tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "drafter")
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__resume=True)) == 0
    assert (tmp_path / "r" / "drafter" / "model.safetensors").read_bytes() == (whole / "drafter" / "model.safetensors").read_bytes()


def poison(state):
    """Parameters that no step can use."""
    return state._replace(params=jax.tree.map(lambda x: x * np.float32("nan"), state.params))


@pytest.mark.one_cell
@pytest.mark.parametrize(("save_every", "step"), [(2, 4), (1, 3)])
def test_parameters_that_are_not_finite_are_never_saved(tmp_path, monkeypatch, save_every, step):
    """Poisoned before the third step: no step changes them any more, and the next checkpoint is refused."""
    with monkeypatch.context() as patch:
        before_step(patch, 3, poison)
        message = rf"parameters are not finite at step {step} \(the newest checkpoint is step 2\): lower optim\.learning_rate"
        with pytest.raises(NonFiniteLossError, match=message):
            trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__save_every=save_every))
    assert "3" not in [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()]
    assert all(np.isfinite(x).all() for x in final_state(tmp_path / "r", 2).values())
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__save_every=save_every, train__resume=True)) == 0


def spoil(patch, *steps):
    """The target's features of these steps are not numbers."""
    features, calls = Memory.__call__, []

    def spoiled(self, raw):
        calls.append(None)
        return features(self, raw) * (float("nan") if len(calls) in steps else 1.0)

    patch.setattr(Memory, "__call__", spoiled)


@pytest.mark.one_cell
def test_skipped_steps_are_counted_and_stop_a_run_only_when_they_go_on(tmp_path, monkeypatch):
    """One bad step leaves the metrics to the good ones of its window; two in a row are one too many here, and the message tells."""

    def run(name, max_skipped, *steps):
        with monkeypatch.context() as patch:
            spoil(patch, *steps)
            config = tiny_run.tiny_run(tmp_path / name, train__max_skipped=max_skipped, train__features="memory")
            assert trainer.fit(config) == 0
        return metrics_of(tmp_path / name)

    lines = run("a", 2, 1)
    assert [line["skipped_steps"] for line in lines] == [1, 1]
    assert all(np.isfinite(line["loss"]) for line in lines)
    message = r"2 steps in a row, up to step 4, were skipped .*not finite .*newest checkpoint is step 2\): lower optim\.l"
    with pytest.raises(NonFiniteLossError, match=message):
        run("b", 2, 3, 4)
    assert not (tmp_path / "b" / "drafter").exists()
    first, second = run("c", 3, 1, 2)
    rates = {"data_wait_share", "flops_per_second"}
    assert set(first) == {"skipped_steps", "step", "learning_rate"} | rates, "no loss without a good step"
    assert first["learning_rate"] == second["learning_rate"], "the schedule waits for applied steps"
    assert (second["skipped_steps"], np.isfinite(second["loss"])) == (2, True)


@pytest.mark.one_cell
def test_mean_muon_and_kept_law_continue_bit_for_bit(tmp_path, monkeypatch):
    """A run with a running mean, Muon, and the target's law from kept features: parts give the bits of the whole, and the drafter
    written is the mean."""
    changes = {"optim__ema": 0.9, "optim__optimizer": "muon", "train__loss": "kl", "train__features": "memory"}
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "straight", **changes)) == 0
    with monkeypatch.context() as patch:
        before_step(patch, 2, interrupt)
        assert trainer.fit(tiny_run.tiny_run(tmp_path / "parts", **changes)) == 130
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "parts", **changes, train__resume=True)) == 0
    state = final_state(tmp_path / "parts", 4)
    assert_equal(state, final_state(tmp_path / "straight", 4))
    mean, raw = ({n.removeprefix(part): x for n, x in state.items() if n.startswith(part)} for part in (".ema", ".params"))
    written = leaves(load_drafter(tmp_path / "parts" / "drafter", tiny_target(), dtype="float32").params)
    assert mean.keys() == raw.keys() == written.keys()
    for name, ours in written.items():
        np.testing.assert_allclose(ours, mean[name], rtol=2**-8, atol=1e-6, err_msg=name)
    assert any(np.abs(mean[name] - raw[name]).max() > 1e-3 for name in mean)


@pytest.mark.one_cell
def test_a_full_disk_while_saving(tmp_path, monkeypatch, whole):
    """The second save fails; the first one is whole and the run goes on from it to the same end."""
    save = ocp.Checkpointer.save

    def full(self, folder, *args, **kwargs):
        if folder.name == "4":
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, folder, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", full)
        with pytest.raises(CheckpointError, match=r"step 4 could not be written .*No space left.* newest .* is step 2"):
            trainer.fit(tiny_run.tiny_run(tmp_path / "r"))
    assert not (tmp_path / "r" / "drafter").exists()
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__resume=True)) == 0
    assert_equal(final_state(tmp_path / "r", 4), final_state(whole, 4))


# ---------------------------------------------------------------------------------------------------------------------
# It learns


@pytest.mark.one_cell
def test_tau_rises(tmp_path):
    """A drafter of the target's own answers to six prompts: useless at first, then more than 2.5 tokens a verify pass."""
    target = tiny_target()
    prompts = [{"id": text, "set": "s", "turns": [text]} for text in "abcdef"]
    answers = tmp_path / "answers.jsonl"
    assert regenerate(target, prompts, answers, DecodeConfig(max_new_tokens=30), batch_size=8) == 6
    heldout = write_lines(tmp_path / "prompts.jsonl", [{"turns": [text]} for text in "abcdef"])
    config = tiny_run.tiny_run(
        tmp_path / "r", data__train=[str(answers)], data__heldout=[heldout], data__max_length=64, data__buckets=[64],
        train__steps=160, train__anchors_per_row=16, train__eval_every=40, train__eval_max_new_tokens=24, train__log_every=40,
        train__save_every=1000, train__init="random",
    )  # fmt: skip
    assert trainer.fit(config) == 0
    lines = metrics_of(tmp_path / "r")
    assert [line["step"] for line in lines] == [40, 40, 80, 80, 120, 120, 160, 160]
    losses, real = ([line[name] for line in lines if name in line] for name in ("loss", "eval_acceptance_length"))
    estimated = [line["acceptance_length"] for line in lines if "loss" in line]
    assert losses == sorted(losses, reverse=True)
    best = max(range(4), key=lambda i: (real[i], i))
    kept = {path.name for path in (tmp_path / "r" / "checkpoints").iterdir()}
    assert {"160", str(40 * best + 40)} <= kept, "the newest and the best"
    assert estimated[-1] > 2.5 > estimated[0], estimated
    assert real[-1] > 2.5, real
    assert real[-1] > real[0]
    last = lines[-1]
    assert set(last) == {"step", "eval_acceptance_length", "eval_acceptance_length_macro", "eval_accepted_per_position"}
    assert sorted(last["eval_accepted_per_position"], reverse=True) == last["eval_accepted_per_position"]
    # training's own estimate and a real decode of the exported drafter tell the same story
    drafter = load_drafter(tmp_path / "r" / "drafter", target, dtype="float32")
    encoded = [target.tokenizer.encode_chat([user(text)]) for text in "abcdef"]
    out = generate(target, drafter, encoded, max_new_tokens=24)
    assert out.tokens == generate(target, None, encoded, max_new_tokens=24).tokens
    assert out.stats.acceptance_length == pytest.approx(real[-1], abs=0.3), "bfloat16 on disk costs little"


# ---------------------------------------------------------------------------------------------------------------------
# Where a run starts, and what it refuses


def first_parameters(tmp_path, monkeypatch, **changes):
    """Parameters before the first step."""
    seen = {}

    def look(self, state):
        seen.update({jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state.params)})
        return state, False

    monkeypatch.setattr(trainer._Loop, "run", look)
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", **changes)) == 130
    return seen


@pytest.mark.one_cell
def test_start_from_a_drafter(tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_run.DRAFTER, path=drafter_folder())
    started = first_parameters(tmp_path, monkeypatch, train__init="loaded", drafter__path=config.path)
    stored = leaves(load_drafter(drafter_folder(), tiny_target(), dtype="float32").params)
    for ours, theirs in zip(started.values(), stored.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.one_cell
def test_a_loaded_drafter_stays_what_it_is(tmp_path, monkeypatch):
    """What training decides may change; a size that is asked for and is not there is refused, and defaults ask for nothing."""
    seen = {}
    monkeypatch.setattr(trainer._Loop, "run", lambda self, state: (seen.update(config=self.drafter.config), (state, False))[1])
    loaded = {"train__init": "loaded", "drafter__path": drafter_folder()}
    run = tiny_run.tiny_run(tmp_path / "a", **loaded, drafter__loss_decay_gamma=2.5, drafter__dropout=0.2)
    assert trainer.fit(run) == 130
    assert (seen["config"].loss_decay_gamma, seen["config"].dropout) == (2.5, 0.2)
    plain = dataclasses.replace(run, drafter=DrafterSource(path=drafter_folder(), mask_token_id=MASK))
    assert trainer.fit(dataclasses.replace(plain, train=dataclasses.replace(plain.train, run_dir=str(tmp_path / "b")))) == 130
    stored = load_drafter(drafter_folder(), tiny_target()).config
    for name, value in (("block_size", 5), ("num_draft_layers", 2), ("temperature", 0.5), ("learned_mask_embedding", True)):
        with pytest.raises(
            ConfigError, match=rf"drafter\.{name} is {value}, but the drafter of drafter\.path has {getattr(stored, name)}"
        ):
            trainer.fit(tiny_run.tiny_run(tmp_path / name, **loaded, **{f"drafter__{name}": value}))


@pytest.mark.one_cell
def test_kept_features_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    with pytest.raises(ConfigError, match=r"train\.features memory needs more memory than there is: use online"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__features="memory"))


@pytest.mark.one_cell
def test_start_from_the_target(tmp_path, monkeypatch):
    started = first_parameters(tmp_path, monkeypatch, train__init="target")
    up = next(value for name, value in started.items() if "up_proj" in name)
    np.testing.assert_array_equal(up, tiny_target().params["layers"][3]["mlp"]["up_proj"]["kernel"][...])


@pytest.mark.one_cell
def test_only_the_frequent_tokens_are_learned_and_drafted(tmp_path):
    config = tiny_run.tiny_run(tmp_path / "r", drafter__draft_vocab_size=5, train__steps=1)
    assert trainer.fit(config) == 0
    rows = ConversationDataset(config.data, tiny_target().tokenizer, vocab_size=tiny_target().config.vocab_size)
    records = rows.records.read(range(len(rows)))
    seen = Counter(np.concatenate([record.tokens_T[record.mask_T] for record in records]).tolist())
    wanted = sorted(sorted(seen, key=lambda token: (-seen[token], token))[:5])
    folder = tmp_path / "r" / "drafter"
    assert load_drafter(folder, tiny_target()).config.draft_token_ids == tuple(wanted)
    # a run that starts from it goes on with the same tokens, unless it asks for others
    loaded = {"train__init": "loaded", "drafter__path": str(folder), "train__steps": 1}
    for name, size, count in (("same", 0, 5), ("other", 7, 7)):
        assert trainer.fit(tiny_run.tiny_run(tmp_path / name, drafter__draft_vocab_size=size, **loaded)) == 0
        ids = load_drafter(tmp_path / name / "drafter", tiny_target()).config.draft_token_ids
        assert len(ids) == count
        assert set(wanted) <= set(ids)


def broken_lines(tmp_path):
    good = {"messages": [user("a"), assistant("hello")]}
    (tmp_path / "bad.jsonl").write_text(json.dumps(good) + '\n{"messages": [\n')
    return [str(tmp_path / "bad.jsonl")]


@pytest.mark.one_cell
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"data__train": []}, ConfigError, r"data\.train names no file"),
        ({"data__train": ["absent.jsonl"]}, DataError, r"absent\.jsonl cannot be read"),
        ({"data__train": broken_lines}, DataError, r"bad\.jsonl:2: not valid JSON"),
        ({"data__batch_size": 3, "optim__accumulation": 2}, ConfigError, r"data\.batch_size 3 is not a multiple"),
        ({"drafter__mask_token_id": None}, ConfigError, r"mask_token_id is missing: name an unused token id"),
        ({"drafter__mask_token_id": STOP}, ConfigError, r"mask_token_id 2 is a stop or pad token"),
        ({"drafter__mask_token_id": 267}, ConfigError, r"mask_token_id 267 is outside the 267 embedding rows"),
        ({"drafter__target_layer_ids": [0, 4]}, ConfigError, r"target_layer_ids \[0, 4\] must lie in 0\.\.3"),
        ({"drafter__target_layer_ids": []}, ConfigError, r"5 taps do not fit a target of 4 layers"),
        ({"drafter__head_dim": 16}, ConfigError, r"train\.init target needs head_dim 8"),
        ({"train__init": "loaded"}, ConfigError, r"train\.init loaded needs drafter\.path"),
        ({"train__log_every": 0}, ConfigError, r"train\.log_every is 0: it must be at least 1"),
        ({"train__save_every": 0}, ConfigError, r"train\.save_every is 0"),
        ({"train__profile_steps": [5, 2]}, ConfigError, r"train\.profile_steps is \[5, 2\]: give the first and the last step"),
        ({"train__anchors_per_row": 0}, ConfigError, r"train\.anchors_per_row is 0"),
        ({"train__peak_tflops": -1.0}, ConfigError, r"train\.peak_tflops is -1\.0: it must be at least 0"),
        ({"train__run_dir": "gs://bucket/run"}, ConfigError, r"train\.run_dir is gs://bucket/run: give a folder that is mounted"),
        ({"train__anchors_per_document": -1}, ConfigError, r"train\.anchors_per_document is -1: it must be at least 0"),
        ({"data__train": ["absent*.jsonl"]}, DataError, r"data\.train: absent\*\.jsonl matches no file"),
        ({"train__logit_chunk": 0}, ConfigError, r"train\.logit_chunk is 0"),
        ({"train__steps": -1}, ConfigError, r"train\.steps is -1: it must be at least 0"),
        ({"data__num_epochs": 0}, ConfigError, r"data\.num_epochs is 0"),
        ({"train__seed": 2**32}, ConfigError, r"train\.seed is 4294967296: it must be below"),
        ({"data__seed": -1}, ConfigError, r"data\.seed is -1: it must be at least 0"),
        ({"train__vocab_sample": -3}, ConfigError, r"train\.vocab_sample is -3"),
        ({"train__max_skipped": 0}, ConfigError, r"train\.max_skipped is 0: it must be at least 1"),
        ({"drafter__draft_vocab_size": -1}, ConfigError, r"drafter\.draft_vocab_size is -1: give 0"),
        ({"drafter__draft_vocab_size": 268}, ConfigError, r"drafter\.draft_vocab_size is 268: give 0 \(all\) to 267"),
        (
            {"drafter__draft_vocab_size": 9, "train__vocab_sample": 200},
            ConfigError,
            r"train\.vocab_sample is 200, but this drafter only learns the 9 tokens",
        ),
        ({"data__heldout": ["absent.jsonl"], "train__eval_every": 2}, DataError, r"absent\.jsonl cannot be read"),
        (
            {"data__heldout": lambda path: [write_lines(path / "long.jsonl", [{"turns": ["ab " * 200]}])], "train__eval_every": 2},
            PromptError,
            r"data\.heldout: prompt 0 has \d+ tokens; the context has room for",
        ),
    ],
)
def test_refused_runs(tmp_path, changes, kind, message):
    """Before the first step, and nothing but the empty folder is left."""
    changes = {name: value(tmp_path) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(kind, match=message) as raised:
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", **changes))
    assert isinstance(raised.value, DFlashError)
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


@pytest.mark.one_cell
def test_a_finished_drafter_is_not_overwritten(tmp_path, whole):
    shutil.copytree(whole / "drafter", tmp_path / "r" / "drafter")
    with pytest.raises(ConfigError, match="is the drafter of an earlier run: give another train.run_dir"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r"))


@pytest.mark.one_cell
def test_one_training_at_a_time(tmp_path):
    with only_process(tmp_path), pytest.raises(ConfigError, match="is being written by another process"):
        trainer.fit(tiny_run.tiny_run(tmp_path))


@pytest.mark.one_cell
def test_rows_longer_than_the_context_are_refused(tmp_path):
    """The tiny target reads 128 tokens; `max_length` alone would let longer rows pass."""
    text = [{"messages": [user("ab " * 100), assistant("hello " * 60)]}]
    changes = {"data__train": [write_lines(tmp_path / "long.jsonl", text)], "data__max_length": 400, "data__buckets": [400]}
    with pytest.raises(
        ConfigError, match=r"data\.max_length is 400 and there are rows of \d+ tokens, but the target's context has"
    ):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", **changes))


@pytest.mark.one_cell
def test_heldout_prompts_are_not_trained_on(tmp_path):
    config = tiny_run.tiny_run(tmp_path / "r")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, heldout=config.data.train))
    with pytest.raises(ConfigError, match="which is trained on: hold other prompts out"):
        trainer.fit(config)


@pytest.mark.one_cell
def test_a_target_without_tokenizer(tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(target_folder(), folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer: text needs one, so add tokenizer\.json"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", target__path=str(folder)))
