"""Which drafted tokens stand."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Verified(NamedTuple):
    """The outcome of one verify pass. J = K - 1 drafted slots."""

    tokens_BK: Int[Array, "B K"]
    """the target's own tokens; the first `tau_B` of them are committed (accepted ones, then the bonus token)"""
    accepted_B: Int[Array, " B"]
    """length of the drafted prefix that the target agrees with, 0..gamma-1"""
    tau_B: Int[Array, " B"]
    """committed tokens, accepted + 1, 1..gamma"""
    acceptance_rate: Float[Array, ""]
    """accepted / drafted over all rows"""


def verify_block(draft_BJ: Int[Array, "B J"], target_BK: Int[Array, "B K"]) -> Verified:
    """Accept the longest drafted prefix that equals the target's tokens, and add the bonus token (paper, section 3.3).

    `target_BK[:, k]` is the target's token after slot k, so it judges the draft of slot k + 1: with the target's argmax this is
    greedy verification, with its keyed draws it is exact sampling whatever the drafter proposed.
    """
    agrees_BJ = (draft_BJ == target_BK[:, :-1]).astype(jnp.int32)
    accepted_B = jnp.cumprod(agrees_BJ, axis=1).sum(axis=1, dtype=jnp.int32)
    rate = accepted_B.astype(jnp.float32).sum() / max(draft_BJ.size, 1)
    return Verified(target_BK, accepted_B, accepted_B + 1, rate)
