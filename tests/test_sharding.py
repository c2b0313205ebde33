"""Where parameters, optimizer moments and batches live on a mesh of 2 x 2 x 2, and what is refused."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from several_processes import count_reads
from tiny_run import drafter_folder, mesh, target_folder, tiny_target, user

from dflash_jax.config import DecodeConfig, MeshConfig, OptimConfig
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError
from dflash_jax.generate import generate, start
from dflash_jax.hf import load_drafter, load_target
from dflash_jax.model_config import DFlashConfig, RopeConfig
from dflash_jax.optim import optimizer
from dflash_jax.program import computations
from dflash_jax.sharding import (
    BATCH,
    by_slice,
    make_mesh,
    mesh_of,
    place_rows,
    process_rows,
    replicated_dimensions,
    shardings,
    spec,
)
from dflash_jax.train_step import init_state, place_batch

DRAFTER = DFlashConfig(
    32, 32, 61, 4, 4.0, num_heads=4, num_kv_heads=1, head_dim=7, mlp_dim=48, block_size=4, num_draft_layers=1,
    rope=RopeConfig(partial_rotary_factor=0.9), target_layer_ids=(1, 2), mask_token_id=3, own_embedding=True, own_head=True,
)  # fmt: skip
LAYER = "['layers'][0]"
SPECS = {
    "['embed_tokens']": P(None, "fsdp"),  # 61 rows are odd: replicated over `tensor`
    "['lm_head']": P(None, "fsdp"),
    "['fuser']['fc']['kernel']": P(None, "fsdp"),
    "['fuser']['hidden_norm']['scale']": P(None),
    f"{LAYER}['self_attn']['q_proj']['kernel']": P("fsdp", "tensor"),
    f"{LAYER}['self_attn']['k_proj']['kernel']": P("fsdp", None),  # 1 head of width 7
    f"{LAYER}['self_attn']['v_proj']['kernel']": P("fsdp", None),
    f"{LAYER}['self_attn']['o_proj']['kernel']": P("tensor", "fsdp"),
    f"{LAYER}['self_attn']['q_norm']['scale']": P(None),
    f"{LAYER}['self_attn']['k_norm']['scale']": P(None),
    f"{LAYER}['mlp']['gate_proj']['kernel']": P("fsdp", "tensor"),
    f"{LAYER}['mlp']['up_proj']['kernel']": P("fsdp", "tensor"),
    f"{LAYER}['mlp']['down_proj']['kernel']": P("tensor", "fsdp"),
    f"{LAYER}['input_layernorm']['scale']": P(None),
    f"{LAYER}['post_attention_layernorm']['scale']": P(None),
    "['norm']['scale']": P(None),
}


def name(path):
    return jax.tree_util.keystr(path).removesuffix(".value")


@pytest.mark.parametrize(
    ("shape", "logical", "want"),
    [
        ((8, 6), ("embed", "mlp"), P("fsdp", "tensor")),
        ((8, 7), ("embed", "mlp"), P("fsdp", None)),
        ((7, 8), ("embed", "vocab"), P(None, "tensor")),
        ((8, 8), ("taps", "heads"), P(None, "tensor")),
        ((4,), (None,), P(None)),
        ((2, 2), ("kv_heads", "embed"), P("tensor", "fsdp")),
    ],
)
def test_rules(shape, logical, want):
    assert spec(shape, logical, mesh(2, 2, 2)) == want


def test_unknown_logical_axes_are_errors():
    with pytest.raises(KeyError):
        spec((4,), ("width",), mesh(2, 2, 2))
    with pytest.raises(ValueError, match="zip"):
        spec((4, 4), ("embed",), mesh(2, 2, 2))


@pytest.fixture(scope="module")
def state():
    return init_state(Drafter.random(jax.random.key(0), DRAFTER), optimizer(OptimConfig(), 10), mesh(2, 2, 2))


def test_parameters_and_moments_follow_the_rules(state):
    """Every leaf, and both of AdamW's moments as the parameter they belong to."""
    found = {name(path): leaf.sharding.spec for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    assert found == SPECS
    moments = [(name(path), leaf.sharding.spec, leaf.ndim) for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    for parameter, want in SPECS.items():
        of_parameter = [found for path, found, _ in moments if path.endswith(parameter)]
        if parameter != "['norm']['scale']":
            assert of_parameter == [want, want], parameter
    counters = [found for _, found, ndim in moments if ndim == 0]
    assert set(counters) == {P()}
    assert len(moments) == 2 * len(SPECS) + len(counters)


def test_shards_are_really_smaller(state):
    kernel = state.params["layers"][0]["mlp"]["gate_proj"]["kernel"][...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(16, 24)}
    assert len({shard.device for shard in kernel.addressable_shards}) == 8


def test_placing_changes_no_value(state):
    for (_, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(state.params),
        jax.tree_util.tree_leaves_with_path(Drafter.random(jax.random.key(0), DRAFTER).params),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_what_does_not_divide_is_said():
    params = Drafter.random(jax.random.key(0), DRAFTER).params
    lines = replicated_dimensions(params, mesh(2, 2, 2))
    assert len(lines) == 4
    assert any("embed_tokens" in line and "vocab 61 is not divided by tensor 2, replicated" in line for line in lines)
    assert sum("kv_heads 7 is not divided by tensor 2" in line for line in lines) == 2
    assert replicated_dimensions(params, mesh()) == []


def test_parameters_are_born_sharded():
    """Each device makes its part: the values of one device, and no array that is whole anywhere."""
    where = mesh(2, 2, 2)
    one, born = (Drafter.random(jax.random.key(0), DRAFTER, *on) for on in ((), (where,)))
    assert jax.tree.map(lambda x: x.sharding, born.params) == shardings(born.params, where)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(born.params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    lowered = jax.jit(
        lambda key: Drafter.random(key, DRAFTER).params, out_shardings=shardings(born.params, where)
    ).lower(jax.random.key(0))  # fmt: skip
    program = computations(lowered.compile().as_text())
    made = max(max(each.sizes) for each in itertools.chain(*program.values()) if each.sizes)
    assert made == max(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(born.params)), "made whole and then cut"


def test_a_mesh_reads_every_byte_once(monkeypatch):
    """And no more at a time than a device holds. That processes read only what is theirs: test_processes."""
    reads = count_reads(monkeypatch)
    params = load_target(target_folder(), dtype="float32", mesh=mesh(1, 4, 2)).params
    leaves = jax.tree.leaves(params)
    assert sum(reads) == sum(x.nbytes for x in leaves)
    assert len(reads) > 4 * len(leaves), "in parts"
    parts = {x.nbytes // len(set(map(str, x.sharding.devices_indices_map(x.shape).values()))) for x in leaves}
    assert set(reads) == parts
    plain = jax.tree.leaves(tiny_target().params)
    for a, b in zip(leaves, plain, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_arrays_that_are_no_parameters_are_replicated():
    assert shardings({"count": jnp.zeros(8)}, mesh(2, 2, 2))["count"].spec == P()


def test_rows_are_spread_over_data_and_fsdp():
    rows = {"tokens_BT": np.arange(32, dtype=np.int32).reshape(8, 4), "loss_mask_BT": np.ones((8, 4), bool)}
    batch = place_batch(rows | {"length_B": np.full(8, 4, np.int32)}, mesh(2, 2, 2))
    assert batch.tokens_BT.sharding.spec == P(("replica", "data", "fsdp"))
    assert {shard.data.shape for shard in batch.tokens_BT.addressable_shards} == {(2, 4)}
    np.testing.assert_array_equal(np.asarray(batch.tokens_BT), rows["tokens_BT"])


def test_rows_of_a_process():
    """One process has all; two, whose devices lie scattered: test_processes."""
    where = mesh(4, 2)
    assert process_rows(where, 16).tolist() == list(range(16))
    values = np.arange(48.0).reshape(16, 3)
    placed = place_rows(values, where)
    assert placed.sharding.spec == BATCH
    np.testing.assert_array_equal(np.asarray(placed), values)
    with pytest.raises(ConfigError, match=r"data\.batch_size 12 is not a multiple of the 8 devices that hold rows"):
        process_rows(where, 12)


class FakeDevice:
    def __init__(self, number, slice_index=None):
        self.id = number
        if slice_index is not None:
            self.slice_index = slice_index


def test_slices_are_kept_apart():
    """Replicas lie across slices, and parameters never do."""
    devices = [FakeDevice(i, 1 - i // 4) for i in range(8)]
    assert [[d.id for d in part] for part in by_slice(devices)] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert len(by_slice([FakeDevice(i) for i in range(4)])) == 1
    with pytest.raises(ConfigError, match=r"mesh\.replica is 1, but the devices are 2 slices: make it a multiple of 2"):
        make_mesh(MeshConfig(1, 8, 1), devices)


def test_the_mesh_of_two_slices(monkeypatch):
    eight = jax.devices()[:8]
    monkeypatch.setattr("dflash_jax.sharding.by_slice", lambda devices: [eight[4:], eight[:4]])
    made = make_mesh(MeshConfig(1, 2, 2, replica=2), eight)
    assert made.devices.shape == (2, 1, 2, 2)
    assert [set(part.ravel()) for part in made.devices] == [set(eight[4:]), set(eight[:4])]
    assert made.axis_names == ("replica", "data", "fsdp", "tensor")


def test_mesh_sizes():
    eight = jax.devices()[:8]
    for config, want in [
        (MeshConfig(), (1, 8, 1, 1)),
        (MeshConfig(2, -1, 2), (1, 2, 2, 2)),
        (MeshConfig(1, 1, 8), (1, 1, 1, 8)),
        (MeshConfig(2, 2, 1, replica=-1), (2, 2, 2, 1)),
        (MeshConfig(-1, 2, 1, replica=4), (4, 1, 2, 1)),
    ]:
        made = make_mesh(config, eight)
        assert tuple(made.shape.values()) == want
        assert set(made.devices.ravel()) == set(eight)
    assert dict(make_mesh(MeshConfig(), eight[:1]).shape) == {"replica": 1, "data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(3, 1, 1), r"'data': 3.* does not hold 8 devices: change mesh\.data"),
        (MeshConfig(-1, 3, 1), r"'data': 2, 'fsdp': 3.* does not hold 8 devices"),
        (MeshConfig(-1, 16, 1), r"does not hold 8 devices"),
        (MeshConfig(-1, -1, 1), r"at most one of them -1"),
        (MeshConfig(0, 1, 1), r"must be positive"),
        (MeshConfig(-2, 1, 1), r"must be positive"),
    ],
)
def test_refused_meshes(config, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(config, jax.devices()[:8])


@pytest.fixture(scope="module")
def answers():
    """Prompts, and what one device answers, plain and speculative."""
    one = tiny_target()
    prompts = [one.tokenizer.encode_chat([user(text)]) for text in ("a", "hello")]
    drafter = load_drafter(drafter_folder(), one)
    return prompts, *(generate(one, d, prompts, max_new_tokens=12) for d in (None, drafter))


# On four devices the two key/value heads do not divide: their projections are split within a head.
@pytest.mark.parametrize("sizes", [(1, 2, 2), pytest.param((1, 1, 4), marks=pytest.mark.one_cell)], ids=str)
def test_decoding_on_a_mesh(answers, sizes):
    """Target and drafter spread over four devices: the tokens and the acceptance of one device."""
    prompts, plain, speculative = answers
    where = mesh(*sizes)
    target = load_target(target_folder(), dtype="float32", mesh=where)
    drafter = load_drafter(drafter_folder(), target)
    assert mesh_of(target.params) == where
    assert jax.tree.map(lambda x: x.sharding, drafter.params) == shardings(drafter.params, where)
    assert generate(target, drafter, prompts, max_new_tokens=12) == speculative
    assert speculative.tokens == plain.tokens
    if sizes == (1, 2, 2):
        assert generate(target, None, prompts, max_new_tokens=12) == plain
        state, _ = start(target, drafter, prompts, DecodeConfig(12))
        for cache in jax.tree.leaves((state.target_cache, state.draft_cache)):
            assert cache.sharding.shard_shape(cache.shape)[1] == cache.shape[1] // 2, "a cache is not split by its heads"


def test_parameters_without_a_mesh():
    assert mesh_of(tiny_target().params) is None
    assert mesh_of({"shape": jax.ShapeDtypeStruct((2,), jnp.float32)}) is None
