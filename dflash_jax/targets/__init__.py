"""Targets: the frozen language models that drafters speed up."""

from dflash_jax.targets.base import PackableTarget, Target, TrainableTarget
from dflash_jax.targets.dense import DenseDecoder, DenseTarget

__all__ = ["DenseDecoder", "DenseTarget", "PackableTarget", "Target", "TrainableTarget"]
