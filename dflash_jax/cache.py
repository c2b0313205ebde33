"""Key/value caches: slot j of a row holds the key and value of position j.

There is no length in a cache. A query at position p sees the slots j <= p (a drafter's block: j < anchor), and every slot is
rewritten before a query can see it, so rejecting drafted tokens means only continuing from an earlier position.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class KVCache(NamedTuple):
    """One array a layer (a stacked cache costs extra copies), each [B, G, C, E]: attention reads it without a transpose."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


def init_cache(num_layers: int, batch: int, capacity: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVCache:
    """An empty cache. Zeros, not uninitialised memory: a masked weight of 0 times a NaN would still be NaN."""

    def layer() -> Array:
        return jnp.zeros((batch, num_kv_heads, capacity, head_dim), jnp.dtype(dtype))

    return KVCache(tuple(layer() for _ in range(num_layers)), tuple(layer() for _ in range(num_layers)))


def write(
    cache_BGCE: Float[Array, "B G C E"], new_BTGE: Float[Array, "B T G E"], positions_BT: Int[Array, "B T"]
) -> Float[Array, "B G C E"]:
    """Put each new row at its position. A position outside 0..C-1 (padding) is written nowhere."""
    batch, _, capacity, _ = cache_BGCE.shape
    rows_B1 = jnp.arange(batch, dtype=positions_BT.dtype)[:, None]
    # Negative indices would wrap around; send them past the end, where mode="drop" drops them.
    slots_BT = jnp.where(positions_BT < 0, capacity, positions_BT)
    return cache_BGCE.at[rows_B1, :, slots_BT].set(new_BTGE.astype(cache_BGCE.dtype), mode="drop")
