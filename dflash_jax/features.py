"""Where the target features of a step come from (`train.features`): the step itself, kept memory, or the cache on disk."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax.config import Config
from dflash_jax.data import ConversationDataset
from dflash_jax.distributed import say
from dflash_jax.errors import ConfigError
from dflash_jax.feature_store import FORMAT, Layout, check_store, decode, open_store
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.packing import documents
from dflash_jax.sharding import BATCH, collector, place_rows
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import Batch, target_features

TEXT = "data.train, data.max_length (tokens)"
WEIGHTS = "target.path (weights and config)"
Raw = dict[str, Any]
"""a batch of `ConversationDataset`"""


class Features:
    """What the training loop asks for. This one is `online`: the train step computes them itself."""

    identity: Mapping[str, str] = MappingProxyType({})
    """what a resumed run must have in common with the checkpoint"""
    prefetch = 8
    """batches that wait in memory"""

    def read(self, raw: Raw) -> Raw:
        """A batch with what is read of it from disk, ahead of its step."""
        return raw

    def __call__(self, raw: Raw) -> jax.Array | None:
        """Features of the rows of a batch as the train step takes them, [B, T, M]; None: it computes them."""
        return None


def open_features(config: Config, mesh: Mesh, target: DenseTarget, taps: tuple[int, ...], dataset: ConversationDataset) -> Features:
    """As `train.features` says. Raises `ConfigError` when memory is too small, `DataError` without a cache of this run."""
    if config.train.features == "memory":
        return Memory(config, mesh, target, taps, dataset)
    return Cached(config, mesh, target, taps, dataset) if config.train.features == "cache" else Features()


def layout_of(config: Config, target: DenseTarget, taps: tuple[int, ...]) -> Layout:
    """How the cache of a run keeps a token."""
    return Layout(len(taps) + needs_hidden(config), target.config.hidden_size, config.features.dtype)


def needs_hidden(config: Config) -> bool:
    """Whether the loss reads the target's final hidden states too."""
    return config.train.loss != "ce"


def made_from(config: Config, target: DenseTarget, taps: tuple[int, ...], dataset: ConversationDataset) -> dict[str, Any]:
    """All that decides the features of a conversation, under the names of what changes it. Not the rows in which they come: other
    rows change the last bits only."""
    described = _described(config, target.config, taps)
    return described | {WEIGHTS: fingerprint(target), TEXT: dataset.records.digest}


def _described(config: Config, target: TargetConfig, taps: tuple[int, ...]) -> dict[str, Any]:
    """Its parts that are known before text and weights are read."""
    return {
        "format": FORMAT,
        "target.dtype": target.dtype,
        "drafter.target_layer_ids": list(taps),
        "train.loss (reads final hidden states)": needs_hidden(config),
        "features.dtype": config.features.dtype,
    }


def check_cache(config: Config, target: TargetConfig, drafter: DFlashConfig | None, text: str | None = None) -> None:
    """Raises `DataError` when the run would read a cache and by what is known none there can be its own: all but the target's
    weights, which only reading every number tells apart, and before it is read the text (`text`: digest of its records)."""
    if config.train.features == "cache" and drafter is not None:
        check_store(config.features, _described(config, target, drafter.target_layer_ids) | ({TEXT: text} if text else {}))


def fingerprint(target: DenseTarget) -> str:
    """Hex digest of a target's parameters and config, wherever it lies and on whatever mesh."""
    leaves = jax.tree_util.tree_leaves_with_path(target.params)
    bits = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype), int(_bits(leaf))) for path, leaf in leaves]
    text = json.dumps([bits, dataclasses.asdict(target.config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@jax.jit
def _bits(x: jax.Array) -> jax.Array:
    """A uint32 of an array's bits and their places. Integers are added up, so no mesh changes it."""
    words = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32).astype(jnp.uint32)
    weights = jnp.ones_like(words)
    for axis in range(x.ndim):
        weights += jnp.uint32(2654435761 >> axis) * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(words * weights, dtype=jnp.uint32)


class Memory(Features):
    """Kept in memory as bfloat16 once a conversation was seen."""

    def __init__(
        self, config: Config, mesh: Mesh, target: DenseTarget, taps: tuple[int, ...], dataset: ConversationDataset
    ) -> None:
        self.mesh, self.params, self.buckets = mesh, target.params, config.data.buckets
        self.width = layout_of(config, target, taps).numbers
        _check_memory(2 * dataset.report["tokens"] * self.width)
        self.kept: dict[int, np.ndarray] = {}
        how = needs_hidden(config), collector(mesh, target.config.dtype)
        self.compute = jax.jit(lambda params, batch: target_features(target, params, batch, taps, *how))

    def __call__(self, raw: Raw) -> jax.Array:
        taps_BTM = np.zeros((*raw["tokens_BT"].shape, self.width), ml_dtypes.bfloat16)
        for row, start, length, name in documents(raw):
            slots = slice(start, start + length)
            taps_BTM[row, slots] = self._document(raw["tokens_BT"][row, slots], name)
        return place_rows(taps_BTM, self.mesh)

    def _document(self, tokens_T: np.ndarray, name: int) -> np.ndarray:
        """Features of one document, [T, M]. They are computed alone, padded to the document's own bucket, so that they do not
        depend on which rows it first came with: a resumed run sees the same bits."""
        if name not in self.kept:
            length = len(tokens_T)
            bucket = min(b for b in self.buckets if b >= length)
            tokens_1T = jnp.asarray(np.pad(tokens_T, (0, bucket - length))[None])
            alone = Batch(tokens_1T, jnp.zeros(tokens_1T.shape, bool), jnp.asarray([length], jnp.int32))
            self.kept[name] = np.asarray(self.compute(self.params, alone))[0, :length].astype(ml_dtypes.bfloat16)
        return self.kept[name]


def _check_memory(needed: int) -> None:
    """Refuse kept features that do not fit, before hours of filling the memory."""
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    say(f"features: {needed / 2**30:.1f} GiB of memory once every row was seen, of {have / 2**30:.1f}")
    if needed > 0.9 * have:
        raise ConfigError("train.features memory needs more memory than there is: use online, cache, or fewer rows")


class Cached(Features):
    """Read from the cache that `python -m dflash_jax cache` has written; each process reads the conversations of its own rows."""

    prefetch = 2

    def __init__(
        self, config: Config, mesh: Mesh, target: DenseTarget, taps: tuple[int, ...], dataset: ConversationDataset
    ) -> None:
        source, self.mesh, self.layout = made_from(config, target, taps, dataset), mesh, layout_of(config, target, taps)
        self.store, sizes_M = open_store(config.features, source, self.layout, dataset.records.ids_N)
        self.identity = {"features": self.store.folder.name}
        if sizes_M is not None:  # a cache that was made again may have measured others
            self.identity |= {"features.sizes": hashlib.sha256(sizes_M.tobytes()).hexdigest()[:16]}
        say(f"features: {config.features.dtype}, read from {self.store.folder}")
        if sizes_M is not None:
            self.sizes_M = jax.device_put(sizes_M, NamedSharding(mesh, PartitionSpec()))

    def read(self, raw: Raw) -> Raw:
        """The batch with what is kept of its conversations, zero on padding."""
        found = list(documents(raw))
        shape, layout = raw["tokens_BT"].shape, self.layout
        kept = self.store.read([name for *_, name in found])
        codes_BTM = np.zeros((*shape, layout.parts * layout.width), np.int8 if layout.dtype == "int8" else ml_dtypes.bfloat16)
        scales_BTN = np.zeros((*shape, layout.parts), np.float32)
        for (row, start, length, _), (codes_TM, scales_TN) in zip(found, kept, strict=True):
            codes_BTM[row, start : start + length] = codes_TM
            if scales_TN is not None:
                scales_BTN[row, start : start + length] = scales_TN
        return raw | {"codes_BTM": codes_BTM, "scales_BTN": scales_BTN}

    def __call__(self, raw: Raw) -> jax.Array:
        codes_BTM = place_rows(raw["codes_BTM"], self.mesh)
        if self.layout.dtype == "bfloat16":
            return codes_BTM
        return _decoded(codes_BTM, place_rows(raw["scales_BTN"], self.mesh), self.sizes_M, mesh=self.mesh)


@partial(jax.jit, static_argnames="mesh")
def _decoded(codes_BTM: jax.Array, scales_BTN: jax.Array, sizes_M: jax.Array, *, mesh: Mesh) -> Any:
    return jax.lax.with_sharding_constraint(decode(codes_BTM, scales_BTN, sizes_M), NamedSharding(mesh, BATCH))
