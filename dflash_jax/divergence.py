"""Where two texts of one target part, and whether rounding explains it.

bfloat16 products round differently in passes of different widths, so speculative and plain text may part where two tokens are
nearly equally good. `first_divergence` looks at that place in float32. Plain decoding of the same width (`generate` without a
drafter, with a block size) does not part at all.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.sampling import TARGET_DRAW, Sampling, gumbel, sampling_rows
from dflash_jax.targets import Target

NEAR_TIE = 8 * 2**-8
"""the largest margin that bfloat16 explains, as a share of how far the best logit lies above the mean one. An operand keeps 8
significant bits, so a product has a relative error of about 2^-8, and layers add theirs up: the difference of two of the five best
logits of SmolLM2-135M is off by 0.5 times 2^-8 of that height in the median of 300 places, by 2.2 in the 99th percentile, by 4.4
at worst"""


class Divergence(NamedTuple):
    """The first place where two texts differ."""

    token: int
    """its index in the texts; the length of the shorter one where the other only goes on"""
    margin: float
    """how far apart the two tokens are there in float32, in units of the target's logits; inf where one text only goes on"""
    bound: float
    """the largest margin that the rounding of bfloat16 explains"""

    @property
    def near_tie(self) -> bool:
        """Rounding explains it."""
        return self.margin <= self.bound


def first_divergence(
    target: Target, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], temperature: float = 0.0, seed: int = 0
) -> Divergence | None:
    """Compare two answers to one prompt; None if they are equal. One float32 pass of the target over what they share.

    Sampled answers (rule `match`, nothing cut by top-k and the like) are compared by logits plus the noise of their draw.
    """
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    token = next(differing, min(len(a), len(b)))
    if token == min(len(a), len(b)):
        return None if len(a) == len(b) else Divergence(token, float("inf"), 0.0)
    text = [*prompt, *a[:token]]
    padded_1T = np.zeros((1, 1 << (len(text) - 1).bit_length()), np.int32)
    padded_1T[0, : len(text)] = text
    exact: Any = target.with_dtype("float32") if hasattr(target, "with_dtype") else target
    own = sampling_rows(1, temperature, seed=seed)
    scores_V, height = jax.device_get(_scores(exact.params, jnp.asarray(padded_1T), jnp.int32(len(text)), own, target=exact))
    return Divergence(token, abs(float(scores_V[a[token]]) - float(scores_V[b[token]])), NEAR_TIE * float(height))


@partial(jax.jit, static_argnames="target")
def _scores(
    params: Any, tokens_1T: Int[Array, "1 T"], length: Int[Array, ""], sampling: Sampling, *, target: Target
) -> tuple[Float[Array, " V"], Float[Array, ""]]:
    """What the token after the text is the argmax of, and the height of the best logit above the mean one."""
    slots_1T = jnp.arange(tokens_1T.shape[1], dtype=jnp.int32)[None]
    positions_1T = jnp.where(slots_1T < length, slots_1T, -1)
    hidden_1TD, _, _ = target.extend(params, tokens_1T, positions_1T, target.init_cache(1, tokens_1T.shape[1]), ())
    logits_11V = target.unembed(params, jax.lax.dynamic_slice_in_dim(hidden_1TD, length - 1, 1, axis=1))
    noise_11V = gumbel(logits_11V.shape[-1], length[None, None], sampling, TARGET_DRAW)
    height = logits_11V.max() - logits_11V.mean()
    return (logits_11V + sampling.temperature_B[:, None, None] * noise_11V)[0, 0], height
