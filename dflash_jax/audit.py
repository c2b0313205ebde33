"""Is a sampled text distributed as the target says? One number, from the run itself, on any vocabulary.

For a position i take a function f_i of tokens that is fixed before the token x_i is drawn. If x_i comes from the target's law p_i,
f_i(x_i) less its mean under p_i has mean 0 and a known variance, whatever the tokens before it. The sum over a text, divided by the
root of the summed variances, is then close to N(0, 1). Here f = log(q / p), with the law q that the drafter gave to the position:
faults of a sampler favour what the drafter favours more than the target does, or the opposite, and move the sum far away. An argmax
draft has no such ratio: f is 1 for it and 0 for all others.

q comes from the FIRST round whose block covers position i. Where a round ends depends on the tokens drawn in it (the `block` rule
looks at all of them), so the law of the round that happens to emit the token would be a choice made after the draw.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

UNIFORM_SHARE = 1e-3
"""mixed into the drafter's law, so that a token it never drafts weighs little and not without bound"""
ALARM = 4.0
"""|z| of an honest sampler exceeds it in one run of 16,000"""


class AuditState(NamedTuple):
    """What the decode loop carries. J = K - 1 slots after the anchor."""

    f_BJV: Array
    """log q of each position after the anchor, or 1 at an argmax draft; the first `covered_B` are from earlier rounds and stay"""
    covered_B: Array
    score_BJ: Array
    """f(x) less its mean, of the last pass: counts as far as the pass is committed"""
    variance_BJ: Array
    sum_B: Array
    variance_B: Array
    tokens_B: Array


class Audit(NamedTuple):
    """The result over all rows."""

    z: float
    """close to N(0, 1) if the sampler is honest; nan when no sampled token had a drafter's law"""
    tokens: int
    """sampled tokens that had a drafter's law"""

    @property
    def alarming(self) -> bool:
        """|z| > 4: the text does not follow the target's law."""
        return abs(self.z) > ALARM


def begin(batch: int, block_size: int, vocab: int) -> AuditState:
    """Nothing seen yet."""
    drafted = (batch, block_size - 1)
    return AuditState(
        f_BJV=jnp.zeros((*drafted, vocab), jnp.float32),
        covered_B=jnp.zeros((batch,), jnp.int32),
        score_BJ=jnp.zeros(drafted, jnp.float32),
        variance_BJ=jnp.zeros(drafted, jnp.float32),
        sum_B=jnp.zeros((batch,), jnp.float32),
        variance_B=jnp.zeros((batch,), jnp.float32),
        tokens_B=jnp.zeros((batch,), jnp.int32),
    )


def observe(
    audit: AuditState,
    draft_BJ: Int[Array, "B J"],
    q_BJV: Float[Array, "B J V"] | None,
    p_BKV: Float[Array, "B K V"],
    tokens_BK: Int[Array, "B K"],
) -> AuditState:
    """Score a pass: the drafts and their law (None: argmax drafts, whose law is one-hot), the target's law, the tokens it wrote."""
    vocab = p_BKV.shape[-1]
    if q_BJV is None:
        f_BJV = jax.nn.one_hot(draft_BJ, vocab, dtype=jnp.float32)
    else:
        f_BJV = jnp.log((1 - UNIFORM_SHARE) * q_BJV + UNIFORM_SHARE / vocab)
    old_BJ1 = (jnp.arange(draft_BJ.shape[1], dtype=jnp.int32)[None] < audit.covered_B[:, None])[..., None]
    f_BJV = jnp.where(old_BJ1, audit.f_BJV, f_BJV)
    p_BJV = p_BKV[:, :-1]
    ratio_BJV = f_BJV if q_BJV is None else f_BJV - jnp.log(jnp.where(p_BJV > 0, p_BJV, 1))
    mean_BJ1 = (p_BJV * ratio_BJV).sum(-1, keepdims=True)
    value_BJ = jnp.take_along_axis(ratio_BJV, tokens_BK[:, :-1, None], axis=-1)[..., 0]
    p_written_BJ = jnp.take_along_axis(p_BJV, tokens_BK[:, :-1, None], axis=-1)[..., 0]
    value_BJ = jnp.where(p_written_BJ > 0, value_BJ, jnp.inf)  # a token that the target excludes needs no statistics
    variance_BJ = (p_BJV * jnp.square(ratio_BJV - mean_BJ1)).sum(-1)
    return audit._replace(f_BJV=f_BJV, score_BJ=value_BJ - mean_BJ1[..., 0], variance_BJ=variance_BJ)


def count(audit: AuditState, emitted_B: Int[Array, " B"]) -> AuditState:
    """Count the scores of the tokens that a pass emitted, and move on by as many positions."""
    drafted = audit.score_BJ.shape[1]
    slots_1J = jnp.arange(drafted, dtype=jnp.int32)[None]
    counted_BJ = slots_1J < emitted_B[:, None]
    moved_BJ = jnp.minimum(slots_1J + emitted_B[:, None], max(drafted - 1, 0))  # what it repeats at the end is not covered
    return audit._replace(
        f_BJV=jnp.take_along_axis(audit.f_BJV, moved_BJ[..., None], axis=1),
        covered_B=jnp.maximum(drafted - emitted_B, 0),
        sum_B=audit.sum_B + jnp.where(counted_BJ, audit.score_BJ, 0).sum(1),
        variance_B=audit.variance_B + jnp.where(counted_BJ, audit.variance_BJ, 0).sum(1),
        tokens_B=audit.tokens_B + counted_BJ.sum(1, dtype=jnp.int32),
    )


def result(audit: AuditState | None, temperature_B: Array | None) -> Audit:
    """z over the rows that were sampled."""
    if audit is None or temperature_B is None:
        return Audit(float("nan"), 0)
    *sums, temperature_B = jax.device_get((*sums_of(audit), temperature_B))
    return judged(*(sum_B[temperature_B > 0].astype(np.float64).sum() for sum_B in sums))


def sums_of(audit: AuditState) -> tuple[Array, Array, Array]:
    """Per row [B]: scores, their variances, tokens. They add up over rows and runs; `judged` takes the sums."""
    return audit.sum_B, audit.variance_B, audit.tokens_B


def judged(score: float, variance: float, tokens: float) -> Audit:
    """The audit that sums of `sums_of` make."""
    z = score / variance**0.5 if variance > 0 else score if np.isinf(score) else float("nan")
    return Audit(float(z), int(tokens))
