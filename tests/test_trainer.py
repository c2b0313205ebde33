"""Whole runs: what they leave behind, that they continue bit for bit, and that they stop cleanly."""

import dataclasses
import functools
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
from tiny_models import DRAFTER
from tiny_run import MASK, STOP, assistant, drafter_folder, leaves, target_folder, tiny_target, user, write_lines

from dflash_jax import heldout, preflight, trainer
from dflash_jax.checkpoint import Checkpoints
from dflash_jax.config import Config, DecodeConfig, DrafterSource, to_json
from dflash_jax.data import ConversationDataset
from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError, ConfigError, DataError, DFlashError, NonFiniteLossError, PromptError
from dflash_jax.features import Features, Memory
from dflash_jax.first_drafter import drafter_config, first_config, first_drafter
from dflash_jax.generate import generate
from dflash_jax.hf import describe_text_target, load_drafter, save_drafter
from dflash_jax.lock import only_process
from dflash_jax.regenerate import regenerate

make_train_step = trainer.make_train_step
STEPS = {}
"""Compiled steps by what decides them: restarted runs here use the program of the first, as a compilation cache would"""


def remembered_step(config, target, drafter, tx, mesh):
    ours = {"run_dir": "", "resume": False, "save_every": 1, "log_every": 1, "eval_every": 1, "max_skipped": 1, "init": "random"}
    train = dataclasses.replace(config.train, **ours, profile_steps=[], tensorboard=False, keep=1, peak_tflops=0.0)
    data = dataclasses.replace(config.data, heldout=[])
    key = repr((data, config.optim, train, drafter.config, target.config, mesh))
    return STEPS.setdefault(key, make_train_step(config, target, drafter, tx, mesh))


@functools.cache
def remembered_target(path, dtype, mesh):
    return load_text_target(path, dtype, mesh)


load_text_target = trainer.load_text_target


def on_one_device(patch):
    patch.setattr(preflight, "make_mesh", lambda config: tiny_run.mesh())
    patch.setattr(trainer, "make_train_step", remembered_step)
    patch.setattr(trainer, "load_text_target", remembered_target)


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

        stepped.trace = real.trace
        return stepped

    monkeypatch.setattr(trainer, "make_train_step", made)


def interrupt(state):
    """Ctrl-C while the step is on its way: it ends, and is saved."""
    signal.raise_signal(signal.SIGINT)


def metrics_of(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def saved(run_dir):
    return sorted(path.name for path in (Path(run_dir) / "checkpoints").iterdir())


def final_state(run_dir, step):
    """All arrays of a checkpoint by name, read with Orbax alone."""
    folder = (Path(run_dir) / "checkpoints" / str(step) / "state").absolute()
    return {name: np.asarray(x) for name, x in ocp.StandardCheckpointer().restore(folder).items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert len(a) > 40
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


def assert_written(folder, trained):
    """A drafter folder holds these parameters, rounded to bfloat16."""
    written = leaves(load_drafter(folder, tiny_target(), dtype="float32").params)
    assert len(written) == len(trained)
    for (name, ours), theirs in zip(written.items(), trained.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2**-8, atol=1e-6, err_msg=name)


def part(state, name):
    """The arrays of a saved state below a name."""
    return {key: x for key, x in state.items() if key.startswith(name)}


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
def test_bfloat16_trains_like_float32(tmp_path, whole, monkeypatch):
    """Products of bfloat16 in target and drafter; parameters, losses and sums stay float32. With TensorBoard, and diagnostics,
    which are means over the window of a line."""
    seen = []
    read = trainer._Loop._read

    def note(self, *args):
        seen.append(read(self, *args))
        return seen[-1]

    monkeypatch.setattr(trainer._Loop, "_read", note)
    changes = {"target__dtype": "bfloat16", "drafter__dtype": "bfloat16", "train__tensorboard": True, "train__diagnostics": True}
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", **changes)) == 0
    for ours, exact, values in zip(metrics_of(tmp_path / "r"), metrics_of(whole), (seen[:2], seen[2:]), strict=True):
        assert ours["loss"] == pytest.approx(exact["loss"], rel=3e-2)
        assert ours["loss"] != exact["loss"]
        for name, shape in (("attention_entropy_L", (1,)), ("context_feature_norm", ())):
            assert np.shape(ours[name]) == shape
            np.testing.assert_allclose(ours[name], np.mean([v[name] for v in values], axis=0), rtol=1e-6)
            assert not np.array_equal(values[0][name], values[1][name])
    assert {x.dtype for x in part(final_state(tmp_path / "r", 4), ".params").values()} == {np.dtype("float32")}
    (events,) = (tmp_path / "r" / "tensorboard").iterdir()
    assert all(name in events.read_bytes() for name in (b"loss", b"learning_rate", b"accuracy_per_position/3"))


@pytest.mark.one_cell
def test_config_is_saved_merged(whole):
    saved = json.loads((whole / "config.json").read_text())
    assert saved == json.loads(to_json(tiny_run.tiny_run(whole)))
    assert saved["optim"]["beta2"] == Config().optim.beta2, "defaults are written too"


@pytest.mark.one_cell
def test_the_drafter_loads_and_drafts(whole):
    target = tiny_target()
    assert_written(whole / "drafter", part(final_state(whole, 4), ".params"))
    drafter = load_drafter(whole / "drafter", target, dtype="float32")
    assert (drafter.config.block_size, drafter.config.mask_token_id) == (4, MASK)
    prompt = target.tokenizer.encode_chat([user("a")])
    plain, fast = (generate(target, d, [prompt], max_new_tokens=12) for d in (None, drafter))
    assert fast.tokens == plain.tokens
    assert fast.stats.pooled.rounds > 0


@pytest.mark.one_cell
def test_only_the_last_checkpoints_stay(whole):
    assert saved(whole) == ["2", "4"]
    names = final_state(whole, 4)
    assert sum(".params" in name for name in names) * 3 < len(names), "parameters, two moments of each, and counters"
    assert not any("embed_tokens" in name for name in names), "the target is not in it"


# ---------------------------------------------------------------------------------------------------------------------
# Stopping and continuing


def test_two_steps_and_two_more_are_four(tmp_path, monkeypatch, capsys, seen_rows, whole):
    """Ctrl-C in step 2 saves step 2, says how to go on, and going on gives the bits of a run without break, from the same rows."""
    config = tiny_run.tiny_run(tmp_path / "parts", train__save_every=100)
    with monkeypatch.context() as patch:
        before_step(patch, 2, interrupt)
        assert trainer.fit(config) == 130
    assert "stopped at step 2 of 4; continue with the same command and --resume" in capsys.readouterr().out
    assert saved(tmp_path / "parts") == ["2"]
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "parts", train__save_every=100, train__resume=True)) == 0
    assert "resumed from step 2" in capsys.readouterr().out
    rows = ConversationDataset(config.data, tiny_target().tokenizer, vocab_size=tiny_target().config.vocab_size)
    assert seen_rows == [rows.batch(step)["id_B"].tolist() for step in range(4)]
    assert len({tuple(ids) for ids in seen_rows}) == 4
    assert_equal(final_state(tmp_path / "parts", 4), final_state(whole, 4))
    assert metrics_of(tmp_path / "parts")[-1]["loss"] == metrics_of(whole)[-1]["loss"]


@pytest.mark.one_cell
def test_all_that_a_run_keeps_continues_bit_for_bit(tmp_path, monkeypatch, capsys):
    """Packed rows, a running mean, Muon, and the target's law from kept features: parts give the bits of the whole, the drafter
    written is the mean, and features of single conversations, kept, train like those of packed rows."""
    changes = {
        "data__packing": True, "data__buckets": [96], "data__batch_size": 2, "train__anchors_per_document": 2,
        "optim__ema": 0.9, "optim__optimizer": "muon", "train__loss": "kl",
    }  # fmt: skip
    kept = changes | {"train__features": "memory"}
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "straight", **kept)) == 0
    assert "12 of 12 conversations" in (out := capsys.readouterr().out)
    assert float(out.split(" conversations a row")[0].split()[-1]) > 2
    with monkeypatch.context() as patch:
        before_step(patch, 3, interrupt)
        assert trainer.fit(tiny_run.tiny_run(tmp_path / "parts", **kept)) == 130
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "parts", **kept, train__resume=True)) == 0
    state = final_state(tmp_path / "parts", 4)
    assert_equal(state, final_state(tmp_path / "straight", 4))
    mean, raw = part(state, ".ema"), part(state, ".params")
    assert_written(tmp_path / "parts" / "drafter", mean)
    assert any(np.abs(x - y).max() > 1e-3 for x, y in zip(mean.values(), raw.values(), strict=True))
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "online", **changes)) == 0
    for ours, online in zip(metrics_of(tmp_path / "straight"), metrics_of(tmp_path / "online"), strict=True):
        assert ours["loss"] == pytest.approx(online["loss"], rel=1e-2)


@pytest.mark.one_cell
def test_kept_features_train_like_those_of_the_step(tmp_path, whole):
    """bfloat16 apart; the fourth step sees rows for the second time."""
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__features="memory")) == 0
    for kept, online in zip(metrics_of(tmp_path / "r"), metrics_of(whole), strict=True):
        assert kept["loss"] == pytest.approx(online["loss"], rel=1e-2)


@pytest.mark.one_cell
def test_sigterm_within_an_evaluation(tmp_path, monkeypatch, capsys):
    """It is heard after the next rounds: the state is saved, not measured, and the message says how to go on."""
    rounds, advancing = [], heldout.advancing

    def counted(*args):
        advance = advancing(*args)

        def one(state, count):
            rounds.append(count)
            if len(rounds) == 2:
                signal.raise_signal(signal.SIGTERM)
            return advance(state, count)

        return one

    monkeypatch.setattr(heldout, "ROUNDS", 1)
    monkeypatch.setattr(heldout, "advancing", counted)
    prompts = write_lines(tmp_path / "p.jsonl", [{"turns": ["a"]}])
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", data__heldout=[prompts], train__eval_every=3)) == 143
    assert rounds == [1, 1], "an answer of 96 tokens takes more"
    said = capsys.readouterr()
    assert "stopped at step 3 of 4; continue with the same command and --resume" in said.out
    assert "SIGTERM: saving after this step" in said.err
    assert json.loads((tmp_path / "r" / "checkpoints" / "3" / "seal.json").read_text())["acceptance_length"] is None
    assert not any("eval_acceptance_length" in line for line in metrics_of(tmp_path / "r"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    changes = {"data__heldout": [prompts], "train__eval_every": 3, "train__resume": True}
    assert trainer.fit(tiny_run.tiny_run(tmp_path / "r", **changes)) == 0
    measured = [line["step"] for line in metrics_of(tmp_path / "r") if "eval_acceptance_length" in line]
    assert measured == [3, 4], "what was cut is made up for"


@pytest.mark.one_cell
def test_the_loop_never_waits_for_the_device(tmp_path, monkeypatch):
    """No transfer that was not asked for, and metrics of a step are asked for when the next one is on its way. Steps 2 and 3 are
    recorded by the profiler."""
    events = []
    read, run = trainer._Loop._read, trainer._Loop.run
    remembered = trainer.make_train_step

    def made(*args):
        step = remembered(*args)

        def noted(state, *rest):
            events.append("start")
            return step(state, *rest)

        noted.trace = step.trace
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
    config = tiny_run.tiny_run(tmp_path / "r", train__save_every=100, train__log_every=1, train__profile_steps=[2, 3])
    assert trainer.fit(config) == 0
    assert events == ["start", *["start", "fetch"] * 3, "fetch"]
    assert [line["step"] for line in metrics_of(tmp_path / "r")] == list(range(1, 5))
    assert list((tmp_path / "r" / "profile").rglob("*.xplane.pb"))


@pytest.mark.one_cell
def test_what_is_said_and_the_best_drafter(tmp_path, monkeypatch, capsys):
    """Cost before and after the first steps; at the end what the drafter accepts, which one accepted most, and what to do with it.
    Resumed at its end, with other held-out prompts and then with the best one damaged, the run still ends well."""
    taus = iter([1.5, 1.25])
    names = ("eval_acceptance_length", "eval_acceptance_length_macro")
    monkeypatch.setattr(heldout.HeldOut, "measure", lambda self, *_: dict.fromkeys(names, next(taus)) | {"eval_prompts": self.name})
    changes = {"data__heldout": [write_lines(tmp_path / "p.jsonl", [{"turns": ["a"]}])], "train__steps": 8, "train__eval_every": 4}
    run, folder = tmp_path / "r", tmp_path / "r" / "drafter"
    changes |= {"train__save_every": 6, "train__keep": 1, "train__peak_tflops": 1e-6}
    assert trainer.fit(tiny_run.tiny_run(run, **changes)) == 0
    said = capsys.readouterr().out
    cost = r"memory a device: target 0\.00, drafter and optimizer 0\.00, gradients and activations 0\.00 .*: 0\.00 GiB\n"
    assert re.search(cost + r"estimate: \S+ TFLOP a step in matrix products, \S+ s at 40% of the peak, .* for 8 steps", said)
    assert re.search(r"estimate: \S+ s a step, .* for the 2 steps left", said)
    assert re.search(r"acceptance length on held-out prompts\n +step +pooled +macro\n +4 +1\.500 +1\.500 +best\n +8 +1\.250", said)
    assert f"that of step 4, which accepted more, to {run / 'drafter-best'}" in said
    assert f"export --to zlab --drafter {folder} --target {target_folder()} --out {run / 'target-dflash'}" in said
    line = next(line for line in metrics_of(run) if "loss" in line)
    assert line["mfu"] == pytest.approx(line["flops_per_second"] / 1e6)
    assert saved(run) == ["4", "8"]
    assert_written(run / "drafter-best", part(final_state(run, 4), ".params"))
    assert_written(folder, part(final_state(run, 8), ".params"))
    written = (folder / "model.safetensors").read_bytes()

    shutil.rmtree(folder)
    shutil.rmtree(run / "drafter-best")
    others = [write_lines(tmp_path / "q.jsonl", [{"turns": ["b"]}])]
    assert trainer.fit(tiny_run.tiny_run(run, **changes | {"data__heldout": others}, train__resume=True)) == 0
    said = capsys.readouterr().out
    assert "warning: the best checkpoint so far, step 4, was chosen by other held-out prompts: the best is chosen anew" in said
    assert (folder / "model.safetensors").read_bytes() == written
    assert not (run / "drafter-best").exists()
    (run / "checkpoints" / "4" / "identity" / "metadata").write_bytes(b"")
    assert trainer.fit(tiny_run.tiny_run(run, **changes, train__resume=True)) == 0
    said = capsys.readouterr().out
    assert "warning: no drafter-best: " in said
    assert "export --to zlab" in said
    assert not (run / "drafter-best").exists()


@pytest.mark.one_cell
def test_another_config_cannot_continue(tmp_path, whole, monkeypatch):
    shutil.copytree(whole, tmp_path / "r")
    config = tiny_run.tiny_run(tmp_path / "r", train__resume=True, data__seed=1)
    with pytest.raises(CheckpointError, match=r"another config \(data: "):
        trainer.fit(config)
    no_work(monkeypatch)
    config = tiny_run.tiny_run(tmp_path / "r", train__resume=True, optim__learning_rate=0.5, train__anchors_per_row=4)
    message = r"optim\.learning_rate: 0\.01 there, 0\.5 now; train\.anchors_per_row: 3 there, 4 now"
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(config)
    for changes, message in [
        ({"train__steps": 5}, "steps: 4 there, 5 now"),
        ({"drafter__block_size": 3}, "drafter.block_size: 4 t"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__resume=True, **changes))
    assert_equal(final_state(tmp_path / "r", 4), final_state(whole, 4))
    assert json.loads((tmp_path / "r" / "config.json").read_text())["data"]["seed"] == 0, "nothing was written"


@pytest.mark.one_cell
def test_a_run_folder_in_use_is_left_alone(whole, monkeypatch):
    no_work(monkeypatch)
    before = (whole / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"holds a run that reached step 4: --resume it, or give another train\.run_dir"):
        trainer.fit(tiny_run.tiny_run(whole, optim__beta1=0.5))
    assert (whole / "metrics.jsonl").read_text() == before
    assert json.loads((whole / "config.json").read_text())["optim"]["beta1"] == 0.9


def test_nothing_to_resume(tmp_path, monkeypatch):
    no_work(monkeypatch)
    with pytest.raises(CheckpointError, match="holds no checkpoint: start without --resume"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__resume=True))
    assert not (tmp_path / "r").exists()


def poison(state):
    """Parameters that no step can use."""
    return state._replace(params=jax.tree.map(lambda x: x * np.float32("nan"), state.params))


@pytest.mark.one_cell
def test_parameters_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    """Poisoned before the third step: no step changes them any more, and the next checkpoint is refused."""
    before_step(monkeypatch, 3, poison)
    message = r"parameters are not finite at step 3 \(the newest checkpoint is step 2\): lower optim\.learning_rate"
    with pytest.raises(NonFiniteLossError, match=message):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__save_every=1))
    assert saved(tmp_path / "r") == ["1", "2"]
    assert all(np.isfinite(x).all() for x in final_state(tmp_path / "r", 2).values())


@pytest.mark.one_cell
def test_skipped_steps_are_counted_and_stop_a_run_only_when_they_go_on(tmp_path, monkeypatch):
    """One bad step leaves the metrics to the good one of its window, a window of bad steps has no loss, and the schedule waits for
    applied steps. One more in a row than is allowed ends the run, and the message tells."""
    features = Memory.__call__

    def run(name, most):
        calls = []

        def spoiled(self, raw):
            calls.append(None)
            return features(self, raw) * (float("nan") if len(calls) in (1, 2, 4) else 1.0)

        monkeypatch.setattr(Memory, "__call__", spoiled)
        return trainer.fit(tiny_run.tiny_run(tmp_path / name, train__max_skipped=most, train__features="memory"))

    assert run("a", 3) == 0
    first, second = metrics_of(tmp_path / "a")
    assert set(first) == {"skipped_steps", "step", "learning_rate", "data_wait_share", "flops_per_second"}
    assert (first["skipped_steps"], second["skipped_steps"]) == (2, 3)
    assert np.isfinite(second["loss"])
    assert second["learning_rate"] == first["learning_rate"] == pytest.approx(1e-2)
    message = r"2 steps in a row, up to step 2, were skipped .*not finite .*newest checkpoint is step None\): lower optim\.l"
    with pytest.raises(NonFiniteLossError, match=message):
        run("b", 2)
    assert not (tmp_path / "b" / "drafter").exists()


@pytest.mark.one_cell
def test_data_that_goes_bad_costs_no_step(tmp_path, monkeypatch, whole):
    """Those done are saved, and once it is mended the run ends as if nothing had been. Where processes would have to save together
    the last checkpoint stands."""
    config = tiny_run.tiny_run(tmp_path / "r", train__save_every=100)

    def spoiled_run(patch, processes):
        reads = []

        def read(self, raw):
            reads.append(raw)
            if len(reads) == 3:
                raise DataError("x.features is damaged: make it again")
            return raw

        def taken(iterator):
            try:
                return next(iterator)
            except DataError:
                patch.setattr(jax, "process_count", lambda: processes)
                raise

        patch.setattr(Features, "read", read)
        patch.setattr(trainer, "next", taken, raising=False)
        trainer.fit(config)

    for processes, message in ((2, r"make it again$"), (1, r"make it again; then --resume: step 2 is saved$")):
        with monkeypatch.context() as patch, pytest.raises(DataError, match=r"^x\.features is damaged: " + message):
            spoiled_run(patch, processes)
        assert (tmp_path / "r" / "checkpoints").exists() == (processes == 1)
    assert saved(tmp_path / "r") == ["2"]
    assert trainer.fit(dataclasses.replace(config, train=dataclasses.replace(config.train, resume=True))) == 0
    assert_equal(final_state(tmp_path / "r", 4), final_state(whole, 4))


@pytest.mark.one_cell
def test_a_save_that_fails_in_the_background_ends_the_run(tmp_path, monkeypatch):
    """At the next step, not at the next save."""

    def full(self, *_):
        raise OSError(28, "No space left on device")

    def sealed(state):
        """Until the failure is there to be noticed."""
        while not loops[0].checkpoints.saving[1].done():
            pass

    loops, init = [], trainer._Loop.__init__
    monkeypatch.setattr(trainer._Loop, "__init__", lambda self, *args: (loops.append(self), init(self, *args))[1])
    monkeypatch.setattr(Checkpoints, "_seal_up", full)
    before_step(monkeypatch, 3, sealed)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written .*No space left.* checkpoint is step None"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", train__log_every=1))
    assert [line["step"] for line in metrics_of(tmp_path / "r")] == [1, 2]
    assert not (tmp_path / "r" / "drafter").exists()


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
    names = {"eval_acceptance_length", "eval_acceptance_length_macro", "eval_accepted_per_position", "eval_prompts"}
    assert set(last) == {"step"} | names
    assert sorted(last["eval_accepted_per_position"], reverse=True) == last["eval_accepted_per_position"]
    # training's own estimate and a real decode of the exported drafter tell the same story
    drafter = load_drafter(tmp_path / "r" / "drafter", target, dtype="float32")
    encoded = [target.tokenizer.encode_chat([user(text)]) for text in "abcdef"]
    out = generate(target, drafter, encoded, max_new_tokens=24)
    assert out.tokens == generate(target, None, encoded, max_new_tokens=24).tokens
    assert out.stats.acceptance_length == pytest.approx(real[-1], abs=0.3), "bfloat16 on disk costs little"


# ---------------------------------------------------------------------------------------------------------------------
# Where a run starts, and what it refuses


@pytest.fixture(scope="module")
def rows():
    config = tiny_run.tiny_run("unused").data
    return ConversationDataset(config, tiny_target().tokenizer, vocab_size=tiny_target().config.vocab_size)


def start(rows, **changes):
    """The drafter before the first step, which is what was said of it before any text was read."""
    config = tiny_run.tiny_run("unused", **changes)
    drafter = first_drafter(config, tiny_target(), rows)
    described = first_config(config, tiny_target().config)
    assert dataclasses.replace(described, draft_token_ids=drafter.config.draft_token_ids) == drafter.config
    assert len(described.draft_token_ids) == len(drafter.config.draft_token_ids) or not config.drafter.draft_vocab_size
    return drafter


@pytest.mark.one_cell
def test_start_from_a_drafter(rows):
    """It is taken as it is; what training decides may change; a size that is asked for and is not there is refused, before anything
    is loaded, and defaults ask for nothing."""
    loaded = {"train__init": "loaded", "drafter__path": drafter_folder()}
    stored = load_drafter(drafter_folder(), tiny_target(), dtype="float32")
    drafter = start(rows, **loaded, drafter__loss_decay_gamma=2.5, drafter__dropout=0.2)
    for ours, theirs in zip(leaves(drafter.params).values(), leaves(stored.params).values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (drafter.config.loss_decay_gamma, drafter.config.dropout) == (2.5, 0.2)
    plain = tiny_run.tiny_run("unused", **loaded)
    plain = dataclasses.replace(plain, drafter=DrafterSource(path=drafter_folder(), mask_token_id=MASK))
    assert first_config(plain, tiny_target().config) == stored.config
    for name, value in (("block_size", 5), ("num_draft_layers", 2), ("temperature", 0.5), ("learned_mask_embedding", True)):
        message = rf"drafter\.{name} is {value}, but the drafter of drafter\.path has {getattr(stored.config, name)}"
        asked = tiny_run.tiny_run("unused", **loaded, **{f"drafter__{name}": value})
        described, whole = (first_config, asked, tiny_target().config), (first_drafter, asked, tiny_target(), rows)
        for refusing in (functools.partial(*described), functools.partial(*whole)):
            with pytest.raises(ConfigError, match=message):
                refusing()


@pytest.mark.one_cell
def test_start_from_a_drafter_of_another_width(tmp_path, rows):
    """Its tables are its own; where config.json does not say so, as others write it, its tensors do."""
    asked = dataclasses.replace(tiny_run.DRAFTER, draft_hidden_dim=16, own_embedding=True, own_head=True)
    wide = drafter_config(Config(drafter=asked), tiny_target().config)
    save_drafter(Drafter.random(jax.random.key(0), wide), tmp_path / "d")
    values = json.loads((tmp_path / "d" / "config.json").read_text())
    for name in ("own_embedding", "own_head"):
        assert values["dflash_config"]["dflash_jax"].pop(name) is True
    (tmp_path / "d" / "config.json").write_text(json.dumps(values))
    assert start(rows, train__init="loaded", drafter__path=str(tmp_path / "d")).config.draft_hidden_dim == 16
    (tmp_path / "d" / "config.json").write_text(json.dumps(values | {"vocab_size": 300}))
    with pytest.raises(ConfigError, match=r"config\.json: .*(vocab_size is 300|own_embedding and own_head)"):
        first_config(tiny_run.tiny_run("unused", train__init="loaded", drafter__path=str(tmp_path / "d")), tiny_target().config)


@pytest.mark.one_cell
def test_start_from_the_target(rows):
    up = start(rows, train__init="target").params["layers"][0]["mlp"]["up_proj"]["kernel"][...]
    np.testing.assert_array_equal(up, tiny_target().params["layers"][3]["mlp"]["up_proj"]["kernel"][...])


@pytest.mark.one_cell
def test_only_the_frequent_tokens_are_learned_and_drafted(tmp_path, rows):
    """And a run that starts from such a drafter goes on with the same tokens, unless it asks for others."""
    drafter = start(rows, drafter__draft_vocab_size=5, train__init="random")
    records = rows.records.read(range(len(rows)))
    seen = Counter(np.concatenate([record.tokens_T[record.mask_T] for record in records]).tolist())
    wanted = tuple(sorted(sorted(seen, key=lambda token: (-seen[token], token))[:5]))
    assert drafter.config.draft_token_ids == wanted
    save_drafter(drafter, tmp_path / "few")
    loaded = {"train__init": "loaded", "drafter__path": str(tmp_path / "few")}
    assert start(rows, **loaded).config.draft_token_ids == wanted
    more = start(rows, **loaded, drafter__draft_vocab_size=7).config.draft_token_ids
    assert len(more) == 7
    assert set(wanted) <= set(more)


@pytest.mark.one_cell
def test_kept_features_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    with pytest.raises(ConfigError, match=r"train\.features memory needs more memory than there is: use online"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "runs" / "r", train__features="memory"))
    assert not any(tmp_path.iterdir()), "not even a folder of runs, though all was loaded before"


def no_work(monkeypatch):
    """From now on, whoever reads text or loads weights fails the test."""

    def work(*_, **__):
        raise AssertionError("this came too late")

    monkeypatch.setattr(trainer, "training_data", work)
    monkeypatch.setattr(trainer, "load_text_target", work)


@pytest.mark.one_cell
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"data__train": []}, ConfigError, r"data\.train names no file"),
        ({"data__train": ["absent.jsonl"]}, DataError, r"absent\.jsonl cannot be read"),
        ({"data__batch_size": 3, "optim__accumulation": 2}, ConfigError, r"data\.batch_size 3 is not a multiple"),
        ({"data__batch_size": 0}, ConfigError, r"data\.batch_size is 0: it must be at least 1"),
        ({"data__max_length": 99}, ConfigError, r"data\.max_length 99 exceeds the widest"),
        ({"optim__learning_rate": 0.0}, ConfigError, r"optim\.learning_rate is 0\.0: it must be positive"),
        ({"train__loss": "kl", "train__vocab_sample": 267}, ConfigError, r"train\.loss kl takes its tokens from the target"),
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
        ({"features__folder": " "}, ConfigError, r"features\.folder is empty: give a folder"),
        ({"data__records": ""}, ConfigError, r"data\.records is empty: give a folder"),
        (
            {"train__features": "cache", "features__folder": "absent"},
            DataError,
            r"absent holds no target features for this run: `py",
        ),
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
def test_refused_runs(tmp_path, monkeypatch, changes, kind, message):
    """Before any work, and nothing is written."""
    no_work(monkeypatch)
    changes = {name: value(tmp_path) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(kind, match=message) as raised:
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", **changes))
    assert isinstance(raised.value, DFlashError)
    assert not (tmp_path / "r").exists()


@pytest.mark.one_cell
def test_a_broken_line_is_named(tmp_path):
    good = {"messages": [user("a"), assistant("hello")]}
    (tmp_path / "bad.jsonl").write_text(json.dumps(good) + '\n{"messages": [\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: not valid JSON"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", data__train=[str(tmp_path / "bad.jsonl")]))
    assert not (tmp_path / "r").exists()


@pytest.mark.one_cell
def test_a_finished_drafter_is_not_overwritten(tmp_path, whole, monkeypatch):
    no_work(monkeypatch)
    shutil.copytree(whole / "drafter", tmp_path / "r" / "drafter")
    with pytest.raises(ConfigError, match="is the drafter of an earlier run: give another train.run_dir"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r"))
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["drafter"]


@pytest.mark.one_cell
def test_one_training_at_a_time(tmp_path, monkeypatch):
    no_work(monkeypatch)
    with only_process(tmp_path), pytest.raises(ConfigError, match="is being written by another process"):
        trainer.fit(tiny_run.tiny_run(tmp_path))
    assert not any(tmp_path.iterdir())


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
def test_heldout_prompts_are_not_trained_on(tmp_path, monkeypatch):
    no_work(monkeypatch)
    config = tiny_run.tiny_run(tmp_path / "r")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, heldout=config.data.train))
    with pytest.raises(ConfigError, match="which is trained on: hold other prompts out"):
        trainer.fit(config)


@pytest.mark.one_cell
def test_a_target_is_described_without_its_weights(tmp_path):
    """From the small files alone, it is what loading gives."""
    shutil.copytree(target_folder(), tmp_path / "t", ignore=shutil.ignore_patterns("*.safetensors"))
    described = describe_text_target(tmp_path / "t", "float32")
    assert (described.config, described.params) == (tiny_target().config, None)
    assert described.tokenizer.encode_chat([user("a")]) == tiny_target().tokenizer.encode_chat([user("a")])


@pytest.mark.one_cell
def test_a_target_without_tokenizer(tmp_path, monkeypatch):
    no_work(monkeypatch)
    folder = tmp_path / "t"
    shutil.copytree(target_folder(), folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer: text needs one, so add tokenizer\.json"):
        trainer.fit(tiny_run.tiny_run(tmp_path / "r", target__path=str(folder)))


def test_what_only_tensors_say_is_not_compared_before_they_are_read():
    """Else a run from a drafter with tables of its own, which its config.json need not mention, could never be resumed."""
    config = Config(train=dataclasses.replace(Config().train, init="loaded"))
    drafter = dataclasses.replace(DRAFTER, own_embedding=True)
    early, late = (preflight.identity(config, drafter, 4, data) for data in (None, "rows"))
    assert {"drafter.own_embedding", "drafter.own_head", "drafter.draft_token_ids"} == set(late) - set(early) - {"data"}
    assert late["drafter.own_embedding"] is True
