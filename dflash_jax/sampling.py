"""From logits to tokens: one law for plain decoding, drafting and verifying.

Randomness is keyed by (seed of the row, absolute position, purpose): the token at a position is the same draw however many tokens a
pass verifies, which makes sampled speculative output equal plain sampling token for token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.errors import ConfigError

TARGET_DRAW, DRAFT_DRAW, ACCEPT_DRAW, REDRAW = range(4)
"""Purposes of a random key: never the same key for two of them."""


class Sampling(NamedTuple):
    """Per-row sampling parameters, each [B]. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    min_p_B: Array
    seed_B: Array


def sampling_rows(batch: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> Sampling:
    """The same parameters for every row; row r draws with seed + r. Raises `ConfigError` for values out of range."""
    if not temperature >= 0:
        raise ConfigError(f"temperature is {temperature}: give 0 (greedy) or more")
    if top_k < 0:
        raise ConfigError(f"top_k is {top_k}: give 0 (off) or more")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p is {top_p}: give a share in (0, 1]")
    if not 0 <= min_p < 1:
        raise ConfigError(f"min_p is {min_p}: give a share in [0, 1)")
    if not 0 <= seed < 2**31:
        raise ConfigError(f"seed is {seed}: give a whole number from 0 to 2147483647")
    return Sampling(
        jnp.full((batch,), temperature, jnp.float32),
        jnp.full((batch,), top_k, jnp.int32),
        jnp.full((batch,), top_p, jnp.float32),
        jnp.full((batch,), min_p, jnp.float32),
        jnp.uint32(seed) + jnp.arange(batch, dtype=jnp.uint32),
    )


def process_logits(logits_BKV: Float[Array, "B K V"], sampling: Sampling) -> Float[Array, "B K V"]:
    """Temperature, then top-k, top-p and min-p; what they cut becomes -inf. Rows at temperature 0 keep their scale."""
    temperature_B11 = sampling.temperature_B[:, None, None]
    logits_BKV = logits_BKV / jnp.where(temperature_B11 > 0, temperature_B11, 1.0)
    cuts = ((sampling.top_k_B > 0) | (sampling.top_p_B < 1) | (sampling.min_p_B > 0)).any()
    # Sorting a vocabulary costs more than the rest of a round on some machines, and most callers cut nothing.
    return jax.lax.cond(cuts, _cut, lambda logits_BKV, _: logits_BKV, logits_BKV, sampling)


def _cut(logits_BKV: Array, sampling: Sampling) -> Array:
    sorted_BKV = -jnp.sort(-logits_BKV, axis=-1)
    vocab = logits_BKV.shape[-1]
    top_k_B1 = jnp.where(sampling.top_k_B > 0, jnp.minimum(sampling.top_k_B, vocab), vocab)[:, None]
    kth_BK1 = jnp.take_along_axis(sorted_BKV, jnp.broadcast_to(top_k_B1[:, :, None] - 1, (*logits_BKV.shape[:2], 1)), axis=-1)
    sorted_BKV = jnp.where(sorted_BKV >= kth_BK1, sorted_BKV, -jnp.inf)
    probs_BKV = jax.nn.softmax(sorted_BKV, axis=-1)
    # A token stays when the mass of the tokens before it is still below top_p, so the first one always stays.
    before_BKV = jnp.cumsum(probs_BKV, axis=-1) - probs_BKV
    # The sums are rounded: top_p 1 must not cut the tail, and what top-k cut must not set the floor.
    top_p_B11 = sampling.top_p_B[:, None, None]
    kept_BKV = ((before_BKV < top_p_B11) | (top_p_B11 >= 1)) & (sorted_BKV > -jnp.inf)
    kept_BKV &= probs_BKV >= sampling.min_p_B[:, None, None] * probs_BKV[..., :1]
    floor_BK1 = jnp.min(jnp.where(kept_BKV, sorted_BKV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BKV >= floor_BK1, logits_BKV, -jnp.inf)


def probabilities(logits_BKV: Float[Array, "B K V"], sampling: Sampling) -> Float[Array, "B K V"]:
    """The law that `draw` draws from; one-hot in rows at temperature 0."""
    greedy_BKV = jax.nn.one_hot(jnp.argmax(logits_BKV, axis=-1), logits_BKV.shape[-1], dtype=jnp.float32)
    law_BKV = jax.nn.softmax(process_logits(logits_BKV, sampling), axis=-1)
    return jnp.where(sampling.temperature_B[:, None, None] > 0, law_BKV, greedy_BKV)


def draw(
    logits_BKV: Float[Array, "B K V"],
    positions_BK: Int[Array, "B K"],
    sampling: Sampling | None,
    purpose: int,
    round_B: Int[Array, " B"] | None = None,
) -> Int[Array, "B K"]:
    """The token at each absolute position; `sampling` None takes the argmax of every row without touching random keys.

    `round_B`, the anchor's position, makes the draws of a position in two rounds independent of each other.
    """
    greedy_BK = jnp.argmax(logits_BKV, axis=-1).astype(jnp.int32)
    if sampling is None:
        return greedy_BK
    vocab = logits_BKV.shape[-1]
    noise_BKV = _each_key(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32), positions_BK, sampling, purpose, round_B)
    sampled_BK = jnp.argmax(process_logits(logits_BKV, sampling) + noise_BKV, axis=-1).astype(jnp.int32)
    return jnp.where(sampling.temperature_B[:, None] > 0, sampled_BK, greedy_BK)


def uniforms(positions_BK: Int[Array, "B K"], sampling: Sampling, purpose: int, round_B: Int[Array, " B"]) -> Float[Array, "B K"]:
    """Uniform numbers in [0, 1) for what a round decides beside its tokens."""
    return _each_key(lambda key: jax.random.uniform(key, (), jnp.float32), positions_BK, sampling, purpose, round_B)


def _each_key(make: Any, positions_BK: Array, sampling: Sampling, purpose: int, round_B: Array | None) -> Array:
    def one(seed: Array, position: Array, start: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)
        return make(key if round_B is None else jax.random.fold_in(key, start))

    start_B = jnp.zeros_like(positions_BK[:, 0]) if round_B is None else round_B
    return jax.vmap(jax.vmap(one, in_axes=(None, 0, None)))(sampling.seed_B, positions_BK, start_B)
