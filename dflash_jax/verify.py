"""Which drafted tokens stand. Three rules; each leaves the law of the text exactly the target's own.

`match` compares with the target's own draws. `rejection` (Leviathan and others, arXiv 2211.17192) and `block` (block verification,
arXiv 2403.10444) compare laws: p is the target's after a slot, q the law that the draft was really drawn from. They are pure
functions of (drafts, q, p, uniforms), so that tests can enumerate what they do.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Verified(NamedTuple):
    """The outcome of one verify pass. J = K - 1 drafted slots."""

    tokens_BK: Int[Array, "B K"]
    """the first `tau_B` of them are committed: accepted drafts, then the bonus token"""
    accepted_B: Int[Array, " B"]
    """length of the drafted prefix that stands, 0..gamma-1"""
    tau_B: Int[Array, " B"]
    """committed tokens, accepted + 1, 1..gamma"""
    acceptance_rate: Float[Array, ""]
    """accepted / drafted over all rows"""


def verify_block(draft_BJ: Int[Array, "B J"], target_BK: Int[Array, "B K"]) -> Verified:
    """`match`: accept the longest drafted prefix that equals the target's tokens, and add the bonus token (paper, section 3.3).

    `target_BK[:, k]` is the target's token after slot k, so it judges the draft of slot k + 1: with the target's argmax this is
    greedy verification, with its keyed draws it is exact sampling whatever the drafter proposed.
    """
    agrees_BJ = draft_BJ == target_BK[:, :-1]
    return _verified(draft_BJ, target_BK, _prefix(agrees_BJ))


def verify_rejection(
    draft_BJ: Int[Array, "B J"],
    q_BJV: Float[Array, "B J V"],
    p_BKV: Float[Array, "B K V"],
    accept_BJ: Float[Array, "B J"],
    residual_B: Float[Array, " B"],
) -> Verified:
    """`rejection`: slot by slot, a draft stands with probability min(1, p / q); the first that falls is drawn again from (p - q)+.

    `p_BKV[:, k]` is the target's law after slot k. `accept_BJ` and `residual_B` are independent uniforms in [0, 1), fresh in every
    round. The accepted drafts must have been drawn from `q_BJV`; an argmax draft has a one-hot law.
    """
    stands_BJ = accept_BJ * _at(q_BJV, draft_BJ) < _at(p_BKV[:, :-1], draft_BJ)
    accepted_B = _prefix(stands_BJ)
    return _redrawn(draft_BJ, q_BJV, p_BKV, accepted_B, jnp.ones_like(residual_B), residual_B)


def verify_jointly(
    draft_BJ: Int[Array, "B J"],
    q_BJV: Float[Array, "B J V"],
    p_BKV: Float[Array, "B K V"],
    accept_BJ: Float[Array, "B J"],
    residual_B: Float[Array, " B"],
) -> Verified:
    """`block`: the whole drafted block is judged together, which accepts at least as many tokens on average as `rejection`.

    A prefix of i drafts has the weight P_i = min(1, P_(i-1) p / q). It passes with probability Z_i / (Z_i + 1 - P_i), where Z_i
    is the mass of (P_i p - q)+ at the next slot (the whole block: P_J), and the LONGEST prefix that passes stands: a later one may
    pass after a shorter one has not. Arguments as in `verify_rejection`.
    """
    batch, drafted = draft_BJ.shape
    p_drafts_BJ, q_drafts_BJ = _at(p_BKV[:, :-1], draft_BJ), _at(q_BJV, draft_BJ)
    weight_B = jnp.ones_like(residual_B)
    weights, chances = [weight_B], []
    for i in range(drafted):
        weight_B = jnp.minimum(weight_B * p_drafts_BJ[:, i] / q_drafts_BJ[:, i], 1)
        weights.append(weight_B)
        if i + 1 == drafted:
            chances.append(weight_B)
            continue
        excess_B = jnp.maximum(weight_B[:, None] * p_BKV[:, i + 1] - q_BJV[:, i + 1], 0).sum(-1)
        room_B = excess_B + 1 - weight_B
        chances.append(jnp.where(room_B > 0, excess_B / jnp.where(room_B > 0, room_B, 1), 1))
    if not drafted:
        accepted_B = jnp.zeros((batch,), jnp.int32)
    else:
        passes_BJ = accept_BJ < jnp.stack(chances, axis=1)
        accepted_B = jnp.max(jnp.where(passes_BJ, jnp.arange(1, drafted + 1, dtype=jnp.int32)[None], 0), axis=1)
    kept_B = jnp.take_along_axis(jnp.stack(weights, axis=1), accepted_B[:, None], axis=1)[:, 0]
    return _redrawn(draft_BJ, q_BJV, p_BKV, accepted_B, kept_B, residual_B)


def _redrawn(draft_BJ: Array, q_BJV: Array, p_BKV: Array, accepted_B: Array, weight_B: Array, residual_B: Array) -> Verified:
    """The accepted drafts and then a token of (weight p - q)+; after a whole block there is no q."""
    at_B11 = accepted_B[:, None, None]
    p_BV = jnp.take_along_axis(p_BKV, at_B11, axis=1)[:, 0]
    q_BKV = jnp.pad(q_BJV, ((0, 0), (0, 1), (0, 0)))
    law_BV = jnp.maximum(weight_B[:, None] * p_BV - jnp.take_along_axis(q_BKV, at_B11, axis=1)[:, 0], 0)
    # p = q up to rounding leaves no residual; then a rejection was itself a rounding error, and p is the law to take.
    law_BV = jnp.where(law_BV.sum(-1, keepdims=True) > 0, law_BV, p_BV)
    sums_BV = jnp.cumsum(law_BV, axis=-1)
    bonus_B = jnp.argmax(sums_BV > (residual_B * sums_BV[:, -1])[:, None], axis=-1).astype(draft_BJ.dtype)
    slots_K = jnp.arange(p_BKV.shape[1], dtype=jnp.int32)
    drafts_BK = jnp.pad(draft_BJ, ((0, 0), (0, 1)))
    tokens_BK = jnp.where(slots_K[None] == accepted_B[:, None], bonus_B[:, None], drafts_BK)
    return _verified(draft_BJ, tokens_BK, accepted_B)


def _at(law_BJV: Array, token_BJ: Array) -> Array:
    return jnp.take_along_axis(law_BJV, token_BJ[..., None], axis=-1)[..., 0]


def _prefix(stands_BJ: Array) -> Array:
    """How many slots stand before the first that does not."""
    return jnp.cumprod(stands_BJ.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _verified(draft_BJ: Array, tokens_BK: Array, accepted_B: Array) -> Verified:
    rate = accepted_B.astype(jnp.float32).sum() / max(draft_BJ.size, 1)
    return Verified(tokens_BK, accepted_B, accepted_B + 1, rate)
