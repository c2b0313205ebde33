"""Losses over block slots. They return sums and counts, so that chunking, accumulation and sharding cannot change them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.layers import product
from dflash_jax.objectives import OVER_THE_LAW, Objective, SlotTerms

TargetLogits = Callable[[Int[Array, "B A"]], Float[Array, "B A J V"]]
"""the target's logits of the tokens at anchor + 1, + 2, ... of some blocks of every row"""


class Candidates(NamedTuple):
    """A part of the vocabulary that a loss is over: the tokens that are drafted at all (`draft_vocabulary`), or a random part that
    stands for all of it (`sample_vocabulary`: sampled softmax; Jean et al., arXiv 1412.2007)."""

    ids_S: Int[Array, " S"]
    """token ids"""
    correction_S: Float[Array, " S"]
    """added to logits: log of how many tokens each drawn one stands for, 0 for labels, so the normaliser is unbiased"""
    place_V: Int[Array, " V"]
    """where a token id stands in `ids_S`; -1 for a token that is never drafted"""


def draft_vocabulary(token_ids: tuple[int, ...], vocab_size: int) -> Candidates:
    """Candidates that are all a drafter can draft."""
    ids_S = jnp.asarray(token_ids, jnp.int32)
    place_V = jnp.full((vocab_size,), -1, jnp.int32).at[ids_S].set(jnp.arange(len(token_ids), dtype=jnp.int32))
    return Candidates(ids_S, jnp.zeros((len(token_ids),), jnp.float32), place_V)


def sample_vocabulary(
    key: Array, labels: Int[Array, "..."], supervised: Bool[Array, "..."], vocab_size: int, size: int
) -> Candidates:
    """Every supervised label and a uniform draw of the others. `size` must be at least the number of distinct labels."""
    spots = jnp.where(supervised, labels, vocab_size).reshape(-1)
    is_label_V = jnp.zeros((vocab_size,), bool).at[spots].set(True, mode="drop")
    score_V = jax.random.uniform(key, (vocab_size,)) + is_label_V.astype(jnp.float32)
    _, ids_S = jax.lax.top_k(score_V, size)
    labels_count = is_label_V.sum().astype(jnp.float32)
    stands_for = (vocab_size - labels_count) / jnp.maximum(size - labels_count, 1.0)
    correction_S = jnp.where(is_label_V[ids_S], 0.0, jnp.log(stands_for))
    place_V = jnp.full((vocab_size,), -1, jnp.int32).at[ids_S].set(jnp.arange(size, dtype=jnp.int32))
    return Candidates(ids_S.astype(jnp.int32), correction_S, place_V)


class LossSums(NamedTuple):
    """Sums over slots; divide by their counts only after adding up every chunk, micro-batch and device."""

    weighted: Float[Array, ""]
    """sum of w_k x loss"""
    weight: Float[Array, ""]
    """what `weighted` is divided by: the sum of w_k (decay), or `slots` (dpace)"""
    unweighted: Float[Array, ""]
    """sum of losses"""
    slots: Float[Array, ""]
    """supervised slots whose label can be drafted"""
    correct_K: Float[Array, " K"]
    """supervised slots whose argmax is the label, by slot"""
    count_K: Float[Array, " K"]
    accepted: Float[Array, ""]
    """length of the correct prefix, summed over blocks (supervised slots only)"""
    blocks: Float[Array, ""]
    """blocks with at least one supervised slot"""

    @property
    def loss(self) -> Array:
        """Weighted mean of the slots' losses; 0 without supervised slots."""
        return self.weighted / jnp.maximum(self.weight, 1e-9)

    @property
    def unweighted_loss(self) -> Array:
        return self.unweighted / jnp.maximum(self.slots, 1.0)

    @property
    def acceptance_length(self) -> Array:
        """Joint-prefix estimate of tau from teacher-forced blocks, bonus token included."""
        return 1.0 + self.accepted / jnp.maximum(self.blocks, 1.0)


def dflash_loss(
    logits_BAKV: Float[Array, "B A K V"],
    labels_BAK: Int[Array, "B A K"],
    supervised_BAK: Bool[Array, "B A K"],
    gamma_decay: float,
) -> LossSums:
    """Position-weighted cross-entropy of whole logits (paper, Eq. 4): slot k weighs exp(-(k-1)/gamma), slot 0 nothing."""
    objective = Objective(gamma_decay)
    return loss_sums(objective.terms(logits_BAKV.astype(jnp.float32), labels_BAK), supervised_BAK, objective)


def loss_sums(terms_BAK: SlotTerms, supervised_BAK: Bool[Array, "B A K"], objective: Objective) -> LossSums:
    """Sums from the terms of whole blocks; slot 0 never counts."""
    slots = supervised_BAK.shape[-1]
    counted_BAK = supervised_BAK & (jnp.arange(slots) > 0)[None, None]
    mask_BAK = (counted_BAK & terms_BAK.learned).astype(jnp.float32)
    flat = (x[:, :, 1:].reshape(-1, slots - 1) for x in (terms_BAK.confidence, counted_BAK, terms_BAK.learned))
    weight_BAJ = objective.weights(*flat).reshape(*mask_BAK.shape[:2], slots - 1)
    hits_BAK = (terms_BAK.correct & counted_BAK).astype(jnp.float32)
    # A slot that is not supervised ends the prefix: decoding could not have been checked beyond it.
    prefix_BAK = jnp.cumprod(hits_BAK[..., 1:], axis=-1)
    return LossSums(
        weighted=(weight_BAJ * terms_BAK.loss[..., 1:]).sum(),
        weight=(weight_BAJ if objective.slot_weights == "decay" else mask_BAK).sum(),
        unweighted=(mask_BAK * terms_BAK.loss).sum(),
        slots=mask_BAK.sum(),
        correct_K=hits_BAK.sum((0, 1)),
        count_K=counted_BAK.astype(jnp.float32).sum((0, 1)),
        accepted=prefix_BAK.sum(),
        blocks=counted_BAK.any(-1).astype(jnp.float32).sum(),
    )


def head_loss(
    hidden_BAKD: Float[Array, "B A K D"],
    head_VD: Float[Array, "V D"],
    labels_BAK: Int[Array, "B A K"],
    supervised_BAK: Bool[Array, "B A K"],
    objective: Objective,
    *,
    frozen: bool,
    logit_chunk: int,
    dtype: str,
    candidates: Candidates | None = None,
    anchors_BA: Int[Array, "B A"] | None = None,
    target_logits: TargetLogits | None = None,
) -> LossSums:
    """The objective's sums of `hidden @ head.T` without ever holding more than `logit_chunk` slots' logits (or those of one block
    a row, if more).

    `frozen`: the head takes no gradient, and the gradient of `weighted` towards the hidden states is formed chunk by chunk in the
    forward pass (design decision 14), so logits are neither kept nor recomputed; only `weighted` is differentiable then. Otherwise
    chunks are recomputed in the backward pass. With `candidates` the softmax is over them, cheaper by V/S; correctness is then
    judged among them, and a label that is not one of them is a miss that teaches nothing. All losses but ce need `anchors_BA` and
    `target_logits`, take their labels from the target, and hold its logits beside the drafter's.
    """
    batch, anchors, slots, width = hidden_BAKD.shape
    bias_V = jnp.zeros((head_VD.shape[0],), jnp.float32)
    if candidates is not None:
        head_VD, bias_V = head_VD[candidates.ids_S], candidates.correction_S
    if frozen:
        head_VD = jax.lax.stop_gradient(head_VD)
    if anchors_BA is None:
        anchors_BA = jnp.zeros((batch, anchors), jnp.int32)
    # Whole blocks, because weights of a block's slots may depend on one another, and some of every row, so that each device works
    # on its own rows. Slot 0 never has a label: leaving it out saves 1/K of the largest product.
    chunk = min(max(logit_chunk // (batch * (slots - 1)), 1), anchors)
    pad = -anchors % chunk

    def split(x_BA: Array) -> Array:
        x_BA = jnp.pad(x_BA, ((0, 0), (0, pad)) + ((0, 0),) * (x_BA.ndim - 2))
        return jnp.moveaxis(x_BA.reshape(batch, -1, chunk, *x_BA.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x_BAJ = jnp.moveaxis(x, 0, 1).reshape(batch, -1, slots - 1)[:, :anchors]
        return jnp.pad(x_BAJ, ((0, 0), (0, 0), (1, 0)))

    def weighted(rows_BCJD: Array, part: tuple[Array, Array, Array]) -> tuple[Array, SlotTerms]:
        labels_BCJ, supervised_BCJ, anchors_BC = part
        logits = product("nd,vd->nv", rows_BCJD.reshape(-1, width), head_VD, dtype) + bias_V[None]
        labels, log_law = labels_BCJ.reshape(-1), None
        if objective.loss != "ce":
            assert target_logits is not None, f"{objective.loss} needs the target's logits"
            of_target = jax.lax.stop_gradient(target_logits(anchors_BC)).reshape(labels.shape[0], -1)
            labels = jnp.argmax(of_target, axis=-1).astype(jnp.int32)
            log_law = jax.nn.log_softmax(of_target, axis=-1) if objective.loss in OVER_THE_LAW else None
        if candidates is not None:
            labels = candidates.place_V[labels]
            log_law = None if log_law is None else log_law[:, candidates.ids_S]
        terms = objective.terms(logits, labels, log_law)
        blocks = (x.reshape(-1, slots - 1) for x in (terms.confidence, supervised_BCJ, terms.learned))
        total = (objective.weights(*blocks).reshape(-1) * terms.loss).sum()
        return total, jax.tree.map(lambda x: x.reshape(labels_BCJ.shape), terms)

    rows = split(hidden_BAKD[:, :, 1:])
    parts = split(labels_BAK[:, :, 1:]), split(supervised_BAK[:, :, 1:]), split(anchors_BA)
    if frozen:
        with_slope = jax.value_and_grad(weighted, has_aux=True)
        (totals, terms), slopes = jax.lax.map(lambda x: with_slope(*x), (jax.lax.stop_gradient(rows), parts))
        total = _with_gradient(totals.sum(), rows, slopes)
    else:
        totals, terms = jax.lax.map(lambda x: jax.checkpoint(weighted)(*x), (rows, parts))
        total = totals.sum()
    return loss_sums(jax.tree.map(join, terms), supervised_BAK, objective)._replace(weighted=total)


@jax.custom_vjp
def _with_gradient(value: Array, x: Array, gradient: Array) -> Array:
    """`value`, as a function of `x` whose gradient is known."""
    return value


def _with_gradient_fwd(value: Array, x: Array, gradient: Array) -> tuple[Array, Array]:
    return value, gradient


def _with_gradient_bwd(gradient: Array, cotangent: Array) -> tuple[None, Array, None]:
    return None, cotangent * gradient, None


_with_gradient.defvjp(_with_gradient_fwd, _with_gradient_bwd)
