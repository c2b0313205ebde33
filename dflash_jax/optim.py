"""The optimizer: AdamW (paper, appendix) or Muon, linear warm-up, cosine decay, global-norm clipping."""

from functools import partial
from typing import Any

import jax
import optax
from jaxtyping import Array, Float

from dflash_jax.config import OptimConfig
from dflash_jax.errors import ConfigError

ADAMS_RMS = 0.2
"""the typical size of AdamW's updates, to which Muon's are scaled (arXiv 2502.16982, section 2.2)"""


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
    for name, value in (("beta1", config.beta1), ("beta2", config.beta2), ("ema", config.ema)):
        if not 0 <= value < 1:
            raise ConfigError(f"optim.{name} is {value}: it must lie in [0, 1)")
    for name in ("weight_decay", "final_learning_rate", "skip_above"):
        if not getattr(config, name) >= 0:
            raise ConfigError(f"optim.{name} is {getattr(config, name)}: it must not be negative")
    if 0 < config.skip_above <= 1:
        raise ConfigError(f"optim.skip_above is {config.skip_above}: give 0 (off) or more than 1, times the usual gradient norm")
    rate = schedule(config, steps)
    adamw = optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay)
    if config.optimizer == "muon":
        muon = optax.contrib.muon(rate, weight_decay=config.weight_decay, consistent_rms=ADAMS_RMS)
        chosen = optax.partition({"muon": muon, "adamw": adamw}, _kinds)
    else:
        chosen = adamw
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        chosen,
        optax.identity() if tap_sizes_M is None else optax.stateless(partial(_even_out, tap_sizes_M)),
    )


def _kinds(params: Any) -> Any:
    """Muon's are the matrices inside the layers. Embeddings, the head and vectors are AdamW's as usual, and so is the fuser, whose
    rows have sizes of their own (`tap_sizes_M`): orthogonal rows would undo them."""

    def one(path: tuple[Any, ...], leaf: Array) -> str:
        return "muon" if leaf.ndim == 2 and "['layers']" in jax.tree_util.keystr(path) else "adamw"

    return jax.tree_util.tree_map_with_path(one, params)


def _even_out(tap_sizes_M: Array, updates: Any, params: Any) -> Any:
    def one(path: tuple[Any, ...], update: Array) -> Array:
        return update / tap_sizes_M[:, None] if "['fuser']['fc']['kernel']" in jax.tree_util.keystr(path) else update

    return jax.tree_util.tree_map_with_path(one, updates)
