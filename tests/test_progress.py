"""What a run costs: counted against the compiler, and said in words."""

import dataclasses
import json

import jax
import pytest
from tiny_run import mesh

from dflash_jax.config import Config, DataConfig, TrainConfig
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.optim import optimizer
from dflash_jax.progress import (
    Pace,
    Profile,
    StepCost,
    device_bytes,
    duration,
    eval_table,
    first_time_estimate,
    mean_share,
    measured_flops,
    memory_estimate,
    peak_flops,
    step_cost,
    step_flops,
)
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import abstract_batch, init_state, make_train_step

pytestmark = pytest.mark.one_cell
TARGET = TargetConfig("llama", 512, 64, 4, 4, 2, 16, 192, 1e-5, 64)
DRAFTER = DFlashConfig(
    64, 64, 512, 4, 4.0, 4, 2, 16, 160, block_size=4, num_draft_layers=2, target_layer_ids=(0, 2), mask_token_id=3
)
CONFIG = Config(data=DataConfig(batch_size=4), train=TrainConfig(anchors_per_row=8, anchor_chunk=8, logit_chunk=4096, remat=False))


def test_flops_are_those_of_the_compiled_step():
    """Without loops, whose bodies the compiler counts once. It also counts norms, softmax and the optimizer: a few percent. What is
    said before the first step is of the compiler, too."""
    width, target = 32, DenseTarget.random(jax.random.key(0), TARGET)
    drafter, tx = Drafter.random(jax.random.key(1), DRAFTER), optimizer(CONFIG.optim, 10)
    step = make_train_step(CONFIG, target, drafter, tx, mesh())
    state, shapes = init_state(drafter, tx, mesh()), abstract_batch(CONFIG, width, 0, mesh())
    cost = step_cost(step, state, target.params, *shapes)
    compiled = step.lower(state, target.params, *shapes).compile()
    counted = compiled.cost_analysis()["flops"]
    assert cost.flops == pytest.approx(counted, rel=0.1)
    memory = compiled.memory_analysis()
    activations = 4 * 8 * 3 * 512 * 4  # logits of the 3 drafted slots of all blocks, float32
    assert device_bytes(state.params) + activations < cost.bytes < 2 * memory.temp_size_in_bytes
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


def test_a_measured_rate():
    """By a clock that says what each product takes: one too short to mean anything, then three of which the best counts."""
    ticks = iter([0.0, 0.001, 1.0, 1.001, 2.0, 2.001, 3.0, 3.5, 4.0, 4.25, 5.0, 6.0])
    four = list(mesh(data=2, fsdp=2).devices.flat)
    assert measured_flops("bfloat16", four, lambda: next(ticks)) == pytest.approx(4 * 2 * 1024**3 / 0.25)
    assert next(ticks, None) is None


def test_memory_of_a_device():
    """A shard, not the whole; moments of every parameter."""
    whole = init_state(Drafter.random(jax.random.key(1), DRAFTER), optimizer(CONFIG.optim, 10), mesh())
    parts = init_state(Drafter.random(jax.random.key(1), DRAFTER), optimizer(CONFIG.optim, 10), mesh(1, 2, 2))
    assert device_bytes(whole) > 3 * device_bytes(whole.params)
    assert 0.24 < device_bytes(parts.params) / device_bytes(whole.params) < 0.4
    said = memory_estimate({}, parts, StepCost(0, 3 << 28))
    assert "drafter and optimizer 0.00, gradients and activations 0.75 (" in said
    assert said.endswith(": 0.75 GiB"), "nobody says how much memory a CPU has"


def test_the_first_estimate():
    """40 % of the peak, and steps of narrow rows cost less."""
    said = first_time_estimate(2e12, 100, None, 1e12)
    assert (
        "2 TFLOP a step in matrix products, 5 s at 40% of the 1e+03 GFLOP/s measured here in a matrix product alone, 8 min" in said
    )
    said = first_time_estimate(2e12, 100, 5e12)
    assert "2 TFLOP a step in matrix products, 1 s at 40% of the peak, 1 min 40 s for 100 steps" in said
    wide, narrow = (step_flops(TARGET, DRAFTER, CONFIG, width) for width in (64, 32))
    assert mean_share(TARGET, DRAFTER, CONFIG, [32, 64, 32]) == pytest.approx((2 * narrow + wide) / 3 / wide)
    assert narrow < wide


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
    for step, tau, prompts in ((1, 9.0, "others"), (2, 1.5, "these"), (4, 2.25, "these"), (6, 2.0, "these")):
        row = {"step": step, "eval_prompts": prompts, "eval_acceptance_length": tau, "eval_acceptance_length_macro": tau - 0.25}
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
