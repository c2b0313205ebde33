"""The optimizer: AdamW, linear warm-up, cosine decay, global-norm clipping (paper, appendix)."""

from functools import partial
from typing import Any

import jax
import optax
from jaxtyping import Array, Float

from dflash_jax.config import OptimConfig
from dflash_jax.errors import ConfigError


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: up over warmup_ratio of `steps`, then a cosine down to final_learning_rate."""
    warmup = max(1, round(config.warmup_ratio * steps))
    return optax.warmup_cosine_decay_schedule(
        config.learning_rate / warmup, config.learning_rate, warmup, max(steps, warmup + 1), config.final_learning_rate
    )


def optimizer(config: OptimConfig, steps: int, tap_sizes_M: Float[Array, " M"] | None = None) -> optax.GradientTransformation:
    """The gradient transformation of a run of `steps` steps.

    Taps enter the fuser as the target left them, some dimensions hundreds of times larger than others. `tap_sizes_M` (their typical
    sizes) divides the fuser's update row by row, so that Adam's equal steps in every weight are equal steps in every tap's effect.
    """
    if not config.learning_rate > 0:
        raise ConfigError(f"optim.learning_rate is {config.learning_rate}: it must be positive")
    if not 0 <= config.warmup_ratio < 1:
        raise ConfigError(f"optim.warmup_ratio is {config.warmup_ratio}: it must lie in [0, 1)")
    if not config.clip_norm > 0:
        raise ConfigError(f"optim.clip_norm is {config.clip_norm}: it must be positive")
    for name, value in (("beta1", config.beta1), ("beta2", config.beta2)):
        if not 0 <= value < 1:
            raise ConfigError(f"optim.{name} is {value}: it must lie in [0, 1)")
    for name, value in (("weight_decay", config.weight_decay), ("final_learning_rate", config.final_learning_rate)):
        if not value >= 0:
            raise ConfigError(f"optim.{name} is {value}: it must not be negative")
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule(config, steps), b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay),
        optax.identity() if tap_sizes_M is None else optax.stateless(partial(_even_out, tap_sizes_M)),
    )


def _even_out(tap_sizes_M: Array, updates: Any, params: Any) -> Any:
    def one(path: tuple[Any, ...], update: Array) -> Array:
        return update / tap_sizes_M[:, None] if "['fuser']['fc']['kernel']" in jax.tree_util.keystr(path) else update

    return jax.tree_util.tree_map_with_path(one, updates)
