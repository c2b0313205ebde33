"""Where cache rows are written, and that what lies past a query is never read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONTEXT, TAPS, VOCAB, dense_target

from dflash_jax.cache import init_cache, ring_slots, write

pytestmark = pytest.mark.one_cell

B, G, C, E = 3, 2, 7, 4


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_init_cache():
    cache = init_cache((C, 5, C), B, G, E, "bfloat16")
    for layers in cache:
        assert [layer.shape for layer in layers] == [(B, G, C, E), (B, G, 5, E), (B, G, C, E)]
        assert all(layer.dtype == jnp.bfloat16 and not layer.any() for layer in layers)
    ours = {layer.unsafe_buffer_pointer() for layer in (*cache.keys, *cache.values)}
    assert len(ours) == 6, "layers share a buffer: donating one would take another"


@pytest.mark.parametrize(
    "positions",
    [
        [[0, 1], [3, 4], [5, 6]],
        [[-1, 0], [6, 7], [7, 8]],  # padding before, the edge, past the edge: dropped, neither clamped nor wrapped
        [[-7, -8], [100, -100], [2**31 - 1, -(2**31)]],
        [[4, 2], [2, 4], [0, 6]],  # in any order
    ],
)
def test_write_puts_rows_at_their_positions(positions):
    cache, new = normal(0, (B, G, C, E)), normal(1, (B, 2, G, E))
    got = jax.jit(write)(cache, new, jnp.asarray(positions, jnp.int32))
    wanted = np.array(cache)
    for b in range(B):
        for t, position in enumerate(positions[b]):
            if 0 <= position < C:
                wanted[b, :, position] = new[b, t]
    np.testing.assert_array_equal(got, wanted)


def counted(start, length, size):
    """`length` positions from `start`, padded."""
    return [*range(start, start + length), *[-1] * (size - length)]


@pytest.mark.parametrize(
    "positions",
    [
        [counted(5, 4, 4), counted(12, 3, 4), counted(0, 0, 4)],  # around the end; row 2 is all padding
        [counted(9, 18, 18), counted(0, 8, 18), counted(3, 2, 18)],  # more than the ring holds, in rows of unequal lengths
        [[16, 9, 10, 8, -1, 15, 3, 14, 11], [-1, -5, 7, 0, 8, 1, -7, -8, -(2**31)], counted(20, 9, 9)],  # in any order
    ],
)
def test_a_ring_keeps_the_newest_position_of_every_slot(positions):
    """Written one by one in the order of positions, the last one stays."""
    cache, new = normal(0, (B, G, C, E)), normal(1, (B, len(positions[0]), G, E))
    got = jax.jit(partial(write, ring=True))(cache, new, jnp.asarray(positions, jnp.int32))
    wanted = np.array(cache)
    for b in range(B):
        for position, t in sorted((position, t) for t, position in enumerate(positions[b]) if position >= 0):
            wanted[b, :, position % C] = new[b, t]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("window", "block", "slots"), [(1, 2, 16), (1, 16, 16), (2, 16, 32), (2048, 16, 2064)])
def test_ring_slots(window, block, slots):
    assert ring_slots(window, block) == slots


def test_write_casts_to_the_cache():
    got = write(jnp.zeros((1, G, C, E), jnp.bfloat16), normal(1, (1, 1, G, E)), jnp.asarray([[2]], jnp.int32))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[0, :, 2], normal(1, (1, 1, G, E))[0, 0].astype(jnp.bfloat16))


@jax.jit
def extend(tokens, positions, cache):
    target = dense_target()
    hidden, taps, cache = target.extend(target.params, tokens, positions, cache, TAPS)
    return hidden, taps, cache


@pytest.mark.parametrize("rejected", [1, 3, 6])
def test_rejecting_is_only_continuing_from_an_earlier_position(rejected):
    """Rows reject different numbers of tokens; what was written for them leaves not one bit in later outputs."""
    random = np.random.default_rng(rejected)
    width = 8
    text = jnp.asarray(random.integers(0, VOCAB, (2, 3 * width)), jnp.int32)
    steps = jnp.arange(width, dtype=jnp.int32)[None]
    cut = jnp.asarray([width - rejected, width], jnp.int32)[:, None]  # row 1 rejects nothing
    cache = dense_target().init_cache(2, CONTEXT)
    _, _, cache = extend(text[:, :width], jnp.broadcast_to(steps, (2, width)), cache)
    later = jnp.take_along_axis(text, cut + steps, axis=1)
    junk = jnp.asarray(random.integers(0, VOCAB, (2, width)), jnp.int32)
    _, _, spoiled = extend(junk, cut + steps, cache)
    clean = extend(later, cut + steps, cache)
    after_junk = extend(later, cut + steps, spoiled)
    for got, want in zip(after_junk[:2], clean[:2], strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.abs(np.asarray(spoiled.keys[0]) - np.asarray(clean[2].keys[0])).max() > 0
