"""Several processes as one run: agreements between them, and what only the first of them does. One process needs no network."""

import os
import secrets
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dflash_jax.config import DistributedConfig
from dflash_jax.errors import ConfigError

_A_WEEK_MS = 7 * 24 * 3600 * 1000


def initialize(config: DistributedConfig) -> None:
    """Join the other processes of the run; nothing to do for one process. To be called before any device is asked for.

    Raises `ConfigError` when it is not said who the others are, or they cannot be reached.
    """
    address = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = _number("num_processes", config.num_processes, "JAX_NUM_PROCESSES")
    index = _number("process_index", config.process_index, "JAX_PROCESS_ID")
    if jax.distributed.is_initialized():
        return
    if address:
        if count is None or index is None or not 0 <= index < count:
            raise ConfigError(
                f"distributed.coordinator is {address}, num_processes {count} and process_index {index}: give how many processes "
                "there are and which one this is, from 0"
            )
        _join(f"the coordinator {address} was not reached", coordinator_address=address, num_processes=count, process_id=index)
    elif config.detect:
        _join("the cluster does not say who the other processes are; name distributed.coordinator and the rest")
    elif count is not None or index is not None:
        raise ConfigError("distributed.num_processes or process_index is given without distributed.coordinator: give host:port")
    elif _has_tpu():
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:  # a host of its own, such as a notebook's
            print(f"warning: no other TPU hosts were found ({error}): this one goes on alone", file=sys.stderr)


def _join(problem: str, **who: Any) -> None:
    try:
        jax.distributed.initialize(**who)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{problem} ({error})") from None


def _number(name: str, given: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or not text:
        return given
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the variable {variable} is {text!r}: make it a number, or give distributed.{name}") from None


def _has_tpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    devices = Path("/dev")
    return (not platforms or "tpu" in platforms.split(",")) and any([*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")])


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


def from_main(number: int | bool) -> int:
    """The first process's number, on every process."""
    return int(_gathered(np.asarray(number, np.int32)).reshape(-1)[0])


def text_from_main(text: str) -> str:
    """The first process's text, on every process."""
    data = text.encode()
    size = from_main(len(data))
    return bytes(_gathered(np.frombuffer(data[:size].ljust(size), np.uint8))[0]).decode()


def wait_for_all(name: str) -> None:
    """Return once every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def wait_for_main(name: str) -> None:
    """`wait_for_all` for what the first process does alone, for hours if need be: no device waits, as collectives have limits."""
    ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=_A_WEEK_MS)


def check_shared(folder: Path, field: str) -> None:
    """Raises `ConfigError` unless all processes see the folder of the first one, which exists."""
    if jax.process_count() == 1:
        return
    mark = folder / f".seen-by-all-{from_main(secrets.randbits(31))}"
    if is_main():
        mark.touch()
    wait_for_all("marked")
    seen = everyone(mark.exists())
    if is_main():
        mark.unlink()
    if not seen:
        raise ConfigError(f"{field} {folder.absolute()} is not one folder for all processes: give one that all hosts share")


def _gathered(value: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(value)) if jax.process_count() > 1 else value[None]


def on_host(tree: Any) -> Any:
    """The whole of every array as numpy, on every process: one leaf at a time is gathered."""

    def one(x: Any) -> Any:
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.asarray(x)

    return jax.tree.map(one, tree)
