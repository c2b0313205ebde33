"""What the compiled train step holds and sends: memory linear in tokens and in blocks, nothing of rows sent between devices.

Nothing is allocated: parameters, state and batch are shapes, and the programs are only compiled.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import NamedSharding

from dflash_jax.config import Config, DataConfig, MeshConfig, TrainConfig
from dflash_jax.drafter import Drafter
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.program import COLLECTIVES, computations, product_flops
from dflash_jax.sharding import BATCH, collected, make_mesh, placed_shapes
from dflash_jax.targets import DenseTarget
from dflash_jax.targets.dense import abstract_decoder
from dflash_jax.train_step import Batch, abstract_state, make_train_step, target_features

pytestmark = pytest.mark.one_cell

SLOTS, HEADS, VOCAB, WIDTH = 8, 4, 64, 16
TARGET = TargetConfig("llama", VOCAB, WIDTH, 1, HEADS, 2, 8, 24, 1e-5, 8192)
DRAFTER = DFlashConfig(
    WIDTH, WIDTH, VOCAB, 1, 2.0, HEADS, 2, 8, 24, block_size=SLOTS, num_draft_layers=1, target_layer_ids=(0,), mask_token_id=3
)
SGD = optax.sgd(1.0)


def traced_step(rows, length, anchors, mesh, **train):
    config = Config(
        data=DataConfig(batch_size=rows), train=TrainConfig(anchors_per_row=anchors, anchor_chunk=2, logit_chunk=16, **train)
    )

    target_params = placed_shapes(nnx.state(abstract_decoder(TARGET), nnx.Param), mesh)
    by_row = NamedSharding(mesh, BATCH)
    shape = [((rows, length), jnp.int32), ((rows, length), bool), ((rows,), jnp.int32)]
    batch = Batch(*(jax.ShapeDtypeStruct(*x, sharding=by_row) for x in shape))
    step = make_train_step(config, DenseTarget(TARGET, target_params), Drafter(DRAFTER, None), SGD, mesh)
    return step.trace(abstract_state(DRAFTER, SGD, mesh), target_params, batch, None)


LENGTH, ANCHORS = 256, 32


@pytest.fixture(scope="module")
def programs():
    """One row a device; then rows of twice the length, and with twice the blocks."""
    mesh = make_mesh(MeshConfig(1, 8, 1), jax.devices()[:8])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_jax.attention.QUERY_CHUNK", 16)
        sizes = ((LENGTH, ANCHORS), (2 * LENGTH, ANCHORS), (LENGTH, 2 * ANCHORS))
        return [traced_step(8, *x, mesh).lower().compile() for x in sizes]


def test_memory_is_linear_in_tokens_and_in_blocks(programs):
    """Twice the tokens, or twice the blocks, at most double what exists at once; and it is less than all scores of one layer."""
    base, longer, more = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert longer < 2.1 * base
    assert more < 2.1 * base
    assert longer < HEADS * (2 * LENGTH) ** 2 * 4, "scores of all queries of the target at once"
    assert more < HEADS * 2 * ANCHORS * SLOTS * LENGTH * 4, "scores of all blocks of the drafter at once"


def test_rows_stay_on_their_devices(programs):
    """Only parameters, their gradients and the draw of anchors are sent along `fsdp`, and no activation.

    Left to itself, XLA adds up partial products of all rows instead (see `sharding.collected`).
    """
    program = computations(programs[0].as_text())
    largest = max(VOCAB * WIDTH, 8 * LENGTH)  # elements of a table, of the draw; the blocks of one device have 32 x 8 x 16
    sent = [each for each in itertools.chain(*program.values()) if each.opcode in COLLECTIVES]
    assert sum(each.opcode == "all-gather" for each in sent) >= 14, "every kernel of target and drafter"
    assert max(size for each in sent for size in each.sizes) <= largest


def test_recomputed_layers_cost_their_products_again():
    """With `remat_layers` the backward pass computes a layer's products once more (the last ones need not be)."""
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    plain, again = (product_flops(traced_step(1, LENGTH, ANCHORS, mesh, remat_layers=x).jaxpr.jaxpr) for x in (False, True))
    width, heads = WIDTH, HEADS * 8
    forward = 2 * ANCHORS * SLOTS * (width * (heads + 2 * heads // 2) + 2 * width * 24)  # q, k, v, gate and up
    assert again - plain >= forward


def test_one_layer_of_the_target_is_whole_at_once():
    """Four more layers in parts on eight devices take a copy of their parts and no more. Unordered, XLA makes all of them whole."""
    mesh = make_mesh(MeshConfig(1, 8, 1), jax.devices()[:8])
    sizes = (((8, 8), jnp.int32), ((8, 8), bool), ((8,), jnp.int32))
    batch = Batch(*(jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, BATCH)) for x in sizes))

    def temporaries(layers):
        config = dataclasses.replace(TARGET, num_layers=layers, hidden_size=64, mlp_dim=256)
        params = placed_shapes(nnx.state(abstract_decoder(config), nnx.Param), mesh)
        target, collect = DenseTarget(config, params), functools.partial(collected, mesh=mesh, dtype="float32")
        read = functools.partial(target_features, target, taps=(0, layers - 1), collect=collect)
        layer = sum(x.size * 4 for x in jax.tree.leaves(params["layers"][0]))
        return jax.jit(read).lower(params, batch).compile().memory_analysis().temp_size_in_bytes, layer

    (few, layer), (many, _) = temporaries(2), temporaries(6)
    assert many - few < 4 * 1.2 * layer / 8
