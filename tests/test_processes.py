"""Real processes: what a user starts, and what a kill leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run

from dflash_jax.config import to_json

ROOT = Path(__file__).parents[1]


def command(folder, name, *options):
    """train.py on one device, with a config that one process can read."""
    config = json.loads(to_json(tiny_run.tiny_run(folder / name, train__steps=160, train__save_every=20, train__log_every=20)))
    (folder / f"{name}.yaml").write_text(json.dumps(config))
    environment = dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="", JAX_COMPILATION_CACHE_DIR=str(folder / "compiled"))
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    argv = [sys.executable, str(ROOT / "train.py"), "--config", str(folder / f"{name}.yaml"), *options]
    return subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "Traceback" not in out
    return out


@pytest.mark.one_cell
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """SIGKILL after some checkpoint, then --resume: the same last parameters and metrics as a run that nobody killed."""
    straight = finish(command(tmp_path, "straight"))
    assert "drafter written to" in straight
    killed = command(tmp_path, "killed")
    folder = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 200
    while not (folder.exists() and any(path.name.isdigit() for path in folder.iterdir())):
        assert killed.poll() is None, killed.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "drafter").exists(), "killed in time"
    assert "resumed from step" in finish(command(tmp_path, "killed", "--resume"))
    ours, theirs = (
        ocp.StandardCheckpointer().restore(tmp_path / name / "checkpoints" / "160" / "state") for name in ("killed", "straight")
    )
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("killed", "straight")]
    logs = [[(row["step"], row["loss"]) for row in map(json.loads, part)] for part in lines]
    assert logs[0] == logs[1]
