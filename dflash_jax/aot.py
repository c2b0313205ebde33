"""`python -m dflash_jax aot`: compile a run's programs for devices that need not be there, and report what they would take.

Nothing is allocated: parameters, state and batch are shapes with shardings. TPUs are compiled for by libtpu's own compiler.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import Config, check_counts
from dflash_jax.data import check_sizes
from dflash_jax.decode import decode, prefill, prefill_lengths
from dflash_jax.drafter import Drafter, abstract_drafter
from dflash_jax.errors import ConfigError
from dflash_jax.features import layout_of
from dflash_jax.first_drafter import described_drafter
from dflash_jax.generate import STOP_SLOTS
from dflash_jax.gguf import embedded_model_path, read_gguf
from dflash_jax.hf import EMBEDDED_NAME
from dflash_jax.hf_config import target_config
from dflash_jax.hf_weights import model_folder
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.optim import optimizer
from dflash_jax.program import Sent, collectives, product_flops
from dflash_jax.progress import DEVICES, device_bytes
from dflash_jax.sharding import make_mesh, placed_shapes, replicated_dimensions
from dflash_jax.targets import DenseTarget
from dflash_jax.targets.dense import abstract_decoder
from dflash_jax.train_step import abstract_batch, abstract_state, make_train_step

GIB = 2**30
EXAMPLES = "v5e:4x4, v5p:2x2x2, v6e:2x4 or cpu:8"
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_HOST_BOUNDS": "1,1,1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""environment in which libtpu only compiles: it neither looks for a TPU nor for this host's place among others, nor locks it"""
Programs = Literal["train", "decode", "both"]


@dataclasses.dataclass(frozen=True)
class Report:
    """One compiled program. Bytes and collectives are those of one device."""

    name: str
    seconds: float
    """it took to compile"""
    arguments: dict[str, int]
    """bytes by kind, whether this program reads them or not"""
    memory: dict[str, int]
    """bytes: arguments, outputs, aliased (outputs that take an argument's place), temporaries, code, unread (held, but not read by
    this program); total"""
    product_flops: int
    """in matrix products, loops counted in full (a decoding loop: one round); the whole program's, divided by the devices that
    share its work: rows that are decoded are the same on all parts of `data`"""
    compiler: dict[str, float]
    """flops and bytes accessed as the compiler counts them: the body of a loop once"""
    sent: dict[str, Sent]


def aot(config: Config, topology: str, programs: Programs, rows: int, prompt_length: int, memory_gib: float | None) -> int:
    """Report the train step, or prefill and decode chunk, or all three; returns 1 when one of them does not fit.

    Args:
        topology: `v5p:2x2x2` and the like (chip and shape of the slice), or `cpu:N`: N fake CPU devices.
        rows, prompt_length: of the decoded batch; decode.max_new_tokens says how long answers get.
        memory_gib: what a device has; None takes that of its kind.
    Raises:
        ConfigError: libtpu is missing, the topology is unknown, or the config does not fit it.
        CheckpointError: the target's config is missing or unsupported.
    """
    if rows < 1 or prompt_length < 1:
        raise ConfigError(f"--rows {rows} and --prompt_length {prompt_length} must be at least 1")
    check_counts(config)
    check_sizes(config.data)
    devices = topology_devices(topology)
    mesh = make_mesh(config.mesh, devices)
    kind = devices[0].device_kind
    if memory_gib is None and kind in DEVICES:
        memory_gib = DEVICES[kind].gib * len({tuple(device.coords) for device in devices}) / len(devices)  # v4: two devices a chip
    room = "of unknown memory (give --memory_gib to judge)" if memory_gib is None else f"of {memory_gib:g} GiB"
    print(f"{topology}: {len(devices)} devices ({kind}) {room}; mesh {dict(mesh.shape)}", flush=True)
    sizes = _described_target(config)
    drafter = described_drafter(config, sizes)
    target = DenseTarget(sizes, placed_shapes(nnx.state(abstract_decoder(sizes), nnx.Param), mesh, sizes.dtype))
    for line in replicated_dimensions((target.params, nnx.state(abstract_drafter(drafter), nnx.Param)), mesh):
        print(line)
    fits, lines = True, []
    try:
        for report in _reports(config, target, drafter, mesh, programs, rows, prompt_length):
            fit = None if memory_gib is None else report.memory["total"] <= memory_gib * GIB
            fits &= fit is not False
            print(_text(report, memory_gib, fit), flush=True)
            sent = {kind: sent._asdict() for kind, sent in report.sent.items()}
            lines.append(dataclasses.asdict(report) | {"sent": sent, "fits": fit})
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fits = False
        print(f"the compiler says that it does NOT fit: {' '.join(str(error).split())[:400]}")
    print(json.dumps({"topology": topology, "devices": len(devices), "memory_gib": memory_gib, "fits": fits, "programs": lines}))
    return 0 if fits else 1


def topology_devices(topology: str) -> list[Any]:
    """The devices of `KIND:SHAPE`: fake CPU devices, or descriptions of TPUs. Raises `ConfigError`."""
    jax.config.update("jax_platforms", "cpu")  # no accelerator of this machine is needed, nor held up
    kind, _, shape = topology.partition(":")
    if kind == "cpu" and shape.isdecimal() and int(shape):
        with contextlib.suppress(RuntimeError):  # jax has started already, with the devices that it has
            jax.config.update("jax_num_cpu_devices", int(shape))
        devices = jax.devices("cpu")
        if len(devices) < int(shape):
            raise ConfigError(f"--topology {topology}: jax has started with {len(devices)} CPU devices: use a process of its own")
        return devices[: int(shape)]
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology {topology} needs TPU's compiler: run `pip install 'dflash_jax[tpu]'` (no TPU is needed), or give cpu:N"
        )
    for name, value in WITHOUT_TPU.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--topology {topology} is unknown to libtpu ({reason}): give a slice such as {EXAMPLES}") from None


def _described_target(config: Config) -> TargetConfig:
    """The target's sizes, without its weights: a hub id's config.json is all that is fetched."""
    path, dtype = config.target.path, config.target.dtype
    if path == EMBEDDED_NAME or path.endswith(".gguf"):
        file = embedded_model_path() if path == EMBEDDED_NAME else Path(path)
        return dataclasses.replace(read_gguf(file).target_config, dtype=dtype)
    return target_config(model_folder(path, ("config.json", "generation_config.json")), dtype)


def _reports(
    config: Config, target: DenseTarget, drafter: DFlashConfig, mesh: Mesh, programs: Programs, rows: int, prompt_length: int
) -> Iterator[Report]:
    """The reports of what is asked for, each as soon as it is there."""
    if programs != "decode":
        yield _train_step(config, target, drafter, mesh)
    if programs == "train":
        return
    # Decoding, as served: the drafter in the target's dtype.
    drafter = dataclasses.replace(drafter, dtype=target.config.dtype)
    params = placed_shapes(nnx.state(abstract_drafter(drafter), nnx.Param), mesh, drafter.dtype)
    models = {"target": target, "drafter": Drafter(drafter, params)}
    block = config.decode.block_size or drafter.block_size
    padded, capacity = prefill_lengths([prompt_length], config.decode.max_new_tokens, block)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def integers(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=everywhere)

    prompts = (integers(rows, padded), integers(rows), integers(rows), integers(rows, STOP_SLOTS))
    traced = prefill.trace(target.params, params, *prompts, None, block_size=block, capacity=capacity, **models)
    arguments = {"target": target.params, "drafter": params}
    sharing = mesh.shape["fsdp"] * mesh.shape["tensor"]
    report, compiled = _compiled(f"prefill ({rows} rows of {padded})", traced, arguments, mesh, sharing)
    yield report
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), traced.out_info, compiled.output_shardings
    )
    traced = decode.trace(target.params, params, state, integers(), **models)
    arguments["caches"] = (state.target_cache, state.draft_cache)
    yield _compiled(f"decode chunk ({rows} rows, blocks of {block}, caches of {capacity})", traced, arguments, mesh, sharing)[0]


def _train_step(config: Config, target: DenseTarget, drafter: DFlashConfig, mesh: Mesh) -> Report:
    rows, data = config.data.batch_size, config.data
    length = max(data.buckets) if data.packing else min(bucket for bucket in data.buckets if bucket >= data.max_length)
    sizes_M = jnp.ones((len(drafter.target_layer_ids) * drafter.target_hidden_dim,), jnp.float32)
    tx = optimizer(config.optim, config.train.steps or 1000, sizes_M)
    step: Any = make_train_step(config, target, Drafter(drafter, None), tx, mesh)
    state = abstract_state(drafter, tx, mesh, config.optim.ema > 0)
    # kept features come from a program of their own
    kept = layout_of(config, target, drafter.target_layer_ids)
    batch, taps = abstract_batch(config, length, kept.numbers if config.train.features != "online" else 0, mesh)
    micro, anchors = config.optim.accumulation, config.train.anchors_per_row
    name = f"train step ({rows} rows of {length} in {micro} micro-batches, {anchors} blocks of {drafter.block_size} a row)"
    arguments = {"target": target.params, "drafter": state.params, "optimizer": state.opt_state, "batch": (batch, taps)}
    return _compiled(name, step.trace(state, target.params, batch, taps), arguments, mesh, mesh.size)[0]


def _compiled(name: str, traced: Any, arguments: dict[str, Any], mesh: Mesh, sharing: int) -> tuple[Report, Any]:
    started = time.perf_counter()
    platform = mesh.devices.flat[0].platform
    compiled = traced.lower(lowering_platforms=(platform,)).compile()
    seconds = time.perf_counter() - started
    m, cost = compiled.memory_analysis(), compiled.cost_analysis()
    memory = {
        "arguments": m.argument_size_in_bytes,
        "outputs": m.output_size_in_bytes,
        "aliased": m.alias_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
        "code": m.generated_code_size_in_bytes,
    }
    by_kind = {kind: device_bytes(tree) for kind, tree in arguments.items()}
    memory["unread"] = max(sum(by_kind.values()) - memory["arguments"], 0)  # the target's layers above its last tap
    memory["total"] = sum(memory.values()) - 2 * memory["aliased"]
    counted = {kind: float(cost.get(kind, 0.0)) for kind in ("flops", "bytes accessed")}
    flops = product_flops(traced.jaxpr.jaxpr) // sharing
    return Report(name, seconds, by_kind, memory, flops, counted, collectives(compiled.as_text())), compiled


def _text(report: Report, memory_gib: float | None, fit: bool | None) -> str:
    """The report for people."""

    def gib(parts: dict[str, int]) -> str:
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())

    sent = ", ".join(f"{kind} {n} ({size / 1e9:.2f} GB)" for kind, (n, size) in report.sent.items()) or "none"
    verdict = {None: "", True: f"fits in {memory_gib} GiB", False: f"does NOT fit in {memory_gib} GiB"}[fit]
    lines = [
        f"{report.name}; compiled in {report.seconds:.0f} s. Of one device:",
        f"  memory (GiB): {gib(report.memory)}",
        f"  of the arguments: {gib(report.arguments)}",
        f"  matrix products, loops in full: {report.product_flops / 1e12:.3f} TFLOP",
        f"  by the compiler, loop bodies once: {report.compiler['flops'] / 1e12:.3f} TFLOP, "
        f"{report.compiler['bytes accessed'] / 1e9:.2f} GB accessed",
        f"  collectives, loops in full: {sent}",
        *([f"  {verdict}"] if verdict else []),
    ]
    return "\n".join(lines)
