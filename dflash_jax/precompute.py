"""`python -m dflash_jax cache`: the target reads the training rows once, and its features go to disk (`feature_store`)."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from dflash_jax.config import Config, check_counts, check_folders
from dflash_jax.data import ConversationDataset, training_data
from dflash_jax.distributed import check_shared, from_main, initialize, is_main, say, wait_for_all, wait_for_main
from dflash_jax.errors import ConfigError, DataError
from dflash_jax.feature_store import (
    MADE_FROM,
    OTHER_BYTES,
    Layout,
    Shard,
    ShardWriter,
    encode,
    read_made_from,
    read_shard,
    sealed,
    store_folder,
    write_whole,
    written,
)
from dflash_jax.features import layout_of, made_from, needs_hidden
from dflash_jax.first_drafter import described_drafter, sample_batch
from dflash_jax.hf import describe_text_target, load_text_target
from dflash_jax.lock import own_folder
from dflash_jax.packing import documents
from dflash_jax.sharding import BATCH, collector, make_mesh
from dflash_jax.stop import StopRequests
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import Batch, place_batch, target_features
from dflash_jax.warm_start import tap_sizes

SHARD_BYTES = 1 << 28
"""of a process: what a kill can lose; fewer files than batches, unless a batch is larger"""
GIB = 2**30


def precompute(config: Config, check: bool = False) -> int:
    """Write the features that training with `train.features: cache` reads; returns the exit status (130 after Ctrl-C, 143 after
    SIGTERM, with all that was computed sealed).

    Shards that are sealed are kept, also after a kill; those with a fault are named and made again. `check` reads every byte of
    them. Raises `ConfigError` when the disk is too small.
    """
    check_counts(config)
    check_folders(config)
    initialize(config.distributed)
    with ExitStack() as held:
        return _precompute(config, check, held)


def _precompute(config: Config, check: bool, held: ExitStack) -> int:
    mesh = make_mesh(config.mesh)
    without_weights = describe_text_target(config.target.path, config.target.dtype)
    taps = described_drafter(config, without_weights.config).target_layer_ids
    dataset = training_data(config, without_weights, mesh)
    target = load_text_target(config.target.path, dtype=config.target.dtype, mesh=mesh)
    layout, source = layout_of(config, target, taps), made_from(config, target, taps, dataset)
    folder = store_folder(config.features, source)
    if is_main():
        held.enter_context(own_folder(folder))
    check_shared(folder, "features.folder")
    if is_main():
        _clear(folder, layout, check)
    wait_for_main("cleared")
    shards, _ = sealed(folder, layout)
    if sum(len(shard.ids) for shard in shards) == len(dataset):
        say(f"the features of all {len(dataset)} conversations are in {folder}: nothing to do")
        return 0
    rows = {name: getattr(config.data, name) for name in ("buckets", "batch_size", "packing", "seed")}
    _check_disk(folder, layout, dataset, shards)
    if from_main((folder / MADE_FROM).exists()):
        _check_rows(folder, rows)
    else:
        sizes = np.asarray(tap_sizes(target, taps, sample_batch(dataset), needs_hidden(config))) if layout.dtype == "int8" else None
        if is_main():
            described = {"made_from": source, "rows": rows, "sizes": sizes if sizes is None else sizes.tolist()}
            with written(folder / MADE_FROM):
                write_whole(folder / MADE_FROM, described)
        wait_for_all("described")
    status = _write(config, mesh, target, taps, layout, dataset, folder, shards)
    wait_for_all("written")  # else a process that is gone, with its rows, would go unnoticed
    if status:
        say(f"stopped; what was computed is in {folder}, and the same command continues")
    else:
        say(f"features of {len(dataset)} conversations written to {folder}: train with the same options and --train.features cache")
    return status


def _clear(folder: Path, layout: Layout, check: bool) -> None:
    """Remove what is not whole: what kills have left, and, said by name, what was damaged since."""
    described = (folder / MADE_FROM).exists() and bool(read_made_from(folder))  # else the shards mean nothing
    if not described and any(folder.glob("*.features")):
        print(f"warning: {folder / MADE_FROM} is missing: all shards there are made again", file=sys.stderr, flush=True)
    shards, faults = sealed(folder, layout) if described else ([], {})
    for shard in shards if check else ():
        try:
            for _ in read_shard(folder, layout, shard):
                pass
        except DataError:
            faults[shard.name] = OTHER_BYTES
    for name, fault in faults.items():
        print(f"warning: the shard {folder / name} is damaged ({fault}): it is made again", file=sys.stderr, flush=True)
    kept = {Path(shard.name).stem for shard in shards if shard.name not in faults}
    for path in folder.iterdir():
        if path.is_file() and path.name != MADE_FROM and path.stem not in kept:
            path.unlink()


def _check_disk(folder: Path, layout: Layout, dataset: ConversationDataset, shards: list[Shard]) -> None:
    """Say what the cache will take, and refuse it where it does not fit."""
    tokens = dataset.report["tokens"]
    left = tokens - sum(sum(shard.lengths) for shard in shards)
    needed, free = left * layout.token_bytes, shutil.disk_usage(folder).free
    say(
        f"features: {tokens} tokens of {layout.token_bytes} bytes ({layout.parts} x {layout.width} numbers, {layout.dtype}): "
        f"{tokens * layout.token_bytes / GIB:.2f} GiB, {needed / GIB:.2f} of them to be written; "
        f"{folder} has {free / GIB:.2f} GiB free"
    )
    if not from_main(needed < free):
        smaller = left * layout._replace(dtype="int8").token_bytes / GIB
        less = f"features.dtype int8 takes {smaller:.2f} GiB; " if layout.dtype == "bfloat16" else ""
        raise ConfigError(
            f"the features need {needed / GIB:.2f} GiB and {folder} has {free / GIB:.2f}: {less}free some space, give a "
            "features.folder elsewhere, less data.train, or train with features online"
        )


def _check_rows(folder: Path, rows: dict[str, Any]) -> None:
    """A cache is finished in the rows that it was begun in, so that no conversation comes twice or never."""
    begun = read_made_from(folder)["rows"]
    different = [f"data.{name} {begun[name]} there, {rows[name]} now" for name in rows if begun[name] != rows[name]]
    if different:
        raise ConfigError(
            f"{folder} was begun with other rows ({', '.join(different)}): give the same values to finish it (training may use "
            "others), or delete that folder"
        )


def _write(
    config: Config,
    mesh: Mesh,
    target: DenseTarget,
    taps: tuple[int, ...],
    layout: Layout,
    dataset: ConversationDataset,
    folder: Path,
    shards: list[Shard],
) -> int:
    """Compute and write the batches that no shard has; 0, or the exit status when someone asked to stop."""
    done = {step for shard in shards for step in range(shard.first, shard.end)}
    missing = [step for step in range(dataset.steps_in(1)) if step not in done]
    sizes = read_made_from(folder)["sizes"]
    sizes_M = None if sizes is None else jax.device_put(np.asarray(sizes, np.float32), NamedSharding(mesh, PartitionSpec()))
    how = {"target": target, "taps": taps, "last": needs_hidden(config), "layout": layout, "mesh": mesh}

    def computed() -> Iterator[tuple[dict[str, Any], Any]]:
        """The device works on the next batch while one is written."""
        ahead = None
        for step in missing:
            raw: dict[str, Any] = dataset.batch(step)
            now = (raw, _kept(target.params, place_batch(raw, mesh), sizes_M, **how))
            if ahead is not None:
                yield ahead
            ahead = now
        if ahead is not None:
            yield ahead

    batch_bytes = config.data.batch_size * max(config.data.buckets) * layout.token_bytes // jax.process_count()
    results, mine = computed(), _owned(mesh, dataset)
    with (
        StopRequests() as stop,
        tqdm(total=len(missing) + len(done), initial=len(done), unit="batch", disable=not is_main()) as bar,
    ):
        for steps in consecutive(missing, max(1, SHARD_BYTES // batch_bytes)):
            with ShardWriter(folder, layout, steps[0], jax.process_index(), jax.process_count()) as shard:
                for step, (raw, kept) in zip(steps, results, strict=False):  # steps first: it ends without taking a result
                    codes_BTM, scales_BTN = here(kept[0]), None if kept[1] is None else here(kept[1])
                    for row, start, length, name in documents(raw):
                        if mine[row]:
                            slots = slice(start, start + length)
                            shard.write(name, codes_BTM[row, slots], None if scales_BTN is None else scales_BTN[row, slots])
                    bar.update()
                    end = step + 1
                    if asked := stop.asked():
                        break
                shard.seal(end)
            if asked and end <= missing[-1]:
                return stop.status
    return 0


@partial(jax.jit, static_argnames=("target", "taps", "last", "layout", "mesh"))
def _kept(
    params: Any, batch: Batch, sizes_M: Any, *, target: DenseTarget, taps: tuple[int, ...], last: bool, layout: Layout, mesh: Mesh
) -> Any:
    """What is kept of a batch: codes [B, T, M] and scales [B, T, N] or None."""
    features_BTM = target_features(target, params, batch, taps, last, collector(mesh, target.config.dtype))
    return jax.lax.with_sharding_constraint(encode(features_BTM, layout, sizes_M), NamedSharding(mesh, BATCH))


def consecutive(steps: list[int], most: int) -> list[list[int]]:
    """Steps in groups that have no gaps and do not cross multiples of `most`: the same shards, however often it was stopped."""
    groups: list[list[int]] = []
    for step in steps:
        if not groups or step != groups[-1][-1] + 1 or step % most == 0:
            groups.append([])
        groups[-1].append(step)
    return groups


def here(rows: jax.Array) -> np.ndarray:
    """The rows of an array that lie on devices of this process, ascending: `place_rows` the other way round."""
    parts = {part.index[0].start or 0: part.data for part in rows.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def _owned(mesh: Mesh, dataset: ConversationDataset) -> list[bool]:
    """Whether each row here is ours to write: where tensor parts lie on several processes, the first that has a row writes it."""
    count = dataset.config.batch_size
    owner: dict[int, int] = {}
    places: dict[Any, Any] = dict(NamedSharding(mesh, BATCH).devices_indices_map((count,)))
    for device, index in places.items():
        for row in range(count)[index[0]]:
            owner[row] = min(owner.get(row, device.process_index), device.process_index)
    return [owner[row] == jax.process_index() for row in dataset.process_rows.tolist()]
