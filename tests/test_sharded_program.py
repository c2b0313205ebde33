"""The decode loop compiled for several devices: what it sends between them, and that it copies neither caches nor parameters.

Batch 1 on a `tensor` axis of four needs two sums a layer (after attention, after the MLP), the embedding rows of anchor, mask token
and block, and the best token of each slot, of drafter and target. Nothing is allocated: parameters and state are shapes.

Jax 0.10.2 sends more: for the best token it gathers all logits. So this holds for the newest jax only.
"""

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import NamedSharding, P
from tiny_models import DRAFTER, TARGET

from dflash_jax.aot import WITHOUT_TPU
from dflash_jax.config import MeshConfig
from dflash_jax.decode import decode, prefill
from dflash_jax.drafter import Drafter, abstract_drafter
from dflash_jax.hf_config import target_config
from dflash_jax.hf_drafter import config_from_json
from dflash_jax.program import COLLECTIVES, computations
from dflash_jax.sharding import make_mesh, placed_shapes
from dflash_jax.targets import DenseTarget
from dflash_jax.targets.dense import abstract_decoder

pytestmark = pytest.mark.one_cell
FIXTURES = Path(__file__).parent / "fixtures"
DEVICES = 4


def compiled_decode(target_config, drafter_config, devices, capacity, platform):
    """The program, and the bytes of a device's part of all caches. Caches are split by heads, as prefill leaves them."""
    mesh = make_mesh(MeshConfig(1, 1, len(devices)), devices)
    everywhere, by_heads = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "tensor"))

    def shape(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def integers(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=everywhere)

    params = placed_shapes(nnx.state(abstract_decoder(target_config), nnx.Param), mesh, target_config.dtype)
    draft_params = placed_shapes(nnx.state(abstract_drafter(drafter_config), nnx.Param), mesh, drafter_config.dtype)
    models = {"target": DenseTarget(target_config, params), "drafter": Drafter(drafter_config, draft_params)}
    options = models | {"block_size": drafter_config.block_size, "capacity": capacity}
    prompt = (integers(1, 128), integers(1), integers(1), integers(1, 8))
    state = jax.eval_shape(lambda *args: prefill(*args, None, **options), params, draft_params, *prompt)
    state = jax.tree.map(lambda x: shape(x, by_heads if x.ndim == 4 else everywhere), state)
    traced = decode.trace(params, draft_params, state, integers(), **models)
    caches = jax.tree.leaves((state.target_cache, state.draft_cache))
    part = sum(math.prod(by_heads.shard_shape(x.shape)) * x.dtype.itemsize for x in caches)
    return traced.lower(lowering_platforms=(platform,)).compile(), part


def check(program, caches, target_config, drafter_config, cache_copies_in_entry):
    text, memory = program.as_text(), program.memory_analysis()
    block, width = drafter_config.block_size, target_config.hidden_size

    sent = Counter()
    instructions = computations(text)
    for each in itertools.chain(*instructions.values()):
        if (kind := each.opcode.removesuffix("-start")) in COLLECTIVES:
            sent[kind] += len(sizes := each.sizes)
            assert max(sizes) <= (block * width if kind == "all-reduce" else block * DEVICES), f"{kind} of {sizes}"
    layers = target_config.num_layers + drafter_config.num_draft_layers
    assert sent == {"all-reduce": 2 * layers + 3, "all-gather": 4}

    assert memory.alias_size_in_bytes >= caches
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2048, "an output has a buffer of its own"

    (body,) = [re.findall(r"body=(%[\w.-]+)", each.rest)[0] for each in instructions["ENTRY"] if each.opcode == "while"]
    one_cache = caches // 2 // layers // jnp.dtype(target_config.dtype).itemsize
    kernel = width * target_config.num_kv_heads * target_config.head_dim // DEVICES  # the smallest one

    def copies(where, at_least):
        return [each.sizes[0] for each in instructions[where] if each.opcode == "copy" and each.sizes[0] >= at_least]

    assert copies(body, one_cache) == [], "a cache is copied in every round"
    assert copies("ENTRY", min(one_cache, kernel)) == [one_cache] * cache_copies_in_entry


def test_on_four_cpu_devices():
    sizes = {"vocab_size": 64, "num_heads": 8, "num_kv_heads": 4}
    target = dataclasses.replace(TARGET, num_layers=3, **sizes)
    drafter = dataclasses.replace(DRAFTER, num_target_layers=3, **sizes)
    program, caches = compiled_decode(target, drafter, jax.devices()[:DEVICES], 256, "cpu")
    check(program, caches, target, drafter, 0)


@pytest.mark.libtpu
def test_qwen3_4b_on_four_tpus(monkeypatch):
    """v5e, with libtpu's compiler; no TPU is needed. True widths, and one layer of each model: all layers are alike.

    Around the loop, once a call, it lays every cache out anew: positions outermost, which its updates want.
    """
    for name, value in WITHOUT_TPU.items():
        monkeypatch.setenv(name, value)
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    target = dataclasses.replace(target_config(FIXTURES / "Qwen3-4B", "bfloat16"), num_layers=1)
    values = json.loads((FIXTURES / "Qwen3-4B-DFlash-b16" / "config.json").read_text(encoding="utf-8"))
    one = {"num_draft_layers": 1, "causal": (False,), "sliding_window": (None,), "target_layer_ids": (0,)}
    drafter = config_from_json(values, "config.json", target_config(FIXTURES / "Qwen3-4B", "bfloat16"))
    drafter = dataclasses.replace(drafter, num_target_layers=1, num_target_sampled_layers=1, dtype="bfloat16", **one)
    program, caches = compiled_decode(target, drafter, devices, 2304, "tpu")
    check(program, caches, target, drafter, 4 * (target.num_layers + drafter.num_draft_layers))
