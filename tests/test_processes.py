"""Real processes that train as one: what a user starts, what a kill and a preemption leave behind, and what goes on elsewhere."""

import dataclasses
import json
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_run
from several_processes import launch

from dflash_jax import precompute, preflight, trainer
from dflash_jax.config import FeaturesConfig, to_json
from dflash_jax.feature_store import FeatureStore, Layout
from dflash_jax.hf import load_drafter

STEPS = 60


def wait(processes, condition):
    deadline = time.monotonic() + 240
    while not condition():
        for process in processes:
            assert process.poll() is None, process.output.read_text()
        assert time.monotonic() < deadline, "\n".join(process.output.read_text() for process in processes)
        time.sleep(0.002)


def finish(processes, status=0):
    for process in processes:
        process.wait(timeout=240)
    said = [process.output.read_text() for process in processes]
    assert [process.returncode for process in processes] == [status] * len(processes), "\n".join(said)
    assert "Traceback" not in "".join(said)
    return said


def losses(path):
    return {row["step"]: row["loss"] for row in map(json.loads, Path(path).read_text().splitlines()) if "loss" in row}


def sealed(folder):
    return sorted(int(path.parent.name) for path in folder.glob("*/seal.json"))


@pytest.mark.one_cell
def test_killed_preempted_and_moved(tmp_path):
    """Two processes with two devices each, fully sharded over all four, packed rows, the target's law. SIGKILL of both while a
    checkpoint is written; resumed, the steps that come again have the same bits. SIGTERM of one: both save the same step and leave.
    One process with two replicas of two devices ends the run. All the while the losses are those of one device."""
    changes = {"train__steps": STEPS, "train__save_every": 10, "train__log_every": 1, "mesh__data": 1, "mesh__fsdp": 4}
    changes |= {"data__packing": True, "data__buckets": [48], "train__loss": "kl"}
    heldout = tiny_run.write_lines(tmp_path / "prompts.jsonl", [{"turns": ["a"]}, {"turns": ["hello"]}])
    changes |= {"data__heldout": [heldout], "train__eval_every": 30, "train__eval_max_new_tokens": 4}
    config = tiny_run.tiny_run(tmp_path / "run", **changes)
    checkpoints, metrics = tmp_path / "run" / "checkpoints", tmp_path / "run" / "metrics.jsonl"

    killed = launch(tmp_path, to_json(config), 2, pause=0.05)
    wait(killed, lambda: sealed(checkpoints) and any(tmp_path.glob("run/checkpoints/[2-9]0*")))  # the second save has begun
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = losses(metrics)
    newest = sealed(checkpoints)[-1]

    preempted = launch(tmp_path, to_json(config), 2, "--train.resume=true", pause=0.05)
    wait(preempted, lambda: len(losses(metrics)) > max(before) + 5)
    preempted[1].send_signal(signal.SIGTERM)
    said = finish(preempted, 143)
    assert f"resumed from step {newest}" in said[0]
    assert "resumed" not in said[1], "the second process prints nothing of its own"
    stopped = sealed(checkpoints)[-1]
    assert f"stopped at step {stopped} of {STEPS}; continue with the same command and --resume" in said[0]
    after = losses(metrics)
    again = [step for step in before if step > newest]
    assert again, "steps after the checkpoint were run twice"
    assert {step: after[step] for step in before} == before

    total = (Path(tiny_run.target_folder()) / "model.safetensors").stat().st_size
    ends = [json.loads(text.splitlines()[-1]) for text in said]
    assert [end["scattered"] for end in ends] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    read = [end["bytes_read"] for end in ends]
    assert max(read) < 0.6 * total, "a process reads its half, and norms"
    assert sum(read) > 0.98 * (total - 8192), "together they read all"

    config = tiny_run.tiny_run(tmp_path / "run", **changes | {"mesh__fsdp": 2, "mesh__replica": 2, "train__resume": True})
    (said,) = finish(launch(tmp_path, to_json(config), 1, devices=4))
    assert f"resumed from step {stopped}" in said
    assert "acceptance length on held-out prompts" in said
    assert "python -m dflash_jax export --to zlab --drafter" in said
    load_drafter(tmp_path / "run" / "drafter", tiny_run.tiny_target())
    after = losses(metrics)
    assert list(after) == list(range(1, STEPS + 1))

    shutil.rmtree(checkpoints)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "make_mesh", lambda config: tiny_run.mesh())
        alone = tiny_run.tiny_run(tmp_path / "alone", **changes | {"train__eval_every": 0, "train__save_every": STEPS})
        assert trainer.fit(alone) == 0
    straight = losses(tmp_path / "alone" / "metrics.jsonl")
    for step in range(1, 41):
        assert after[step] == pytest.approx(straight[step], rel=1e-3), step


def assert_one_cache(of_two, alone, config):
    """What two hosts have written is what one process writes, by conversation, in the same place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute, "make_mesh", lambda config: tiny_run.mesh())
        assert precompute.precompute(dataclasses.replace(config, features=FeaturesConfig(str(alone)))) == 0
    (ours,), (theirs,) = of_two.iterdir(), alone.iterdir()
    assert ours.name == theirs.name
    assert len(list(ours.glob("*.features"))) == 6
    layout, ids_N = Layout(2, 32, "bfloat16"), np.arange(12)
    for (a_TM, _), (b_TM, _) in zip(*(FeatureStore(path, layout, ids_N).read(range(12)) for path in (ours, theirs)), strict=True):
        np.testing.assert_allclose(a_TM.astype(np.float32), b_TM.astype(np.float32), rtol=2**-7, atol=1e-5)


@pytest.mark.one_cell
def test_two_hosts_agree_and_end_together(tmp_path):
    """Without a training: the first host alone has the text, and both read its records; a folder that they do not share is refused
    on both; they write one cache, also in parts; SIGTERM of one stops both at the same question, for good. And when the first
    fails, neither waits for the other."""
    (tmp_path / "0").mkdir()
    rows = [{"messages": [tiny_run.user("a"), tiny_run.assistant("hello")]}] * 3
    tiny_run.write_lines(tmp_path / "0" / "text.jsonl", rows)
    config = tiny_run.tiny_run(tmp_path, features__folder=str(tmp_path / "features"))
    hosts = launch(tmp_path, to_json(config), 2, devices=1, what=["agree"])
    for host in hosts:
        host.wait(timeout=90)
    said = [host.output.read_text() for host in hosts]
    told = [next((json.loads(line) for line in text.splitlines() if line.startswith("{")), None) for text in said]
    assert None not in told, "\n".join(said)
    for index, host in enumerate(told):
        own = tmp_path / str(index) / "unshared"
        assert host.pop("refused") == f"data.records {own} is not one folder for all processes: give one that all hosts share"
    assert told[0] == told[1]
    assert told[0]["cached"] == [0, 2], "of three batches both hosts had sealed the first"
    assert_one_cache(tmp_path / "features", tmp_path / "alone", config)
    assert (told[0]["text"], told[0]["rows"]) == ("\u00e9", [0, 1, 2])
    assert told[0]["stopped"] >= 20
    assert (told[0]["again"], told[0]["status"]) == (True, 143)
    assert hosts[0].returncode == 1
    assert "error: a planted error" in said[0]
    assert "Traceback" not in said[0]
    assert hosts[1].returncode != 0
