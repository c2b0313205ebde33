"""Training checkpoints: optimizer state, data position and merged config, written by Orbax and then sealed with their checksums.

A checkpoint is a folder named after its step. It is whole once it has its seal, which is written last and holds size and CRC-32 of
every file: a kill at any moment leaves a folder without seal, and no later damage goes unseen. Writing and sealing go on in the
background while training does.
"""

import json
import shutil
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dflash_jax.distributed import everyone, from_main, is_main, wait_for_all
from dflash_jax.errors import CheckpointError
from dflash_jax.train_step import TrainState

SEAL = "seal.json"
_WRITING = (OSError, ValueError, RuntimeError)
"""what Orbax raises when it cannot write"""
_CHUNK = 1 << 24


class Checkpoints:
    """The checkpoints of a run folder: the newest `keep` of them, and the best one by measured acceptance length.

    All processes of a run call the same methods; the folder is one that all of them see. `measured_on` names what acceptance
    lengths are measured on: only those of one name are compared.
    """

    def __init__(self, folder: str | Path, keep: int, measured_on: str | None = None) -> None:
        self.folder, self.keep, self.measured_on = Path(folder).absolute(), keep, measured_on
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be used for checkpoints ({error}): give another train.run_dir") from None
        self.checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self.background = ThreadPoolExecutor(1, "seal")
        self.saving: tuple[int, Future[None]] | None = None

    @property
    def newest(self) -> int | None:
        """The step of the newest sealed checkpoint."""
        self.wait()
        return max(self._sealed(), default=None)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and acceptance length of the checkpoint that accepted most; of equals the later. None when none was measured."""
        self.wait()
        return self._best()

    @property
    def best_elsewhere(self) -> int | None:
        """The step that accepted most, if what an earlier part of the run measured on was something else than now."""
        others = [(tau, step) for step, (tau, name) in self._measured().items() if self.measured_on and name != self.measured_on]
        return max(others)[1] if others else None

    def save(
        self,
        state: TrainState,
        data_state: dict[str, Any],
        identity: dict[str, Any],
        config: dict[str, Any],
        acceptance_length: float | None = None,
    ) -> None:
        """Take the state after `state.step` steps, and write and seal it in the background, once the save before is sealed. Earlier
        checkpoints are only deleted after that.

        `identity` is what a run that resumes must share; `config` is the merged config, for people; `acceptance_length` is what
        this state was measured to have. Random keys are made from the seed and the step, so both of them are the state of the
        random numbers. Raises `CheckpointError` when it, or the one before, cannot be written (a full disk).
        """
        self.wait()
        step = int(state.step)
        if from_main(step in self._sealed()):
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_name(state)),
            data=ocp.args.JsonSave(data_state),
            identity=ocp.args.JsonSave(identity),
            config=ocp.args.JsonSave(config),
        )
        try:
            if is_main():
                self._delete({step})  # what a killed save has left
            wait_for_all("deleted")
            self.checkpointer.save(self.folder / str(step), args=args)
        except _WRITING as error:
            raise self._unwritten(step, error) from None
        self.saving = step, self.background.submit(self._seal_up, step, acceptance_length)

    def is_measured(self, step: int) -> bool:
        """Whether the acceptance length of this sealed checkpoint is known: a stop within an evaluation leaves one without."""
        self.wait()
        return bool(from_main(self._seal(step).get("acceptance_length") is not None))

    def measure(self, step: int, acceptance_length: float) -> None:
        """Note what a sealed checkpoint was measured to have since."""
        self.wait()
        if is_main():
            self._write_seal(step, self._seal(step), acceptance_length)
        wait_for_all("measured")

    def check(self) -> None:
        """Raises the `CheckpointError` of a save in the background that has failed; waits for nothing."""
        if self.saving is not None and self.saving[1].done():
            self.wait()

    def wait(self) -> None:
        """Return once no save is on its way. Raises `CheckpointError` when the last one could not be written."""
        saving, self.saving = self.saving, None
        if saving is not None:
            try:
                saving[1].result()
            except _WRITING as error:
                raise self._unwritten(saving[0], error) from None

    def check_identity(self, identity: dict[str, Any]) -> None:
        """Raises `CheckpointError` when there is no checkpoint, or the newest belongs to another config, by those parts that are
        known before any work is done. `restore` compares all of them."""
        if self.newest is None:
            raise CheckpointError(f"{self.folder} holds no checkpoint: start without --resume")
        folder = self.folder / str(self.newest)
        try:
            saved = json.loads((folder / "identity" / "metadata").read_text(encoding="utf-8"))
            known = {name: saved.get(name) for name in identity}
        except (OSError, ValueError, AttributeError):  # damaged: `restore` says so
            return
        _check_identity(known, json.loads(json.dumps(identity)), folder)

    def restore(self, state: TrainState, identity: dict[str, Any], only: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The newest whole checkpoint, placed like `state` (arrays or their shapes with shardings), and its data position.

        `only` takes that step's or none.
        Those that are half-written or damaged are skipped with a warning; damaged ones are set aside. Raises `CheckpointError` when
        none is left, or when it was written by a run that would compute something else.
        """
        self.wait()
        step = self._newest_whole(self._steps() if only is None else {only} & self._steps())
        if step < 0:
            which = "checkpoint: start without --resume" if only is None else f"whole checkpoint of step {only}"
            raise CheckpointError(f"{self.folder} holds no {which}")
        folder = self.folder / str(step)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _by_name(state))
        small = ocp.args.Composite(data=ocp.args.JsonRestore(), identity=ocp.args.JsonRestore())
        try:
            saved = self.checkpointer.restore(folder, args=small)
            _check_identity(saved["identity"], json.loads(json.dumps(identity)), folder)
            arrays = self.checkpointer.restore(folder, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint {folder} is as it was written, but cannot be read ({error}): resume with the versions of "
                "orbax-checkpoint and dflash_jax that wrote it, or delete it to resume from the one before"
            ) from None
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        return jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in names]), saved["data"]

    def close(self) -> None:
        """Let a save that is on its way end. If it fails now, on the way out, that is a warning. An empty folder goes."""
        try:
            self.wait()
        except CheckpointError as error:
            _warn(str(error))
        self.background.shutdown()
        self.checkpointer.close()
        if is_main():
            with suppress(OSError):  # it holds something
                self.folder.rmdir()

    def _seal_up(self, step: int, acceptance_length: float | None) -> None:
        """In the background: once all processes have written, the first one seals, and deletes what is no longer kept."""
        self.checkpointer.wait_until_finished()
        if is_main():
            folder = self.folder / str(step)
            self._write_seal(step, {"files": _checksums(folder)}, acceptance_length)
            try:
                self._delete(self._steps() - self._kept())
                for left in self.folder.glob("*.orbax-checkpoint-tmp*"):  # by kills; no other save is on its way
                    shutil.rmtree(left)
            except OSError as error:  # the checkpoint itself is whole
                _warn(f"what is no longer kept in {self.folder} could not be deleted ({error})")

    def _write_seal(self, step: int, seal: dict[str, Any], acceptance_length: float | None) -> None:
        beside = self.folder / str(step) / f"{SEAL}.new"
        measured = {"acceptance_length": acceptance_length, "measured_on": self.measured_on}
        beside.write_text(json.dumps(seal | measured, indent=0) + "\n", encoding="utf-8")
        beside.rename(beside.with_name(SEAL))

    def _unwritten(self, step: int, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder} ({error}): free some space and --resume; "
            f"the newest whole checkpoint is step {max(self._sealed(), default=None)}"
        )

    def _steps(self) -> set[int]:
        return {int(path.name) for path in self.folder.iterdir() if path.name.isdigit() and path.is_dir()}

    def _sealed(self) -> set[int]:
        return {step for step in self._steps() if (self.folder / str(step) / SEAL).is_file()}

    def _seal(self, step: int) -> dict[str, Any]:
        """What the seal says; {} for one that is no seal."""
        try:
            seal = json.loads((self.folder / str(step) / SEAL).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        files = seal.get("files") if isinstance(seal, dict) else None
        return seal if isinstance(files, dict) and all(isinstance(v, list) and len(v) == 2 for v in files.values()) else {}

    def _newest_whole(self, steps: set[int]) -> int:
        """The newest of these checkpoints without a fault, or -1. Every process checks its share of the files."""
        while (step := from_main(max(steps, default=-1))) >= 0:
            steps = steps - {step}
            folder = self.folder / str(step)
            if not everyone((folder / SEAL).is_file()):
                if is_main():
                    _warn(f"the checkpoint {folder} is half-written: it is skipped")
                continue
            fault = _fault(folder, self._seal(step).get("files", {}))
            if fault:
                _warn(f"the checkpoint {folder} is damaged ({fault}): it is skipped and set aside as {folder.name}.damaged")
            if everyone(not fault):
                return step
            if is_main():
                aside = folder.with_name(f"{step}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
            wait_for_all("set aside")
        return -1

    def _measured(self) -> dict[int, tuple[float, str | None]]:
        """Acceptance length, and the name of what it was measured on, by step."""
        seals = {step: self._seal(step) for step in self._sealed()}
        return {
            step: (seal["acceptance_length"], seal.get("measured_on"))
            for step, seal in seals.items()
            if seal.get("acceptance_length") is not None
        }

    def _best(self) -> tuple[int, float] | None:
        """By what is measured on now; of a run that measures nothing, by what the newest was measured on."""
        measured = self._measured()
        name = self.measured_on or (measured[max(measured)][1] if measured else None)
        same = [(tau, step) for step, (tau, of) in measured.items() if of == name]
        return max(same)[::-1] if same else None

    def _kept(self) -> set[int]:
        """The newest `keep` and the best. All else goes, what kills have left of older ones too."""
        best = self._best()
        return set(sorted(self._sealed())[-self.keep :]) | ({best[0]} if best else set())

    def _delete(self, steps: set[int]) -> None:
        for step in steps:
            folder = self.folder / str(step)
            if folder.exists():
                (folder / SEAL).unlink(missing_ok=True)  # first, so that a kill leaves no damaged checkpoint
                shutil.rmtree(folder)


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of each file by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL)
    return {str(path.relative_to(folder)): [path.stat().st_size, _crc(path)] for path in files}


def _fault(folder: Path, files: dict[str, list[int]]) -> str | None:
    """What is wrong with this process's share of a checkpoint's files, or None."""
    if not files:
        return f"{SEAL} is not readable"
    for index in _share(len(files)):
        name = sorted(files)[index]
        path, (size, crc) = folder / name, files[name]
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if _crc(path) != crc:
            return f"{name} has other bytes than were written"
    return None


def _share(count: int) -> range:
    return range(jax.process_index(), count, jax.process_count())


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


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
