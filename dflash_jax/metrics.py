"""Where metrics go: metrics.jsonl always, TensorBoard on request."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash_jax.errors import ConfigError


class MetricsWriter:
    """Appends one JSON object a line to metrics.jsonl; a context manager."""

    def __init__(self, folder: Path, tensorboard: bool) -> None:
        self.board: Any = None
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                raise ConfigError("train.tensorboard needs tensorboardX: pip install 'dflash_jax[tensorboard]'") from None
            self.board = SummaryWriter(str(folder / "tensorboard"))
        self.file = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write what was measured at a step; lists become one TensorBoard curve an entry."""
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                for index, number in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    self.board.add_scalar(name if index is None else f"{name}/{index + 1}", number, step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()
