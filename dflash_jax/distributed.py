"""Several processes as one run: agreements between them, and what only the first of them does. One process needs no network."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_main() -> bool:
    """Whether this process logs, exports and prints for all."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Print once for the whole run."""
    if is_main():
        print(text, flush=True)


def everyone(holds: bool) -> bool:
    """Whether it holds on every process."""
    return bool(np.all(_gathered(np.asarray(holds))))


def from_main(number: int) -> int:
    """The first process's number, on every process."""
    return int(_gathered(np.asarray(number, np.int32)).reshape(-1)[0])


def added_up(numbers_N: np.ndarray) -> np.ndarray:
    """The sum over processes of an array that has the same shape on each."""
    return _gathered(numbers_N).reshape(-1, *numbers_N.shape).sum(0, dtype=numbers_N.dtype)


def wait_for_all(name: str) -> None:
    """Return once every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _gathered(value: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(value)) if jax.process_count() > 1 else value[None]


def on_host(tree: Any) -> Any:
    """The whole of every array as numpy, on every process: one leaf at a time is gathered."""

    def one(x: Any) -> Any:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.asarray(x)

    return jax.tree.map(one, tree)
