"""Train equals decode: what a block computes while training is what the first draft after its prefix computes, and it sees no more.

Everything starts from tokens, and every eligible position is an anchor: blocks overlap, and some hang over the end of their row.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import BLOCK, VOCAB, dense_drafter, dense_target

from dflash_jax.blocks import make_blocks, sample_anchors
from dflash_jax.config import Config, TrainConfig
from dflash_jax.drafter import Execution
from dflash_jax.model_config import RopeConfig
from dflash_jax.train_step import Batch, block_loss, target_features

pytestmark = pytest.mark.one_cell

LENGTH, CAPACITY = 13, 24
LENGTHS = np.array([13, 9], np.int32)  # the second row is padded
MASKS = np.zeros((2, LENGTH), bool)
MASKS[0, 1:] = True
MASKS[1, [0, 1, 2, 4, 5, 7, 8]] = True  # eligible: 0, 1, 4, 7
REAL = np.arange(LENGTH) < LENGTHS[:, None]
TOKENS = np.where(REAL, np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)), 0).astype(np.int32)
TARGET = dense_target()
OWN = {"draft_hidden_dim": 8, "own_embedding": True, "own_head": True}
ONE_LAYER = {"num_draft_layers": 1, "sliding_window": (), "causal": ()}
VARIANTS = {
    "plain": ({}, Execution()),
    "plain, chunks": ({}, Execution(4, True)),
    "window, causal, biases": (
        {"sliding_window": (3, None), "causal": (True, False), "attention_bias": True}, Execution(3, True),
    ),
    "windows, bidirectional, part of a head rotated by yarn": (
        {"sliding_window": (4, 7), "rope": RopeConfig(50.0, "yarn", 4.0, 16, partial_rotary_factor=0.5)}, Execution(5, False),
    ),
    "own tables, another width, causal, one layer": (
        OWN | ONE_LAYER | {"head_dim": 12, "causal": (True,)}, Execution(None, True),
    ),
    "learned mask, one layer": (ONE_LAYER | {"learned_mask_embedding": True, "mask_token_id": None}, Execution(2, False)),
}  # fmt: skip


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@jax.jit
def all_blocks(tokens, masks):
    """Blocks at every eligible position; the shorter row has invalid ones."""
    anchors_BA, valid_BA = sample_anchors(jax.random.key(0), masks, masks.shape[1])
    return make_blocks(tokens, masks, anchors_BA, valid_BA, BLOCK)


@jax.jit
def features(tokens_BT, lengths_B):
    return target_features(TARGET, TARGET.params, Batch(tokens_BT, tokens_BT > 0, lengths_B), (0, 1))


@pytest.fixture(scope="module")
def rows():
    """The rows' features and blocks, and row, index and anchor of every valid block."""
    blocks = jax.tree.map(np.asarray, all_blocks(TOKENS, MASKS))
    every = [(b, a, int(blocks.anchors_BA[b, a])) for b, a in np.argwhere(blocks.valid_BA).tolist()]
    assert len(every) == 11 + 4
    return SimpleNamespace(taps=np.asarray(features(TOKENS, LENGTHS)), blocks=blocks, every=every)


@partial(jax.jit, static_argnames="drafter")
def embed(drafter, tokens):
    return drafter.embed_block(drafter.params, tokens, BLOCK, partial(TARGET.embed, TARGET.params))


def unembed(drafter, hidden):
    return drafter.unembed(hidden, drafter.head(drafter.params, TARGET, TARGET.params), TARGET, TARGET.params)


@partial(jax.jit, static_argnames=("drafter", "execution"))
def train_logits(taps_BTM, block_BAKD, anchors_BA, drafter, execution=Execution()):  # noqa: B008
    return unembed(drafter, drafter.forward(drafter.params, taps_BTM, anchors_BA, block_BAKD, execution)[0])


@partial(jax.jit, static_argnames="drafter")
def first_draft(tokens_RT, lengths_R, anchor_tokens_R, cache, drafter):
    """Logits of the first block after a prefix, one row a prefix: both models read it through their caches, in two pieces."""
    slots_T = jnp.arange(tokens_RT.shape[1], dtype=jnp.int32)
    positions_RT = jnp.where(slots_T[None] < lengths_R[:, None], slots_T[None], -1)
    target_cache = TARGET.init_cache(tokens_RT.shape[0], CAPACITY)
    for piece in (slice(0, 5), slice(5, LENGTH)):
        tokens, positions = tokens_RT[:, piece], positions_RT[:, piece]
        _, taps, target_cache = TARGET.extend(TARGET.params, tokens, positions, target_cache, drafter.config.target_layer_ids)
        cache = drafter.extend_context(drafter.params, taps, positions, cache)
    block_positions = lengths_R[:, None] + jnp.arange(BLOCK, dtype=jnp.int32)[None]
    return unembed(drafter, drafter.propose(drafter.params, embed(drafter, anchor_tokens_R), block_positions, cache))


@pytest.mark.parametrize(("changes", "execution"), VARIANTS.values(), ids=VARIANTS)
def test_every_anchor_trains_as_it_decodes(rows, changes, execution):
    """Decoding knows the tokens up to the anchor and nothing else; its cache holds the noise of rejected rounds elsewhere."""
    drafter = dense_drafter(**changes)
    block_BAKD = embed(drafter, rows.blocks.anchor_tokens_BA)
    trained = np.asarray(train_logits(rows.taps, block_BAKD, rows.blocks.anchors_BA, drafter=drafter, execution=execution))
    anchors = np.array([anchor for *_, anchor in rows.every], np.int32)
    prefixes = np.array([np.where(np.arange(LENGTH) < anchor, TOKENS[b], 7) for b, _, anchor in rows.every], np.int32)
    noise = jax.tree.map(lambda x: normal(3, x.shape), drafter.init_cache(len(rows.every), CAPACITY))
    last = np.array([TOKENS[b, anchor] for b, _, anchor in rows.every], np.int32)
    decoded = first_draft(prefixes, anchors, last, noise, drafter=drafter)
    for (b, a, anchor), want in zip(rows.every, np.asarray(decoded), strict=True):
        np.testing.assert_allclose(trained[b, a], want, rtol=1e-4, atol=5e-5, err_msg=f"row {b}, anchor {anchor}")
    assert np.std(decoded) > 0.5, "logits so flat that the comparison says little"


# ---------------------------------------------------------------------------------------------------------------------
# What a block does not see


@pytest.mark.parametrize("name", ["plain, chunks", "window, causal, biases"])
def test_gradients_say_what_a_block_sees(rows, name):
    """Towards features at or after the anchor and towards other blocks' inputs: exactly 0. Towards its own inputs: not 0."""
    changes, execution = VARIANTS[name]
    drafter = dense_drafter(**changes)
    inputs, weights = embed(drafter, rows.blocks.anchor_tokens_BA), normal(4, (BLOCK, VOCAB))

    @jax.jit
    def gradient(chosen_BA):
        def total(taps_BTM, block_BAKD):
            logits_BAKV = train_logits(taps_BTM, block_BAKD, rows.blocks.anchors_BA, drafter=drafter, execution=execution)
            return (logits_BAKV * weights[None, None] * chosen_BA[:, :, None, None]).sum()

        return jax.grad(total, argnums=(0, 1))(rows.taps, inputs)

    for b, a, anchor in rows.every:
        chosen_BA = np.zeros(rows.blocks.anchors_BA.shape, np.float32)
        chosen_BA[b, a] = 1.0
        of_taps, of_blocks = (np.abs(np.asarray(g)).max(-1) for g in gradient(chosen_BA))
        assert (of_taps[b, anchor:] == 0).all(), f"anchor {anchor} sees a feature at or after it"
        assert (of_taps[b, :anchor] > 0).all(), f"anchor {anchor} does not see its prefix"
        assert (of_taps[1 - b] == 0).all(), "rows see each other"
        assert (of_blocks[b, a] > 0).all()
        of_blocks[b, a] = 0
        assert (of_blocks == 0).all(), f"anchor {anchor} sees another block"


@pytest.mark.parametrize("name", ["plain", "own tables, another width, causal, one layer"])
def test_changes_at_or_after_an_anchor_change_no_bit(rows, name):
    """Another token, or wild features, at a position: blocks that start before it keep every bit, and later ones do not."""
    drafter = dense_drafter(**VARIANTS[name][0])

    def run(tokens_BT, taps_BTM):
        blocks = all_blocks(tokens_BT, MASKS)
        return np.asarray(train_logits(taps_BTM, embed(drafter, blocks.anchor_tokens_BA), blocks.anchors_BA, drafter=drafter))

    base = run(TOKENS, rows.taps)
    for position in range(LENGTH):
        tokens = TOKENS.copy()
        tokens[:, position] = (tokens[:, position] + 1) % VOCAB
        by_token = run(tokens, features(tokens, LENGTHS))
        wild = rows.taps * np.where(np.arange(LENGTH) < position, 1, 1e4)[:, None].astype(np.float32)
        by_taps = run(TOKENS, wild)
        for b, a, anchor in rows.every:
            same = [np.array_equal(got[b, a], base[b, a]) for got in (by_token, by_taps)]
            padding = position >= LENGTHS[b]
            assert same == [anchor < position or padding, anchor <= position or padding], (b, anchor, position)


# ---------------------------------------------------------------------------------------------------------------------
# Packing and padding

CONFIG = Config(train=TrainConfig(anchor_chunk=4, logit_chunk=17))


@partial(jax.jit, static_argnames="drafter")
def loss_and_gradient(params, taps_BTM, blocks, drafter):
    def loss(params):
        sums, _ = block_loss(drafter, params, TARGET, TARGET.params, taps_BTM, blocks, jax.random.key(0), CONFIG)
        return sums.weighted, sums

    grads, sums = jax.grad(loss, has_aux=True)(params)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}, sums


def one_block_a_row(rows):
    """Every block alone in a row of its own."""
    b, a = (np.asarray([block[i] for block in rows.every]) for i in (0, 1))
    return rows.taps[b], jax.tree.map(lambda x: x[b, a][:, None], rows.blocks)


def padded(rows):
    """Longer rows, other tokens and features in the padding, a row without anchors, and more invalid blocks."""
    right = ((0, 1), (0, 6))
    real = np.pad(REAL, right)
    tokens = np.where(real, np.pad(TOKENS, right), 11).astype(np.int32)
    taps = np.asarray(features(tokens, np.append(LENGTHS, 19).astype(np.int32)))
    return np.where(real[..., None], taps, np.float32(3.0)), all_blocks(tokens, np.pad(MASKS, right))


@pytest.mark.parametrize(
    ("changes", "other"), [({}, padded), (OWN, one_block_a_row)], ids=["padded, shared head", "one block a row, own tables"]
)
def test_packing_and_padding_change_nothing(rows, changes, other):
    """Many blocks a row or one, padding or none: the loss sums and the gradient of every parameter."""
    drafter = dense_drafter(**ONE_LAYER | changes)
    want, want_sums = loss_and_gradient(drafter.params, rows.taps, rows.blocks, drafter=drafter)
    assert float(want_sums.blocks) == len(rows.every)
    got, sums = loss_and_gradient(drafter.params, *other(rows), drafter=drafter)
    for name, ours, theirs in zip(sums._fields, sums, want_sums, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)
    for name, grad in want.items():
        assert np.abs(grad).max() > 1e-4, f"{name} takes no gradient"
        np.testing.assert_allclose(got[name], grad, atol=1e-4 * np.abs(grad).max(), rtol=0, err_msg=name)
