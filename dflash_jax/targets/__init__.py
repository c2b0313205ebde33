"""Targets: the frozen language models that drafters speed up."""

from dflash_jax.targets.base import CachelessTarget, Target, TrainableTarget
from dflash_jax.targets.dense import DenseDecoder, DenseTarget

__all__ = ["CachelessTarget", "DenseDecoder", "DenseTarget", "Target", "TrainableTarget"]
