"""One process at a time on a file or folder that is written in steps."""

import contextlib
import importlib.util
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

from dflash_jax.errors import ConfigError


@contextlib.contextmanager
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


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and hold it as `only_process` does. Folders that were made go again if nothing was written into them: what is
    refused leaves nothing behind."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # one that holds something, and then those above it
                for path in made:
                    path.rmdir()


def keep_for_reading(path: Path, reader: object) -> None:
    """Hold a file or folder, as other readers may too, so that `only_process` refuses it while the object `reader` lives."""
    if importlib.util.find_spec("fcntl") is None:
        return
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    weakref.finalize(reader, os.close, descriptor)
    with contextlib.suppress(OSError):  # a file system without locks, where `only_process` fails too
        fcntl.flock(descriptor, fcntl.LOCK_SH)
