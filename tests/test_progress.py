"""What a run costs: counted against the compiler, and said in words."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_run import mesh

from dflash_jax.config import Config, DataConfig, TrainConfig
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.optim import optimizer
from dflash_jax.progress import Pace, Profile, device_bytes, duration, eval_table, memory_estimate, peak_flops, step_flops
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import init_state, make_train_step, place_batch

pytestmark = pytest.mark.one_cell
TARGET = TargetConfig("llama", 512, 64, 4, 4, 2, 16, 192, 1e-5, 64)
DRAFTER = DFlashConfig(
    64, 64, 512, 4, 4.0, 4, 2, 16, 160, block_size=4, num_draft_layers=2, target_layer_ids=(0, 2), mask_token_id=3
)
CONFIG = Config(data=DataConfig(batch_size=4), train=TrainConfig(anchors_per_row=8, anchor_chunk=8, logit_chunk=4096, remat=False))


def test_flops_are_those_of_the_compiled_step():
    """Without loops, whose bodies the compiler counts once. It also counts norms, softmax and the optimizer: a few percent."""
    width, target = 32, DenseTarget.random(jax.random.key(0), TARGET)
    drafter, tx = Drafter.random(jax.random.key(1), DRAFTER), optimizer(CONFIG.optim, 10)
    step = make_train_step(CONFIG, target, drafter, tx, mesh())
    rows = {"tokens_BT": np.ones((4, width), np.int32), "loss_mask_BT": np.ones((4, width), bool)}
    batch = place_batch(rows | {"length_B": np.full(4, width, np.int32)}, mesh())
    lowered = step.lower(init_state(drafter, tx, mesh()), target.params, batch, None)
    counted = lowered.compile().cost_analysis()["flops"]
    ours = step_flops(TARGET, DRAFTER, CONFIG, width)
    assert ours == pytest.approx(counted, rel=0.1), counted / ours
    kept = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, features="memory"))
    assert step_flops(TARGET, DRAFTER, kept, width) < ours
    head = 4 * 8 * 3 * 2 * 64 * 512  # rows, anchors, slots with a label; a product with the head
    assert step_flops(TARGET, dataclasses.replace(DRAFTER, own_head=True), CONFIG, width) == ours + head


def test_peak():
    class Device:
        device_kind = "TPU v5 lite"

    assert peak_flops(CONFIG, [Device()] * 4) == 4 * 197e12
    assert peak_flops(CONFIG, jax.devices()) is None, "nobody says what a CPU can do"
    told = dataclasses.replace(CONFIG, train=TrainConfig(peak_tflops=2.0))
    assert peak_flops(told, [Device()] * 3) == 6e12


def test_memory_of_a_device():
    """A shard, not the whole; moments of every parameter."""
    whole = init_state(Drafter.random(jax.random.key(1), DRAFTER), optimizer(CONFIG.optim, 10), mesh())
    parts = init_state(Drafter.random(jax.random.key(1), DRAFTER), optimizer(CONFIG.optim, 10), mesh(1, 2, 2))
    assert device_bytes(whole) > 3 * device_bytes(whole.params)
    assert 0.24 < device_bytes(parts.params) / device_bytes(whole.params) < 0.4
    assert "drafter and optimizer 0.00" in memory_estimate({}, parts)


def test_the_estimate_leaves_out_compilations():
    pace = Pace(steps=100, enough=3)
    said = [pace.note(step, width, seconds) for step, width, seconds in [
        (1, 32, 90.0), (2, 32, 1.0), (3, 64, 90.0), (4, 64, 3.0), (5, 32, 2.0), (6, 32, 2.0),
    ]]  # fmt: skip
    assert said == [None] * 4 + ["estimate: 2 s a step, 3 min 10 s for the 95 steps left", None]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.0, "59 s"), (61.0, "1 min 1 s"), (3599.6, "1 h 0 min"), (90000.0, "1 d 1 h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_table(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    assert eval_table(file) == ""
    for step, tau in ((2, 1.5), (4, 2.25), (6, 2.0)):
        row = {"step": step, "eval_acceptance_length": tau, "eval_acceptance_length_macro": tau - 0.25}
        file.write_text(file.read_text() + json.dumps(row) + "\n")
    assert eval_table(file).splitlines() == [
        "acceptance length on held-out prompts",
        "    step   pooled    macro",
        "       2    1.500    1.250",
        "       4    2.250    2.000  best",
        "       6    2.000    1.750",
    ]


@pytest.mark.parametrize("steps", [[3], [0, 2], [4, 3], [1, 2, 3]])
def test_refused_profiles(tmp_path, steps):
    with pytest.raises(ConfigError, match=r"train\.profile_steps is .*: give the first and the last step"):
        Profile(tmp_path, steps)
