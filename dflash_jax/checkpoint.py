"""Training checkpoints: optimizer state, data position and merged config, written by Orbax all or nothing."""

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dflash_jax.errors import CheckpointError
from dflash_jax.train_step import TrainState


class Checkpoints:
    """The checkpoints of a run folder, the newest `keep` of them."""

    def __init__(self, folder: str | Path, keep: int) -> None:
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        try:
            self.manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be used for checkpoints ({error}): give another train.run_dir") from None

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        step: int | None = self.manager.latest_step()
        return step

    def save(self, state: TrainState, data_state: dict[str, Any], identity: dict[str, Any], config: dict[str, Any]) -> None:
        """Write the state after `state.step` steps. Earlier checkpoints are only deleted once the new one is whole.

        `identity` is what a run that resumes must share; `config` is the merged config, for people. Random keys are made from the
        seed and the step, so both of them are the state of the random numbers.
        Raises `CheckpointError` when it cannot be written (a full disk).
        """
        step = int(state.step)
        if step == self.newest:
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_name(state)),
            data=ocp.args.JsonSave(data_state),
            identity=ocp.args.JsonSave(identity),
            config=ocp.args.JsonSave(config),
        )
        try:
            self.manager.save(step, args=args)
            self.manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder} ({error}): free some space and --resume; "
                f"the newest whole checkpoint is step {self.newest}"
            ) from None

    def restore(self, state: TrainState, identity: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, placed like `state` (arrays or their shapes with shardings), and its data position.

        Raises `CheckpointError` when there is none, or when it was written by a run that would compute something else.
        """
        step = self.newest
        if step is None:
            raise CheckpointError(f"{self.folder} holds no checkpoint: start without --resume")
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _by_name(state))
        small = ocp.args.Composite(data=ocp.args.JsonRestore(), identity=ocp.args.JsonRestore())
        try:
            saved = self.manager.restore(step, args=small)
            _check_identity(saved["identity"], json.loads(json.dumps(identity)), self.folder / str(step))
            arrays = self.manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint {self.folder / str(step)} cannot be read ({error}): "
                "delete that folder and --resume from the one before"
            ) from None
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        restored = jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in names])
        return restored, saved["data"]

    def close(self) -> None:
        self.manager.close()


def _by_name(state: TrainState) -> dict[str, Any]:
    """Leaves by their path: a plain dict that any Orbax version reads."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _check_identity(saved: dict[str, Any], ours: dict[str, Any], where: Path) -> None:
    keys = sorted(set(saved) | set(ours))
    different = [
        f"{key}: {repr(saved.get(key))[:60]} there, {repr(ours.get(key))[:60]} now"
        for key in keys
        if saved.get(key) != ours.get(key)
    ]
    if different:
        raise CheckpointError(
            f"{where} belongs to another config ({'; '.join(different[:6])}): give the same values, or another train.run_dir"
        )
