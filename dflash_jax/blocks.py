"""Anchored blocks of a training row: where they start, what they hold, what each slot should predict.

A packed row holds several documents, one after the other; nothing of a block crosses from one to another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Blocks(NamedTuple):
    """The sampled blocks of a batch. Slot k of a block stands at slot anchor + k of its row and predicts the token there."""

    anchors_BA: Int[Array, "B A"]
    """their slots, ascending a row; unused ones are 0"""
    valid_BA: Bool[Array, "B A"]
    anchor_tokens_BA: Int[Array, "B A"]
    labels_BAK: Int[Array, "B A K"]
    """the token at anchor + k; meaningless where `supervised_BAK` is false"""
    supervised_BAK: Bool[Array, "B A K"]
    """slots that count: valid block, k > 0, inside the anchor's document, an assistant's token"""
    starts_BT: Int[Array, "B T"] | None = None
    """of packed rows: see `document_starts`; None: a row is one document"""


def document_starts(doc_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The slot where the document of each slot begins. A document's slots stand side by side; so do those of padding."""
    slots_1T = jnp.arange(doc_BT.shape[1], dtype=jnp.int32)[None]
    first_BT = jnp.pad(doc_BT[:, 1:] != doc_BT[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(first_BT, slots_1T, 0), axis=1)


def sample_anchors(
    key: Array,
    loss_mask_BT: Bool[Array, "B T"],
    num_anchors: int,
    starts_BT: Int[Array, "B T"] | None = None,
    per_document: int = 0,
) -> tuple[Int[Array, "B A"], Bool[Array, "B A"]]:
    """Distinct random anchors, ascending, and which of the `num_anchors` are real (a short row has fewer).

    Slot a is eligible when a and a + 1 are supervised slots of one document, so every block has a label (paper, section 3.2;
    SpecForge's rule). At most `per_document` anchors are in the same document (0: any number).
    """
    batch, length = loss_mask_BT.shape
    next_BT = jnp.pad(loss_mask_BT[:, 1:], ((0, 0), (0, 1)))
    eligible_BT = loss_mask_BT & next_BT
    if starts_BT is not None:
        eligible_BT &= jnp.pad(starts_BT[:, 1:] == starts_BT[:, :-1], ((0, 0), (0, 1)))
    noise_BT = jnp.where(eligible_BT, jax.random.uniform(key, (batch, length)), -1.0)
    slots_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    if per_document:
        begins_BT = jnp.zeros_like(slots_BT) if starts_BT is None else starts_BT
        ranks_BT = slots_BT - begins_BT
        # Documents lie side by side, so sorting by (document, noise) orders each within its own slots: the first ones are kept.
        _, hidden_BT, slots_BT = jax.lax.sort((begins_BT, -noise_BT, slots_BT), dimension=1, num_keys=2)
        noise_BT = jnp.where(ranks_BT < per_document, -hidden_BT, -1.0)
    count = min(num_anchors, length)
    noise_BA, places_BA = jax.lax.top_k(noise_BT, count)
    anchors_BA = jnp.take_along_axis(slots_BT, places_BA, axis=1)
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
    starts_BT: Int[Array, "B T"] | None = None,
) -> Blocks:
    """Blocks of `block_size` slots. A block may hang over the end of its document: labels past the end are masked."""
    length = tokens_BT.shape[1]
    k_K = jnp.arange(block_size, dtype=jnp.int32)
    positions_BAK = anchors_BA[:, :, None] + k_K[None, None]
    inside_BAK = positions_BAK < length

    def at_slots(x_BT: Array) -> Array:
        flat = jnp.minimum(positions_BAK, length - 1).reshape(x_BT.shape[0], -1)
        return jnp.take_along_axis(x_BT, flat, axis=1).reshape(positions_BAK.shape)

    if starts_BT is not None:
        inside_BAK &= at_slots(starts_BT) == jnp.take_along_axis(starts_BT, anchors_BA, axis=1)[:, :, None]
    supervised_BAK = at_slots(loss_mask_BT) & inside_BAK & valid_BA[:, :, None] & (k_K > 0)[None, None]
    anchor_tokens_BA = jnp.take_along_axis(tokens_BT, anchors_BA, axis=1)
    return Blocks(anchors_BA, valid_BA, anchor_tokens_BA, at_slots(tokens_BT), supervised_BAK, starts_BT)


def slot_weights(block_size: int, gamma_decay: float) -> Float[Array, " K"]:
    """w_k = exp(-(k-1)/gamma) for k >= 1 and 0 for the anchor (paper, Eq. 4)."""
    k_K = jnp.arange(block_size, dtype=jnp.float32)
    return jnp.where(k_K > 0, jnp.exp(-(k_K - 1) / gamma_decay), 0.0)
