"""Anchors and blocks against loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.blocks import document_starts, make_blocks, sample_anchors, slot_weights

pytestmark = pytest.mark.one_cell

LENGTH, ANCHORS, BLOCK = 12, 5, 4
sample = jax.jit(sample_anchors, static_argnames=("num_anchors", "per_document"))
make = jax.jit(make_blocks, static_argnames="block_size")

MASKS = np.array(
    [
        [1] * 12,
        [0] * 12,
        [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1],  # supervised, but never two in a row
        [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1],  # eligible: 3, 4, 8
        [0] * 10 + [1, 1],  # the last position has no next token
    ],
    bool,
)
ELIGIBLE = [set(range(11)), set(), set(), {3, 4, 8}, {10}]


@pytest.mark.parametrize("seed", range(5))
def test_anchors_are_distinct_eligible_ascending_and_as_many_as_there_are(seed):
    anchors_BA, valid_BA = (np.asarray(x) for x in sample(jax.random.key(seed), jnp.asarray(MASKS), ANCHORS))
    for row, eligible in enumerate(ELIGIBLE):
        count = min(ANCHORS, len(eligible))
        assert valid_BA[row].tolist() == [True] * count + [False] * (ANCHORS - count)
        chosen = anchors_BA[row, :count].tolist()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= eligible
        assert (anchors_BA[row, count:] == 0).all()


def test_more_anchors_than_positions():
    anchors_BA, valid_BA = sample(jax.random.key(0), jnp.asarray(MASKS), 20)
    assert [set(a[v].tolist()) for a, v in zip(np.asarray(anchors_BA), np.asarray(valid_BA), strict=True)] == ELIGIBLE


def test_every_eligible_position_is_equally_likely_and_rows_are_independent():
    keys, rows = jax.random.split(jax.random.key(0), 500), jnp.ones((2, LENGTH), bool)
    anchors_NBA = np.asarray(jax.jit(jax.vmap(lambda key: sample_anchors(key, rows, ANCHORS)[0]))(keys))
    counts = np.bincount(anchors_NBA.reshape(-1), minlength=LENGTH)
    expected = 1000 * ANCHORS / 11
    assert counts[11] == 0
    assert (np.abs(counts[:11] - expected) < 5 * math.sqrt(expected)).all()
    assert (anchors_NBA[:, 0] != anchors_NBA[:, 1]).any(axis=1).mean() > 0.9


def test_blocks_against_loops():
    """Neighbouring anchors, a block over the end of its row, an unused anchor, an unsupervised token inside a block."""
    tokens_BT = np.random.default_rng(0).integers(0, 99, (2, LENGTH)).astype(np.int32)
    mask_BT = MASKS[[0, 3]]
    anchors_BA = np.array([[0, 1, 7, 9, 10], [3, 4, 8, 0, 0]], np.int32)
    valid_BA = np.array([[True] * 5, [True, True, True, False, False]])
    blocks = make(*(jnp.asarray(x) for x in (tokens_BT, mask_BT, anchors_BA, valid_BA)), BLOCK)
    np.testing.assert_array_equal(blocks.anchors_BA, anchors_BA)
    for b, a, k in np.ndindex(2, 5, BLOCK):
        position = int(anchors_BA[b, a]) + k
        counts = bool(valid_BA[b, a]) and k > 0 and position < LENGTH and bool(mask_BT[b, position])
        assert bool(blocks.supervised_BAK[b, a, k]) == counts, (b, a, k)
        if counts:
            assert int(blocks.labels_BAK[b, a, k]) == tokens_BT[b, position], "slot k predicts the token at anchor + k"
        if valid_BA[b, a] and k == 0:
            assert int(blocks.anchor_tokens_BA[b, a]) == tokens_BT[b, position]


def test_every_sampled_block_has_a_label():
    anchors_BA, valid_BA = sample(jax.random.key(1), jnp.asarray(MASKS), ANCHORS)
    blocks = make(jnp.zeros(MASKS.shape, jnp.int32), jnp.asarray(MASKS), anchors_BA, valid_BA, BLOCK)
    np.testing.assert_array_equal(blocks.supervised_BAK[:, :, 1], valid_BA)


# ---------------------------------------------------------------------------------------------------------------------
# Packed rows

DOCS = np.array([[4, 4, 4, 4, 4, 7, 7, 7, 9, 9, 9, -1], [3] * 12, [5, 6, 6, 6, 6, 6, 6, 6, 6, 2, 2, 2]], np.int32)
PACKED = np.array([[1] * 11 + [0], [1] * 12, [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1]], bool)
CANDIDATES = [[{0, 1, 2, 3}, {5, 6}, {8, 9}], [set(range(11))], [set(), {1, 4, 5, 6, 7}, set()]]
"""eligible slots of each document: never the last one of a document, whose successor belongs to the next"""


def test_document_starts():
    starts_BT = np.asarray(document_starts(jnp.asarray(DOCS)))
    for b, t in np.ndindex(*DOCS.shape):
        assert starts_BT[b, t] == min(s for s in range(t + 1) if (DOCS[b, s : t + 1] == DOCS[b, t]).all())


@pytest.mark.parametrize("cap", [0, 2])
def test_no_document_has_more_anchors_than_allowed(cap):
    """As many as there are, up to the cap of each document and to the row's; every candidate is chosen at some time."""
    seen = [[set() for _ in row] for row in CANDIDATES]
    for seed in range(40):
        anchors_BA, valid_BA = sample(
            jax.random.key(seed), jnp.asarray(PACKED), ANCHORS, document_starts(jnp.asarray(DOCS)), per_document=cap
        )
        for b, row in enumerate(CANDIDATES):
            chosen = np.asarray(anchors_BA)[b][np.asarray(valid_BA)[b]].tolist()
            assert chosen == sorted(set(chosen))
            assert set(chosen) <= set().union(*row)
            assert len(chosen) == min(ANCHORS, sum(min(len(slots), cap or len(slots)) for slots in row))
            for d, slots in enumerate(row):
                assert len(slots & set(chosen)) <= (cap or ANCHORS)
                seen[b][d] |= slots & set(chosen)
    assert seen == CANDIDATES


def test_a_cap_without_packing_is_a_cap_of_the_row():
    anchors_BA, valid_BA = sample(jax.random.key(0), jnp.asarray(MASKS), ANCHORS, per_document=2)
    for chosen, valid, eligible in zip(np.asarray(anchors_BA).tolist(), np.asarray(valid_BA), ELIGIBLE, strict=True):
        assert valid.sum() == min(2, len(eligible))
        assert set(chosen[: valid.sum()]) <= eligible


def test_blocks_end_with_their_document():
    tokens_BT = np.random.default_rng(1).integers(0, 99, DOCS.shape).astype(np.int32)
    anchors_BA = np.array([[0, 3, 6, 8, 9], [0, 4, 8, 9, 10], [1, 4, 6, 7, 0]], np.int32)
    valid_BA = np.array([[True] * 5, [True] * 5, [True] * 4 + [False]])
    starts_BT = document_starts(jnp.asarray(DOCS))
    blocks = make(*(jnp.asarray(x) for x in (tokens_BT, PACKED, anchors_BA, valid_BA)), BLOCK, starts_BT)
    crossing = 0
    for b, a, k in np.ndindex(3, 5, BLOCK):
        anchor, slot = int(anchors_BA[b, a]), int(anchors_BA[b, a]) + k
        inside = slot < LENGTH and DOCS[b, slot] == DOCS[b, anchor]
        counts = bool(valid_BA[b, a]) and k > 0 and inside and bool(PACKED[b, slot])
        assert bool(blocks.supervised_BAK[b, a, k]) == counts, (b, a, k)
        assert not counts or int(blocks.labels_BAK[b, a, k]) == tokens_BT[b, slot]
        crossing += slot < LENGTH and bool(valid_BA[b, a]) and bool(PACKED[b, slot]) and not inside
    assert crossing > 5, "labels of a neighbour were within reach"


@pytest.mark.parametrize("gamma", [0.5, 4.0, 7.0])
def test_slot_weights(gamma):
    weights = np.asarray(slot_weights(8, gamma))
    np.testing.assert_allclose(weights, [0] + [math.exp(-(k - 1) / gamma) for k in range(1, 8)], rtol=1e-6)
    assert weights[1] == 1
    assert (np.diff(weights[1:]) < 0).all()
