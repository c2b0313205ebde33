"""What of a run can be refused before it begins: before text is read, weights are loaded, or anything is written."""

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from dflash_jax.checkpoint import Checkpoints
from dflash_jax.config import Config, check_counts, check_folders
from dflash_jax.conversations import expand_files
from dflash_jax.data import check_sizes
from dflash_jax.distributed import check_shared, is_main, say
from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.features import check_cache
from dflash_jax.first_drafter import first_config
from dflash_jax.heldout import PACKAGED, HeldOut, held_out
from dflash_jax.hf import describe_text_target
from dflash_jax.lock import own_folder
from dflash_jax.metrics import check_board
from dflash_jax.model_config import DFlashConfig
from dflash_jax.optim import optimizer
from dflash_jax.progress import Profile
from dflash_jax.records import training_files
from dflash_jax.sharding import make_mesh, process_rows
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import make_train_step


class Described(NamedTuple):
    """A run as its config and the small files that it names say."""

    mesh: Mesh
    target: DenseTarget
    """without parameters"""
    drafter: DFlashConfig | None
    """see `first_config`"""
    heldout: HeldOut


def describe(config: Config) -> Described:
    """Raises an error of this package for a config that cannot work; nothing is written."""
    check_counts(config)
    check_sizes(config.data)
    check_folders(config)
    _check_files(config)
    Profile(Path(config.train.run_dir), config.train.profile_steps)
    if config.train.tensorboard:
        check_board()
    if config.train.features == "memory" and jax.process_count() > 1:
        raise ConfigError("train.features memory works in one process only: use online, or cache")
    mesh = make_mesh(config.mesh)
    process_rows(mesh, config.data.batch_size)
    tx = optimizer(config.optim, config.train.steps)
    target = describe_text_target(config.target.path, config.target.dtype)
    drafter = first_config(config, target.config)
    check_cache(config, target.config, drafter)
    if drafter is not None:
        make_train_step(config, target, Drafter(drafter, None), tx, mesh)  # sizes that no step can have
    return Described(mesh, target, drafter, held_out(config, target))


def open_run(config: Config, run: Described, held: ExitStack) -> Checkpoints:
    """The checkpoints of the run folder, which is this run's alone while `held` lasts. A run that writes nothing leaves no folder.

    Raises `ConfigError` when another run is at work in it or has left something there, or when processes do not share it, and
    `CheckpointError` when `train.resume` finds nothing to continue, or a run that would compute something else.
    """
    run_dir = Path(config.train.run_dir)
    if config.train.resume and is_main() and not (run_dir / "checkpoints").is_dir():
        raise CheckpointError(f"{run_dir / 'checkpoints'} holds no checkpoint: start without --resume")
    if is_main():
        held.enter_context(own_folder(run_dir))
    check_shared(run_dir, "train.run_dir")
    checkpoints = Checkpoints(run_dir / "checkpoints", config.train.keep, run.heldout.name)
    held.callback(checkpoints.close)
    if config.train.resume:
        checkpoints.check_identity(identity(config, run.drafter, config.train.steps or None, None))
        if (step := checkpoints.best_elsewhere) is not None:
            say(f"warning: the best checkpoint so far, step {step}, was chosen by other held-out prompts: the best is chosen anew")
    elif checkpoints.newest is not None:
        raise ConfigError(
            f"{run_dir} holds a run that reached step {checkpoints.newest}: --resume it, or give another train.run_dir"
        )
    elif (run_dir / "drafter").exists():
        raise ConfigError(f"{run_dir / 'drafter'} is the drafter of an earlier run: give another train.run_dir, or move it away")
    return checkpoints


def identity(config: Config, drafter: DFlashConfig | None, steps: int | None, data: str | None) -> dict[str, Any]:
    """What a resumed run must have in common with the checkpoint: all that decides the numbers.

    `data` is the fingerprint of the rows. Before they are read, it and what depends on them is left out: which tokens are drafted,
    and `steps` (None) where epochs are counted.
    """
    names = ("init", "anchors_per_row", "anchors_per_document", "loss", "slot_weights", "vocab_sample", "features", "seed")
    train = {name: getattr(config.train, name) for name in names}
    parts = {"target": dataclasses.asdict(config.target), "train": train, "optim": dataclasses.asdict(config.optim)}
    if drafter is not None:
        parts["drafter"] = dataclasses.asdict(drafter)
    flat = {f"{section}.{name}": value for section, values in parts.items() for name, value in values.items()}
    flat |= {"steps": steps, "data": data}
    unread = {name for name in ("steps", "data") if flat[name] is None}
    if data is None:
        unread |= {"drafter.draft_token_ids"}
        if config.train.init == "loaded":  # what a drafter has of its own, its tensors say
            unread |= {"drafter.own_embedding", "drafter.own_head"}
    return json.loads(json.dumps({name: value for name, value in flat.items() if name not in unread}))  # type: ignore[no-any-return]


def _check_files(config: Config) -> None:
    heldout = [] if config.data.heldout == [PACKAGED] else expand_files(config.data.heldout, "data.heldout")
    train = training_files(config.data) if is_main() else {}
    both = {Path(path).resolve() for path in train} & {Path(path).resolve() for path in heldout}
    if both:
        raise ConfigError(f"data.heldout names {both.pop()}, which is trained on: hold other prompts out")
