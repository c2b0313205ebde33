"""From logits to tokens: one law for plain decoding, drafting and verifying.

Randomness is keyed by (seed of the row, absolute position, purpose): the token at a position is the same draw however many tokens a
pass verifies, which makes sampled speculative output equal plain sampling token for token.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

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


PerRow = float | int | Sequence[float] | Sequence[int] | np.ndarray | Array
"""one number for every row, or a number for each"""


class _Limits(NamedTuple):
    """What a sampling parameter may be."""

    types: tuple[type, ...]
    hold: Callable[[Any], bool]
    """judges the number as the device will see it"""
    mend: str


WHOLE, REAL = (int, np.integer), (int, np.integer, float, np.floating)
LIMITS = {
    "temperature": _Limits(REAL, lambda x: x == 0 or 1e-6 <= x < 1e6, "give 0 (greedy) or 0.000001 to 1000000"),
    "top_k": _Limits(WHOLE, lambda x: 0 <= x < 2**31, "give a whole number, 0 (off) or more"),
    "top_p": _Limits(REAL, lambda x: 0 < float(np.float32(x)) <= 1, "give a share in (0, 1]"),
    "min_p": _Limits(REAL, lambda x: 0 <= float(np.float32(x)) < 1, "give a share in [0, 1)"),
    "seed": _Limits(WHOLE, lambda x: 0 <= x < 2**31, "give a whole number from 0 to 2147483647"),
}


def sampling_rows(
    rows: int, temperature: PerRow = 0.0, top_k: PerRow = 0, top_p: PerRow = 1.0, min_p: PerRow = 0.0, seed: PerRow = 0
) -> Sampling:
    """Each parameter is one number for all rows or a list of one a row; with a single seed, row r draws with seed + r.

    Raises `ConfigError` that names the parameter, the value and its row.
    """
    given = (temperature, top_k, top_p, min_p, seed)
    each = [_each_row(name, value, rows) for name, value in zip(LIMITS, given, strict=True)]
    kinds = (np.float32, np.int32, np.float32, np.float32, np.uint32)
    sampling = Sampling(*(jnp.asarray(np.asarray(column, kind)) for column, kind in zip(each, kinds, strict=True)))
    return sampling if np.ndim(seed) else sampling._replace(seed_B=sampling.seed_B + jnp.arange(rows, dtype=jnp.uint32))


def _each_row(name: str, value: Any, rows: int) -> list[Any]:
    """A parameter's value in each row, checked."""
    value = np.asarray(value).tolist() if isinstance(value, (np.ndarray, jax.Array)) else value
    listed = isinstance(value, (list, tuple, range))
    each = list(value) if listed else [value]
    if listed and len(each) != rows:
        raise ConfigError(f"{name} has {len(each)} values for {rows} rows: give one number, or one a prompt")
    types, hold, mend = LIMITS[name]
    for row, number in enumerate(each):
        if not isinstance(number, types) or isinstance(number, bool) or not hold(number):
            raise ConfigError(f"{name} is {number!r}{f' in row {row}' if listed else ''}: {mend}")
    return each if listed else each * rows


def process_logits(logits_BKV: Float[Array, "B K V"], sampling: Sampling) -> Float[Array, "B K V"]:
    """Temperature, then top-k, top-p and min-p; what they cut becomes -inf. Rows at temperature 0 keep their scale."""
    temperature_B11 = sampling.temperature_B[:, None, None]
    logits_BKV = logits_BKV / jnp.where(temperature_B11 > 0, temperature_B11, 1.0)
    cuts_B = (sampling.top_k_B > 0) | (sampling.top_p_B < 1) | (sampling.min_p_B > 0)
    # Sorting a vocabulary costs more than the rest of a round on some machines, and most callers cut nothing.
    cuts = (cuts_B & (sampling.temperature_B > 0)).any()
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


def law(logits_BKV: Float[Array, "B K V"], sampling: Sampling) -> Float[Array, "B K V"]:
    """The law that `draw` draws from; one-hot in rows at temperature 0."""
    return _law(process_logits(logits_BKV, sampling), sampling)


def _law(processed_BKV: Array, sampling: Sampling) -> Array:
    greedy_BKV = jax.nn.one_hot(jnp.argmax(processed_BKV, axis=-1), processed_BKV.shape[-1], dtype=jnp.float32)
    return jnp.where(sampling.temperature_B[:, None, None] > 0, jax.nn.softmax(processed_BKV, axis=-1), greedy_BKV)


def draw(
    logits_BKV: Float[Array, "B K V"],
    positions_BK: Int[Array, "B K"],
    sampling: Sampling | None,
    purpose: int,
    round_B: Int[Array, " B"] | None = None,
) -> Int[Array, "B K"]:
    """The token at each absolute position; `sampling` None takes the argmax of every row.

    Random numbers are made, and logits processed, only if a row has a temperature. `round_B`, the anchor's position, makes the
    draws of a position in two rounds independent of each other.
    """
    greedy_BK = jnp.argmax(logits_BKV, axis=-1).astype(jnp.int32)
    if sampling is None:
        return greedy_BK

    def sampled(logits_BKV: Array) -> Array:
        return _drawn(process_logits(logits_BKV, sampling), positions_BK, sampling, purpose, round_B)

    return jax.lax.cond(any_sampled(sampling), sampled, lambda _: greedy_BK, logits_BKV)


def draw_with_law(
    logits_BKV: Float[Array, "B K V"],
    positions_BK: Int[Array, "B K"],
    sampling: Sampling,
    purpose: int,
    round_B: Int[Array, " B"],
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"]]:
    """`draw`, and the `law` of the drawn tokens, from logits that are processed once."""

    def sampled(logits_BKV: Array) -> tuple[Array, Array]:
        processed_BKV = process_logits(logits_BKV, sampling)
        return _drawn(processed_BKV, positions_BK, sampling, purpose, round_B), _law(processed_BKV, sampling)

    def greedy(logits_BKV: Array) -> tuple[Array, Array]:
        tokens_BK = jnp.argmax(logits_BKV, axis=-1).astype(jnp.int32)
        return tokens_BK, jax.nn.one_hot(tokens_BK, logits_BKV.shape[-1], dtype=jnp.float32)

    return jax.lax.cond(any_sampled(sampling), sampled, greedy, logits_BKV)


def _drawn(processed_BKV: Array, positions_BK: Array, sampling: Sampling, purpose: int, round_B: Array | None) -> Array:
    """Gumbel-max; the argmax in rows at temperature 0, whose logits were only cut below it."""
    noise_BKV = gumbel(processed_BKV.shape[-1], positions_BK, sampling, purpose, round_B)
    noise_BKV = jnp.where(sampling.temperature_B[:, None, None] > 0, noise_BKV, 0)
    return jnp.argmax(processed_BKV + noise_BKV, axis=-1).astype(jnp.int32)


def gumbel(
    vocab: int, positions_BK: Int[Array, "B K"], sampling: Sampling, purpose: int, round_B: Int[Array, " B"] | None = None
) -> Float[Array, "B K V"]:
    """The noise of `draw`: the token is the argmax of processed logits plus this."""
    return _each_key(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32), positions_BK, sampling, purpose, round_B)


def any_sampled(sampling: Sampling) -> Bool[Array, ""]:
    """Whether a row has a temperature."""
    return (sampling.temperature_B > 0).any()


def uniforms(positions_BK: Int[Array, "B K"], sampling: Sampling, purpose: int, round_B: Int[Array, " B"]) -> Float[Array, "B K"]:
    """Uniform numbers in [0, 1) for what a round decides beside its tokens."""
    return _each_key(lambda key: jax.random.uniform(key, (), jnp.float32), positions_BK, sampling, purpose, round_B)


def _each_key(make: Any, positions_BK: Array, sampling: Sampling, purpose: int, round_B: Array | None) -> Array:
    def one(seed: Array, position: Array, start: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)
        return make(key if round_B is None else jax.random.fold_in(key, start))

    start_B = jnp.zeros_like(positions_BK[:, 0]) if round_B is None else round_B
    return jax.vmap(jax.vmap(one, in_axes=(None, 0, None)))(sampling.seed_B, positions_BK, start_B)
