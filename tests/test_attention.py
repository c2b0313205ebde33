"""Both attentions against loops and against one dense softmax; what a block must not see."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import anchored_mask, dense_anchored_attention, loop_anchored_attention, loop_cached_attention

from dflash_jax.attention import anchored_attention, cached_attention

pytestmark = pytest.mark.one_cell

B, A, K, T, H, G, E = 2, 5, 4, 11, 4, 2, 8
# Neighbouring anchors, an anchor with nothing before it, a block that hangs over the end, an anchor past the end.
ANCHORS = np.array([[0, 1, 3, 4, 10], [2, 5, 6, 9, 12]], np.int32)


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(seed=0, batch=B, anchors=A, slots=K, context=T):
    shapes = [(batch, anchors, slots, H, E)] + 2 * [(batch, G, context, E)] + 2 * [(batch, anchors, slots, G, E)]
    q, *rest = (normal((seed, i), shape) for i, shape in enumerate(shapes))
    return (3 * q, *rest)  # sharper than uniform


def masks(anchors_BA=ANCHORS, **rule):
    return np.stack([anchored_mask(anchors.tolist(), K, T, **rule) for anchors in anchors_BA])


CASES = {
    "full": (False, None, {}),
    "full, chunks of 2, remat": (False, None, {"anchor_chunk": 2, "remat": True}),
    "causal": (True, None, {"remat": True}),
    "window 3, chunks of 3": (False, 3, {"anchor_chunk": 3}),
    "window 6, causal": (True, 6, {"anchor_chunk": 5}),
    "window 1": (False, 1, {}),
}


def with_gradients(function):
    """Jitted: outputs and the gradients of all five inputs."""
    weights, entropy_weights = normal(5, (B, A, K, H, E)), normal(6, (B, A))

    def total(args, last):
        out, entropy_BA = function(*args, last)
        return (out * weights).sum() + (entropy_BA * entropy_weights).sum(), (out, entropy_BA)

    def run(args, last):
        (_, outs), grads = jax.value_and_grad(total, has_aux=True)(args, last)
        return (*outs, *grads)

    return jax.jit(run)


@with_gradients
def dense(*args):
    """The entropy is for people: it has no gradient."""
    out, entropy_BA = dense_anchored_attention(*args)
    return out, jax.lax.stop_gradient(entropy_BA)


@pytest.mark.parametrize("case", CASES)
def test_anchored_equals_one_dense_softmax_and_loops(case):
    causal, window, execution = CASES[case]
    args = inputs()
    ours = partial(anchored_attention, causal=causal, window=window, dtype="float32", **execution)
    got = with_gradients(ours)(args, jnp.asarray(ANCHORS))
    for g, w in zip(got, dense(args, jnp.asarray(masks(causal=causal, window=window))), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
    looped = loop_anchored_attention(*args, ANCHORS, causal=causal, window=window)
    for g, w in zip(got[:2], looped, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (4, 2)])
def test_anchored_sees_its_document_only(window, chunk):
    """Context from a start on equals that context alone; a block that begins its document sees itself only."""
    args, starts_BA = inputs(seed=3), np.array([[0, 1, 2, 2, 9], [2, 2, 5, 5, 7]], np.int32)
    attend = jax.jit(partial(anchored_attention, causal=False, window=window, dtype="float32", anchor_chunk=chunk, remat=True))
    out, entropy_BA = attend(*args, jnp.asarray(ANCHORS), starts_BA=jnp.asarray(starts_BA))
    q, context_k, context_v, block_k, block_v = args
    out, entropy_BA = np.asarray(out), np.asarray(entropy_BA)
    for b, a in np.ndindex(B, A):
        start, anchor = int(starts_BA[b, a]), int(ANCHORS[b, a])
        alone = [x[b : b + 1, a : a + 1] for x in (q, block_k, block_v)]
        context = [x[b : b + 1, :, start:] for x in (context_k, context_v)]
        last = np.array([[anchor - start]])
        want = loop_anchored_attention(alone[0], *context, *alone[1:], last, causal=False, window=window)
        np.testing.assert_allclose(out[b, a], want[0][0, 0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(entropy_BA[b, a], want[1][0, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_cached_sees_its_document_only(window):
    q, k, v = normal(1, (2, T, H, E)), normal(2, (2, G, T, E)), normal(3, (2, G, T, E))
    starts_BT = np.array([[0, 0, 0, 3, 3, 3, 3, 7, 8, 8, 8], [0] * 10 + [10]], np.int32)
    slots_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (2, T))
    out = np.asarray(jax.jit(partial(cached_attention, dtype="float32", window=window))(q, k, v, slots_BT, starts_BT=starts_BT))
    for b in range(2):
        for start in set(starts_BT[b].tolist()):
            own = np.flatnonzero(starts_BT[b] == start)
            part = [q[b : b + 1, own], k[b : b + 1, :, own], v[b : b + 1, :, own]]
            want = loop_cached_attention(*part, np.arange(len(own))[None], window=window or math.inf)
            np.testing.assert_allclose(out[b, own], want[0], rtol=1e-4, atol=1e-5)


def test_anchored_in_bfloat16_is_close():
    args = inputs()
    attend = jax.jit(partial(anchored_attention, causal=False, window=None, dtype="bfloat16"))
    ours, _ = attend(*args, jnp.asarray(ANCHORS))
    wanted, _ = loop_anchored_attention(*args, ANCHORS, causal=False, window=None)
    assert ours.dtype == jnp.float32
    error = np.abs(np.asarray(ours) - wanted).max()
    assert 1e-5 < error < 0.1


@pytest.mark.parametrize("execution", [{}, {"anchor_chunk": 2, "remat": True}], ids=["whole", "chunks"])
def test_a_block_depends_on_nothing_at_or_after_its_anchor_nor_on_other_blocks(execution):
    """Each block's gradient is exactly zero there, and not zero at what it may read. Anchors are closer than a block."""
    anchors_BA, (q, *sources) = jnp.asarray(ANCHORS[:1]), map(jnp.asarray, inputs(batch=1))
    weights = normal(3, (1, A, K, H, E))

    @jax.jit
    def gradient(which_A):
        def total(*sources):
            out, entropy_BA = anchored_attention(q, *sources, anchors_BA, causal=False, window=None, dtype="float32", **execution)
            return ((out * weights).sum((2, 3, 4)) * which_A[None]).sum() + (entropy_BA * which_A[None]).sum()

        return jax.grad(total, argnums=(0, 1, 2, 3))(*sources)

    for a, anchor in enumerate(ANCHORS[0].tolist()):
        context_k_grad, context_v_grad, *block_grads = (np.asarray(g)[0] for g in gradient(np.eye(A, dtype=np.float32)[a]))
        for grad_GTE in (context_k_grad, context_v_grad):
            assert (grad_GTE[:, anchor:] == 0).all()
            assert (np.abs(grad_GTE[:, :anchor]).max(axis=-1) > 0).all()
        for grad_AKGE in block_grads:
            assert (np.delete(grad_AKGE, a, axis=0) == 0).all()
            assert (np.abs(grad_AKGE[a]).max(axis=-1) > 0).all()


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 3)])
def test_hidden_keys_may_hold_anything(causal, window):
    """Wild context at and after the last anchor, and outside the window, changes not one bit."""
    q, context_k, context_v, block_k, block_v = inputs()
    anchors_BA = np.full((B, A), 6, np.int32)
    attend = jax.jit(partial(anchored_attention, causal=causal, window=window, dtype="float32"))
    wanted, _ = attend(q, context_k, context_v, block_k, block_v, anchors_BA)
    first = 0 if window is None else 6 - window + 1
    hidden_T = (np.arange(T) < first) | (np.arange(T) >= 6)
    wild = np.where(hidden_T, 1e6, 0.0).astype(np.float32)[None, None, :, None]
    got, _ = attend(q, context_k + wild, context_v - wild, block_k, block_v, anchors_BA)
    np.testing.assert_array_equal(got, wanted)
    seen, _ = attend(q, context_k + np.float32(np.arange(T) == 5)[:, None], context_v, block_k, block_v, anchors_BA)
    assert (np.abs(np.asarray(seen) - wanted).max(axis=(3, 4))[:, :, 0] > 0).all()


def test_rows_and_blocks_do_not_change_one_another():
    """Changing row 1 and block 3 leaves every other block's bits alone."""
    args = inputs()
    attend = jax.jit(partial(anchored_attention, causal=False, window=None, dtype="float32"))
    wanted, _ = attend(*args, jnp.asarray(ANCHORS))
    q, context_k, context_v, block_k, block_v = (x.copy() for x in args)
    for x in (context_k[1], context_v[1], block_k[0, 3]):
        x += 1
    got, _ = attend(q, context_k, context_v, block_k, block_v, ANCHORS)
    same = np.ones((B, A), bool)
    same[1], same[0, 3] = False, False
    changed = np.abs(np.asarray(got) - wanted).max(axis=(2, 3, 4))
    assert (changed[same] == 0).all()
    assert (changed[~same] > 0).all()


def test_large_scores_stay_finite():
    args = tuple(np.float32(100) * x for x in inputs())

    def total(*args):
        out, entropy_BA = anchored_attention(*args, jnp.asarray(ANCHORS), causal=False, window=None, dtype="float32")
        return out.sum() + entropy_BA.sum()

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4)))(*args)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(("causal", "window"), [(False, 3), (True, 3), (False, 6), (True, 9)])
def test_the_smallest_ring_equals_the_whole_context(causal, window):
    """W + K - 1 slots, windows shorter and longer than a block, and up to K - 1 slots past the anchor written last."""
    anchors = np.array([[0], [1], [7], [12], [29], [33], [34], [35]], np.int32)
    batch, ring, context = len(anchors), window + K - 1, 40
    q, context_k, context_v, block_k, block_v = inputs(batch=batch, anchors=1, context=context)
    rings = [np.full((batch, G, ring, E), 1e4, np.float32) for _ in range(2)]  # what was never written may be anything
    for b, (anchor,) in enumerate(anchors.tolist()):
        for position in range(anchor + K if anchor else 0):
            for held, whole in zip(rings, (context_k, context_v), strict=True):
                held[b, :, position % ring] = whole[b, :, position]
    attend = jax.jit(partial(anchored_attention, causal=causal, window=window, dtype="float32", ring=True))
    got = attend(q, *map(jnp.asarray, rings), block_k, block_v, jnp.asarray(anchors))
    wanted = loop_anchored_attention(q, context_k, context_v, block_k, block_v, anchors, causal=causal, window=window)
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Cached attention


def cached_inputs():
    return 2 * normal(10, (2, 3, H, E)), normal(11, (2, G, 7, E)), normal(12, (2, G, 7, E))


@pytest.mark.parametrize("changes", [{}, {"window": 3}, {"window": 1, "scale": 0.7}, {"scale": 2.0, "cap": 1.5}])
def test_cached_equals_loops(changes):
    args = cached_inputs()
    positions_BT = np.array([[0, 3, 6], [2, 5, 1]], np.int32)  # rows at different lengths, positions in any order
    ours = jax.jit(partial(cached_attention, dtype="float32", **changes))(*args, jnp.asarray(positions_BT))
    np.testing.assert_allclose(ours, loop_cached_attention(*args, positions_BT, **changes), rtol=1e-5, atol=1e-5)


def test_cached_in_chunks_equals_loops(monkeypatch):
    """Three queries in chunks of two: the last chunk is padded."""
    monkeypatch.setattr("dflash_jax.attention.QUERY_CHUNK", 2)
    args, positions_BT, changes = (
        cached_inputs(),
        np.array([[0, 3, 6], [2, 5, 1]], np.int32),
        {"window": 3, "scale": 0.7, "cap": 1.5},
    )
    ours = jax.jit(partial(cached_attention, dtype="float32", **changes))(*args, jnp.asarray(positions_BT))
    np.testing.assert_allclose(ours, loop_cached_attention(*args, positions_BT, **changes), rtol=1e-5, atol=1e-5)


def test_cached_rows_that_see_nothing_stay_finite():
    """Padding stands at position -1. Its output means nothing, but it must be finite, forward and backward."""
    positions_BT = np.asarray([[-1, 0, 1], [-1, -1, -1]], np.int32)

    def total(*args):
        return (cached_attention(*args, jnp.asarray(positions_BT), "float32") ** 2).sum()

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*cached_inputs())
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)
