"""metrics.jsonl and TensorBoard."""

import json
import sys

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.metrics import MetricsWriter


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_on_request(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(3, {"loss": 1.5, "accuracy_per_position": [0.5, 0.25]})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert all(name in events.read_bytes() for name in (b"loss", b"accuracy_per_position/1", b"accuracy_per_position/2"))
    assert metrics_of(tmp_path) == [{"loss": 1.5, "accuracy_per_position": [0.5, 0.25]}]


def test_tensorboard_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'dflash_jax\[tensorboard\]'"):
        MetricsWriter(tmp_path, tensorboard=True)


def test_metrics_of_steps_that_are_done_again_are_removed(tmp_path):
    """After a kill the log goes on from the checkpoint's step, without a line cut in its middle."""
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 2, 2, 3, 4):
            writer.write(step, {"step": step, "loss": 1.5})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    with MetricsWriter(tmp_path, tensorboard=False, step=2) as writer:
        writer.write(3, {"step": 3, "loss": 0.5})
    assert [(line["step"], line["loss"]) for line in metrics_of(tmp_path)] == [(1, 1.5), (2, 1.5), (2, 1.5), (3, 0.5)]
