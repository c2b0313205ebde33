"""Losses over block slots. They return sums and counts, so that chunking, accumulation and sharding cannot change them."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.blocks import slot_weights
from dflash_jax.layers import product

NEVER = 1e9
"""the cross-entropy of a label that is never drafted: a miss of probability 0 that teaches nothing"""


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


class Objective(NamedTuple):
    """How slots are weighed."""

    gamma_decay: float
    kind: Literal["decay", "dpace"] = "decay"
    """decay: w_k = exp(-(k-1)/gamma), divided by the sum of weights (paper, Eq. 4). dpace: weights from the drafter's own
    confidences, divided by the number of supervised slots (D-PACE, arXiv 2605.18810)"""

    def weights(self, entropy_AJ: Float[Array, "A J"], supervised_AJ: Float[Array, "A J"]) -> Float[Array, "A J"]:
        """Weights of the drafted slots of blocks, without gradient; `supervised` is 1 or 0. A label of `NEVER` weighs nothing."""
        learned_AJ = supervised_AJ * (entropy_AJ < NEVER).astype(jnp.float32)
        if self.kind == "decay":
            return learned_AJ * slot_weights(entropy_AJ.shape[1] + 1, self.gamma_decay)[None, 1:]
        # Slot j counts as much as the prefixes that end at j or later are likely; halved towards 1, so that late slots learn too.
        likely_AJ = jnp.where(supervised_AJ > 0, 0.5 + 0.5 * jnp.exp(-jax.lax.stop_gradient(entropy_AJ)), 1.0)
        prefix_AJ = jnp.cumprod(likely_AJ, axis=1) * learned_AJ
        return learned_AJ * jnp.flip(jnp.cumsum(jnp.flip(prefix_AJ, 1), axis=1), 1)


class LossSums(NamedTuple):
    """Sums over slots; divide by their counts only after adding up every chunk, micro-batch and device."""

    weighted: Float[Array, ""]
    """sum of w_k x cross-entropy"""
    weight: Float[Array, ""]
    """what `weighted` is divided by: the sum of w_k (decay), or `slots` (dpace)"""
    unweighted: Float[Array, ""]
    """sum of cross-entropy"""
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
        """Weighted mean cross-entropy; 0 without supervised slots."""
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
    logits_BAKV = logits_BAKV.astype(jnp.float32)
    picked = jnp.take_along_axis(logits_BAKV, labels_BAK[..., None], axis=-1)[..., 0]
    entropy_BAK = jax.nn.logsumexp(logits_BAKV, axis=-1) - picked
    correct_BAK = jnp.argmax(logits_BAKV, axis=-1) == labels_BAK
    return loss_sums(entropy_BAK, correct_BAK, supervised_BAK, Objective(gamma_decay))


def loss_sums(
    entropy_BAK: Float[Array, "B A K"],
    correct_BAK: Bool[Array, "B A K"],
    supervised_BAK: Bool[Array, "B A K"],
    objective: Objective,
) -> LossSums:
    """Sums from each slot's cross-entropy and whether its argmax is the label. A slot of entropy `NEVER` counts as a miss only."""
    slots = entropy_BAK.shape[-1]
    counted_BAK = supervised_BAK & (jnp.arange(slots) > 0)[None, None]
    count_BAK = counted_BAK.astype(jnp.float32)
    mask_BAK = count_BAK * (entropy_BAK < NEVER).astype(jnp.float32)
    weight_AJ = objective.weights(*(x[:, :, 1:].reshape(-1, slots - 1) for x in (entropy_BAK, count_BAK)))
    weight_BAK = jnp.pad(weight_AJ.reshape(*mask_BAK.shape[:2], slots - 1), ((0, 0), (0, 0), (1, 0)))
    hits_BAK = (correct_BAK & counted_BAK).astype(jnp.float32)
    # A slot that is not supervised ends the prefix: decoding could not have been checked beyond it.
    prefix_BAK = jnp.cumprod(hits_BAK[..., 1:], axis=-1)
    return LossSums(
        weighted=(weight_BAK * entropy_BAK).sum(),
        weight=(weight_BAK if objective.kind == "decay" else mask_BAK).sum(),
        unweighted=(mask_BAK * entropy_BAK).sum(),
        slots=mask_BAK.sum(),
        correct_K=hits_BAK.sum((0, 1)),
        count_K=count_BAK.sum((0, 1)),
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
) -> LossSums:
    """`dflash_loss` of `hidden @ head.T` without ever holding more than `logit_chunk` slots' logits (or a block's a row, if more).

    `frozen`: the head takes no gradient, and the gradient of `weighted` towards the hidden states is formed chunk by chunk in the
    forward pass (design decision 14), so logits are neither kept nor recomputed; only `weighted` is differentiable then. Otherwise
    chunks are recomputed in the backward pass. With `candidates` the softmax is over them, cheaper by V/S; correctness is then
    judged among them, and a label that is not one of them is a miss that teaches nothing.
    """
    batch, anchors, slots, _ = hidden_BAKD.shape
    bias_V = jnp.zeros((head_VD.shape[0],), jnp.float32)
    if candidates is not None:
        head_VD, bias_V, labels_BAK = head_VD[candidates.ids_S], candidates.correction_S, candidates.place_V[labels_BAK]
    # Whole blocks, because the weights of a block's slots may depend on one another, and some of every row, so that each device
    # works on its own rows.
    blocks = min(max(logit_chunk // (batch * (slots - 1)), 1), anchors)
    pad = -anchors % blocks

    def split(x_BAK: Array) -> Array:
        """[B, A, K, ...] to [chunks, C, ...]. Slot 0 never has a label: leaving it out saves 1/K of the largest product."""
        x_BAJ = jnp.pad(x_BAK[:, :, 1:], ((0, 0), (0, pad)) + ((0, 0),) * (x_BAK.ndim - 2))
        x = x_BAJ.reshape(batch, -1, blocks, *x_BAJ.shape[2:])
        return jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1, *x_BAK.shape[3:])

    run = _frozen_head if frozen else _trained_head
    rows, labels, supervised = split(hidden_BAKD), split(labels_BAK), split(supervised_BAK.astype(jnp.float32))
    weighted, entropy, correct = run(rows, head_VD, bias_V, labels, supervised, _How(slots - 1, objective, dtype))

    def slots_again(x: Array) -> Array:
        x_BAJ = jnp.moveaxis(x.reshape(x.shape[0], batch, -1), 0, 1).reshape(batch, -1, slots - 1)[:, :anchors]
        return jnp.pad(x_BAJ, ((0, 0), (0, 0), (1, 0)))

    sums = loss_sums(slots_again(entropy), slots_again(correct), supervised_BAK, objective)
    return sums._replace(weighted=weighted)


class _How(NamedTuple):
    drafted: int
    """slots of a block that have labels"""
    objective: Objective
    dtype: str

    def weights(self, entropy_C: Array, supervised_C: Array) -> Array:
        blocks = (x.reshape(-1, self.drafted) for x in (entropy_C, supervised_C))
        return self.objective.weights(*blocks).reshape(-1)


def _chunk_entropy(rows_CD: Array, head_VD: Array, bias_V: Array, labels_C: Array, dtype: str) -> tuple[Array, Array, Array, Array]:
    """Logits, log-normaliser, cross-entropy and correctness of one chunk."""
    logits_CV = product("nd,vd->nv", rows_CD, head_VD, dtype) + bias_V[None]
    top_C = jax.nn.logsumexp(logits_CV, axis=-1)
    entropy_C = top_C - jnp.take_along_axis(logits_CV, jnp.maximum(labels_C, 0)[:, None], axis=1)[:, 0]
    entropy_C = jnp.where(labels_C < 0, NEVER, entropy_C)
    return logits_CV, top_C, entropy_C, jnp.argmax(logits_CV, axis=-1) == labels_C


def _trained_head(
    rows: Array, head_VD: Array, bias_V: Array, labels: Array, supervised: Array, how: _How
) -> tuple[Array, Array, Array]:
    """Of chunks [chunks, C, ...]: the weighted sum, each slot's cross-entropy and correctness."""

    @jax.checkpoint
    def one(part: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        rows_CD, labels_C, supervised_C = part
        _, _, entropy_C, correct_C = _chunk_entropy(rows_CD, head_VD, bias_V, labels_C, how.dtype)
        return (how.weights(entropy_C, supervised_C) * entropy_C).sum(), entropy_C, correct_C

    weighted, entropy, correct = jax.lax.map(one, (rows, labels, supervised))
    return weighted.sum(), entropy, correct


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _frozen_head(
    rows: Array, head_VD: Array, bias_V: Array, labels: Array, supervised: Array, how: _How
) -> tuple[Array, Array, Array]:
    return _trained_head(rows, head_VD, bias_V, labels, supervised, how)


def _frozen_head_fwd(
    rows: Array, head_VD: Array, bias_V: Array, labels: Array, supervised: Array, how: _How
) -> tuple[tuple[Array, Array, Array], Array]:
    vocab = head_VD.shape[0]

    def one(part: tuple[Array, ...]) -> tuple[Array, Array, Array, Array]:
        rows_CD, labels_C, supervised_C = part
        logits_CV, top_C, entropy_C, correct_C = _chunk_entropy(rows_CD, head_VD, bias_V, labels_C, how.dtype)
        weight_C = how.weights(entropy_C, supervised_C)
        is_label_CV = labels_C[:, None] == jnp.arange(vocab, dtype=labels_C.dtype)[None]
        slope_CV = weight_C[:, None] * (jnp.exp(logits_CV - top_C[:, None]) - is_label_CV.astype(jnp.float32))
        grad_CD = product("nv,vd->nd", slope_CV, head_VD, how.dtype).astype(rows_CD.dtype)
        return (weight_C * entropy_C).sum(), entropy_C, correct_C, grad_CD

    weighted, entropy, correct, grad = jax.lax.map(one, (rows, labels, supervised))
    return (weighted.sum(), entropy, correct), grad


def _frozen_head_bwd(how: _How, grad: Array, cotangent: tuple[Array, Any, Any]) -> tuple[Array, None, None, None, None]:
    return cotangent[0] * grad, None, None, None, None


_frozen_head.defvjp(_frozen_head_fwd, _frozen_head_bwd)
