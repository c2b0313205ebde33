"""Anchored blocks of a training row: where they start, what they hold, what each slot should predict."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Blocks(NamedTuple):
    """The sampled blocks of a batch. Slot k of a block stands at position anchor + k and predicts the token there."""

    anchors_BA: Int[Array, "B A"]
    """ascending a row; unused ones are 0"""
    valid_BA: Bool[Array, "B A"]
    anchor_tokens_BA: Int[Array, "B A"]
    labels_BAK: Int[Array, "B A K"]
    """the token at anchor + k; meaningless where `supervised_BAK` is false"""
    supervised_BAK: Bool[Array, "B A K"]
    """slots that count: valid block, k > 0, inside the row, an assistant's token"""


def sample_anchors(key: Array, loss_mask_BT: Bool[Array, "B T"], num_anchors: int) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Distinct random anchors, ascending, and which of the `num_anchors` are real (a short row has fewer).

    Position a is eligible when a and a + 1 are both supervised, so every block has a label (paper, section 3.2; SpecForge's rule).
    """
    batch, length = loss_mask_BT.shape
    next_BT = jnp.pad(loss_mask_BT[:, 1:], ((0, 0), (0, 1)))
    eligible_BT = loss_mask_BT & next_BT
    noise_BT = jnp.where(eligible_BT, jax.random.uniform(key, (batch, length)), -1.0)
    count = min(num_anchors, length)
    noise_BA, anchors_BA = jax.lax.top_k(noise_BT, count)
    ordered_BA = jnp.sort(jnp.where(noise_BA >= 0, anchors_BA, length).astype(jnp.int32), axis=1)
    ordered_BA = jnp.pad(ordered_BA, ((0, 0), (0, num_anchors - count)), constant_values=length)
    valid_BA = ordered_BA < length
    return jnp.where(valid_BA, ordered_BA, 0), valid_BA


def make_blocks(
    tokens_BT: Int[Array, "B T"],
    loss_mask_BT: Bool[Array, "B T"],
    anchors_BA: Int[Array, "B A"],
    valid_BA: Bool[Array, "B A"],
    block_size: int,
) -> Blocks:
    """Blocks of `block_size` slots. A block may hang over the end of its row: labels past the end are masked."""
    length = tokens_BT.shape[1]
    k_K = jnp.arange(block_size, dtype=jnp.int32)
    positions_BAK = anchors_BA[:, :, None] + k_K[None, None]
    inside_BAK = positions_BAK < length

    def at_slots(x_BT: Array) -> Array:
        flat = jnp.minimum(positions_BAK, length - 1).reshape(x_BT.shape[0], -1)
        return jnp.take_along_axis(x_BT, flat, axis=1).reshape(positions_BAK.shape)

    supervised_BAK = at_slots(loss_mask_BT) & inside_BAK & valid_BA[:, :, None] & (k_K > 0)[None, None]
    anchor_tokens_BA = jnp.take_along_axis(tokens_BT, anchors_BA, axis=1)
    return Blocks(anchors_BA, valid_BA, anchor_tokens_BA, at_slots(tokens_BT), supervised_BAK)


def slot_weights(block_size: int, gamma_decay: float) -> Float[Array, " K"]:
    """w_k = exp(-(k-1)/gamma) for k >= 1 and 0 for the anchor (paper, Eq. 4)."""
    k_K = jnp.arange(block_size, dtype=jnp.float32)
    return jnp.where(k_K > 0, jnp.exp(-(k_K - 1) / gamma_decay), 0.0)
