"""Errors a user can act on: each message names the thing and the mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DFlashError(ValueError):
    """A user's mistake or an unusable input. Entry points print it without a traceback and exit 1."""


class ConfigError(DFlashError):
    """A configuration that cannot work."""


class CheckpointError(DFlashError):
    """A weight file, a checkpoint folder or its config that cannot be used."""


class DataError(DFlashError):
    """A data file that cannot be read or holds nothing to train on."""


class PromptError(DFlashError):
    """A prompt that the target cannot take."""


class EngineError(DFlashError):
    """An engine that a failed step has left unusable."""


class NonFiniteLossError(DFlashError):
    """Training produced a loss that is not a finite number."""


@contextmanager
def named(path: Path) -> Iterator[None]:
    """The system's errors while a file is written say which file: a full disk itself names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
