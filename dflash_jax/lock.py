"""One process at a time on a file or folder that is written in steps."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_jax.errors import ConfigError


@contextmanager
def only_process(path: Path) -> Iterator[None]:
    """Hold a file or folder while the block runs; the system lets go of it when the process dies, however it dies.

    Raises `ConfigError` when another process holds it. Without `fcntl` (Windows) nothing is held.
    """
    if importlib.util.find_spec("fcntl") is None:
        yield
        return
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path} is being written by another process: wait for it, or give another one") from None
        yield
    finally:
        os.close(descriptor)
