"""Where metrics go: metrics.jsonl always, TensorBoard on request."""

import importlib.util
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_jax.errors import ConfigError, named


def check_board() -> None:
    """Raises `ConfigError` when TensorBoard events cannot be written here."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError("train.tensorboard needs tensorboardX: pip install 'dflash_jax[tensorboard]'")


class MetricsWriter:
    """Appends one JSON object a line to metrics.jsonl; a context manager.

    Lines of steps after `step`, where the run starts or resumes, are removed: those steps are done again.
    """

    def __init__(self, folder: Path, tensorboard: bool, step: int = 0) -> None:
        self.board: Any = None
        if tensorboard:
            check_board()
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"))
        path = folder / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= step]
            if kept != lines:  # beside the file first: a full disk or a kill must not cost what was measured
                beside = path.with_suffix(".new")
                beside.write_text("".join(kept), encoding="utf-8")
                beside.replace(path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write what was measured at a step; for TensorBoard lists become one curve an entry, and texts are left out."""
        with named(Path(self.file.name)):
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, str):
                    continue
                for index, number in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    self.board.add_scalar(name if index is None else f"{name}/{index + 1}", number, step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _step_of(line: str) -> float:
    """The step of a line; a line cut by a kill belongs to no step."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
