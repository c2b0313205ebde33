"""Key/value caches: slot j of a row holds the key and value of position j.

There is no length in a cache. A query at position p sees the slots j <= p (a drafter's block: j < anchor), and every slot is
rewritten before a query can see it, so rejecting drafted tokens means only continuing from an earlier position.

A drafter layer with a window keeps a ring: slot j of R holds the newest position congruent to j modulo R (`ring_slots`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class KVCache(NamedTuple):
    """One array a layer (a stacked cache costs extra copies), each [B, G, C, E]: attention reads it without a transpose."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


def init_cache(slots: Sequence[int], batch: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVCache:
    """An empty cache, `slots` a layer. Zeros, not uninitialised memory: a masked weight of 0 times a NaN would still be NaN."""

    def layers() -> tuple[Array, ...]:
        return tuple(jnp.zeros((batch, num_kv_heads, size, head_dim), jnp.dtype(dtype)) for size in slots)

    return KVCache(layers(), layers())


def ring_slots(window: int, block_size: int) -> int:
    """Slots R of a ring from which any block of up to K slots reads all that its window W lets it see: at least W + K - 1.

    A block with its anchor at a sees no context before a - W + 1. What was written last may lie K - 1 past the anchor: the rejected
    slots of the round before reach a + K - 2, those of a row that stands still a + K - 1. Each has overwritten the position R below
    it, so a + K - 1 - R < a - W + 1. Rounded up to 16, the rows of a bfloat16 tile on TPUs.
    """
    return -(-(window + block_size - 1) // 16) * 16


def write(
    cache_BGCE: Float[Array, "B G C E"], new_BTGE: Float[Array, "B T G E"], positions_BT: Int[Array, "B T"], *, ring: bool = False
) -> Float[Array, "B G C E"]:
    """Put each new row at its position. A position outside 0..C-1 (padding) is written nowhere.

    In a `ring` only negative positions are padding, and of more than C positions the last C of each row are written.
    """
    batch, _, capacity, _ = cache_BGCE.shape
    rows_B1 = jnp.arange(batch, dtype=positions_BT.dtype)[:, None]
    slots_BT, padding_BT = positions_BT, positions_BT < 0
    if ring:  # a scatter to one slot twice has no order, so what another position of the chunk replaces is not written
        slots_BT = positions_BT % capacity
        padding_BT |= positions_BT <= positions_BT.max(axis=1, keepdims=True) - capacity
    # Negative indices would wrap around; send them past the end, where mode="drop" drops them.
    slots_BT = jnp.where(padding_BT, capacity, slots_BT)
    return cache_BGCE.at[rows_B1, :, slots_BT].set(new_BTGE.astype(cache_BGCE.dtype), mode="drop")
