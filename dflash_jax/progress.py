"""What a run costs and how far it is: floating-point operations, memory of a device, time, and the table at the end."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import Config
from dflash_jax.errors import ConfigError
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.program import product_flops


class DeviceKind(NamedTuple):
    """What a device has, by its maker's data sheet."""

    tflops: float
    """dense bfloat16 products a second"""
    gib: int
    """memory of a chip"""


DEVICES = {
    "TPU v4": DeviceKind(275, 32),
    "TPU v5 lite": DeviceKind(197, 16),
    "TPU v5e": DeviceKind(197, 16),
    "TPU v5": DeviceKind(459, 95),
    "TPU v5p": DeviceKind(459, 95),
    "TPU v6 lite": DeviceKind(918, 32),
    "TPU v6e": DeviceKind(918, 32),
    "NVIDIA H100 80GB HBM3": DeviceKind(989, 80),
    "NVIDIA H200": DeviceKind(989, 141),
    "NVIDIA A100-SXM4-80GB": DeviceKind(312, 80),
    "NVIDIA A100-SXM4-40GB": DeviceKind(312, 40),
}
"""by JAX's `device_kind`; TPUs as Google Cloud's pages on v4, v5e, v5p and v6e (Trillium) give them"""


USUAL_SHARE = 0.4
"""of the peak, assumed until steps have been timed"""


def step_flops(target: TargetConfig, drafter: DFlashConfig, config: Config, width: int) -> float:
    """Floating-point operations of one optimizer step over rows of `width` slots: those of its matrix products, two for each
    multiplication with its addition.

    Recomputed attention scores are not counted, padding and unused anchors are. A trained product costs three times its forward
    pass; the frozen head twice, the fuser twice (its taps take no gradient), the frozen target once, up to its last tap.
    """
    rows, anchors, block = config.data.batch_size, config.train.anchors_per_row, drafter.block_size
    tokens, slots, wide = rows * width, rows * anchors * block, drafter.draft_hidden_dim
    layer = _layer(tokens, target.hidden_size, target.num_heads, target.num_kv_heads, target.head_dim, target.mlp_dim)
    layer += 4 * tokens * width * target.num_heads * target.head_dim
    by_law = config.train.loss != "ce"  # then the target's last hidden states are read too
    layers = target.num_layers if by_law else max(drafter.target_layer_ids) + 1
    taps = layers * layer if config.train.features == "online" else 0.0
    fuser = 2 * tokens * drafter.num_target_sampled_layers * drafter.target_hidden_dim * wide
    context = 4 * tokens * wide * drafter.num_kv_heads * drafter.head_dim
    blocks = _layer(slots, wide, drafter.num_heads, drafter.num_kv_heads, drafter.head_dim, drafter.mlp_dim)
    blocks += 4 * slots * (width + block) * drafter.num_heads * drafter.head_dim
    vocabulary = len(drafter.draft_token_ids) or config.train.vocab_sample or drafter.vocab_size
    head = 2 * (slots - rows * anchors) * wide * vocabulary
    taps += 2 * (slots - rows * anchors) * target.hidden_size * target.vocab_size if by_law else 0.0
    return float(taps + 2 * fuser + 3 * drafter.num_draft_layers * (context + blocks) + (3 if drafter.own_head else 2) * head)


def mean_share(target: TargetConfig, drafter: DFlashConfig, config: Config, widths: list[int]) -> float:
    """What a step over rows of these widths costs in the mean, as a share of one over the widest."""
    flops = {width: step_flops(target, drafter, config, width) for width in set(widths)}
    return sum(flops[width] for width in widths) / len(widths) / flops[max(widths)]


def _layer(tokens: int, width: int, heads: int, kv_heads: int, head_dim: int, mlp: int) -> float:
    """The projections and the gated MLP of a decoder layer."""
    return 2.0 * tokens * width * (2 * heads * head_dim + 2 * kv_heads * head_dim + 3 * mlp)


def peak_flops(config: Config, devices: list[Any]) -> float | None:
    """Operations a second that these devices could do together; None where that is not known."""
    known = DEVICES.get(devices[0].device_kind)
    one = config.train.peak_tflops or (known and known.tflops)
    return one * 1e12 * len(devices) if one else None


def measured_flops(dtype: str, devices: list[Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Operations a second that these devices reach in a product of two matrices, at most 2048 wide: the best of some. Those of this
    process measure it, all at once; the others are taken to be like them. Well under a second on two cores."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    rows = NamedSharding(Mesh(np.asarray(local), ("rows",)), PartitionSpec("rows"))
    product = jax.jit(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32), out_shardings=rows)
    size, seconds = 256, 0.0
    while seconds < 0.01 and size < 2048:  # a short one measures how it is started
        size *= 2
        x = jax.device_put(np.ones((len(local) * size, size), jnp.dtype(dtype)), rows)
        y = jax.device_put(np.ones((size, size), jnp.dtype(dtype)), NamedSharding(rows.mesh, PartitionSpec()))
        product(x, y).block_until_ready()  # compiled
        times = []
        for _ in range(3):
            before = clock()
            product(x, y).block_until_ready()
            times.append(clock() - before)
        seconds = min(times)
    return 2 * size**3 * len(devices) / max(seconds, 1e-9)


def speed(window: list[dict[str, Any]], flops: Callable[[int], float], peak: float | None) -> dict[str, float]:
    """How fast some steps were: the share of time that waited for data, operations a second, and the share of the peak (mfu)."""
    seconds = max(sum(values["seconds"] for values in window), 1e-9)
    reached = sum(flops(values["width"]) for values in window) / seconds
    rates = {"data_wait_share": sum(values["data_wait"] for values in window) / seconds, "flops_per_second": reached}
    return rates if peak is None else rates | {"mfu": reached / peak}


def device_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays on the device that holds most of them."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


class StepCost(NamedTuple):
    """What the compiler says of a train step."""

    flops: int
    """in matrix products, on all devices together, recomputed ones too"""
    bytes: int
    """of a device, beside the target and the state: gradients, activations, results and code"""


def step_cost(train_step: Any, state: Any, target_params: Any, batch: Any, taps: Any) -> StepCost:
    """Compile the step for such rows, which its first call then need not do again. Nothing is run."""
    traced = train_step.trace(state, target_params, batch, taps)
    m = traced.lower().compile().memory_analysis()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return StepCost(product_flops(traced.jaxpr.jaxpr), m.temp_size_in_bytes + results + m.generated_code_size_in_bytes)


def memory_estimate(target_params: Any, state: Any, cost: StepCost) -> str:
    """What a device needs."""
    target, trained = device_bytes(target_params), device_bytes(state)
    room = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return (
        f"memory a device: target {_gib(target)}, drafter and optimizer {_gib(trained)}, gradients and activations "
        f"{_gib(cost.bytes)} (train.anchor_chunk, train.logit_chunk, optim.accumulation): "
        f"{_gib(target + trained + cost.bytes)}{f' of {_gib(room)}' if room else ''} GiB"
    )


def first_time_estimate(flops: float, steps: int, peak: float | None, measured: float | None = None) -> str:
    """How long `steps` steps of so many operations may take, before the first of them has told. `peak` None: by the rate that was
    `measured` instead."""
    rate = measured if peak is None else peak
    assert rate is not None
    seconds = flops / (USUAL_SHARE * rate)
    of = f"the {rate / 1e9:.3g} GFLOP/s measured here in a matrix product alone" if peak is None else "the peak"
    work = f"estimate: {flops / 1e12:.3g} TFLOP a step in matrix products"
    return (
        f"{work}, {seconds:.3g} s at {USUAL_SHARE:.0%} of {of}, {duration(seconds * steps)} for {steps} steps; the first steps "
        "will tell better"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


class Pace:
    """Seconds a step, learned from the first steps that compiled nothing, and the estimate that follows from them."""

    def __init__(self, steps: int, enough: int = 5) -> None:
        self.steps, self.enough = steps, enough
        self.widths: set[int] = set()
        self.seconds: list[float] = []
        self.said = False

    def note(self, step: int, width: int, seconds: float) -> str | None:
        """Take a step's time; once, when there are enough of them, a line about the rest of the run."""
        if width in self.widths:
            self.seconds.append(seconds)
        self.widths.add(width)
        if self.said or len(self.seconds) < self.enough:
            return None
        self.said = True
        mean = sum(self.seconds) / len(self.seconds)
        return f"estimate: {mean:.3g} s a step, {duration(mean * (self.steps - step))} for the {self.steps - step} steps left"


def duration(seconds: float) -> str:
    """In the two largest units that matter."""
    left = round(seconds)
    for (big, size), (small, part) in ((("d", 86400), ("h", 3600)), (("h", 3600), ("min", 60)), (("min", 60), ("s", 1))):
        if left >= size:
            return f"{left // size} {big} {left % size // part} {small}"
    return f"{left} s"


def eval_table(metrics: Path) -> str:
    """The acceptance lengths of metrics.jsonl on the newest held-out prompts, a line an evaluation, the best one marked; "" when
    there are none."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "eval_acceptance_length" in row]
    if not rows:
        return ""
    rows = [row for row in rows if row.get("eval_prompts") == rows[-1].get("eval_prompts")]
    best = max(rows, key=lambda row: (row["eval_acceptance_length"], row["step"]))["step"]
    lines = ["acceptance length on held-out prompts", f"{'step':>8} {'pooled':>8} {'macro':>8}"]
    for row in rows:
        mark = "  best" if row["step"] == best else ""
        lines.append(f"{row['step']:>8} {row['eval_acceptance_length']:>8.3f} {row['eval_acceptance_length_macro']:>8.3f}{mark}")
    return "\n".join(lines)


def last_words(config: Config, run_dir: Path, better: int | None) -> str:
    """What the drafter accepts, where it is and what to do with it. `better`: an earlier step that accepted more."""
    folder, table = run_dir / "drafter", eval_table(run_dir / "metrics.jsonl")
    lines = [table] if table else []
    lines.append(f"drafter written to {folder}")
    if better is not None:
        lines.append(f"that of step {better}, which accepted more, to {run_dir / 'drafter-best'}")
    lines.append(f"measure it: python -m dflash_jax bench --config {run_dir / 'config.json'} --drafter.path {folder}")
    out = run_dir / f"{Path(config.target.path).name.removesuffix('.gguf')}-dflash"
    lines.append(
        f"for other engines: python -m dflash_jax export --to zlab --drafter {folder} --target {config.target.path} --out {out}"
    )
    return "\n".join(lines)


class Profile:
    """A jax.profiler recording of the steps [first, last] of a run; [] records nothing. A context manager."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ConfigError(f"train.profile_steps is {steps}: give the first and the last step to record, such as [20, 24]")
        self.folder, self.steps, self.running = folder, steps, False

    def before(self, step: int) -> None:
        """A step is about to be started."""
        if self.steps and step == self.steps[0]:
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, step: int, result: Any) -> None:
        """A step was started, which gives `result`."""
        if self.running and step == self.steps[1]:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self.running = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:  # the run ended within the window
            self._stop()
