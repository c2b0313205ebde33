"""Processes of one run on this machine: train.py, which also says how much of the target's files it has read, or what hosts agree
on without training. `launch` starts them; as a script it is one of them.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]


class CountedSlice:
    """A safetensors slice that notes the bytes it gives."""

    def __init__(self, view, reads):
        self.view, self.reads = view, reads

    def get_shape(self):
        return self.view.get_shape()

    def get_dtype(self):
        return self.view.get_dtype()

    def __getitem__(self, index):
        part = self.view[index]
        self.reads.append(part.nbytes)
        return part


class CountedFile:
    """A safetensors file that notes the bytes it gives."""

    def __init__(self, handle, reads):
        self.handle, self.reads = handle, reads

    def keys(self):
        return self.handle.keys()

    def get_slice(self, name):
        return CountedSlice(self.handle.get_slice(name), self.reads)

    def get_tensor(self, name):
        return self.get_slice(name)[:]


def count_reads(monkeypatch):
    """The sizes of all that is read from safetensors files from now on."""
    import dflash_jax.hf_weights as hf_weights

    reads, open_file = [], hf_weights.safe_open
    monkeypatch.setattr(hf_weights, "safe_open", lambda file, framework: CountedFile(open_file(file, framework), reads))
    return reads


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def launch(folder, config, processes, *options, devices=2, what=(), pause=0.0):
    """`config` (JSON) as so many processes with so many devices each; their output goes to files, because pipes could fill.

    `pause`: seconds that they sleep before a step, which cost a test less than more steps.
    """
    (folder / "config.yaml").write_text(config)
    environment = dict(
        os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
        JAX_COMPILATION_CACHE_DIR=str(folder / "compiled"), JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", PYTHONPATH=str(ROOT), STEP_PAUSE=str(pause),
    )  # fmt: skip
    port, started = free_port(), []
    for index in range(processes):
        argv = [sys.executable, __file__, *what, "--config", str(folder / "config.yaml"), *options]
        if processes > 1:
            argv += [f"--distributed.coordinator=localhost:{port}", f"--distributed.num_processes={processes}"]
            argv += [f"--distributed.process_index={index}"]
        with open(folder / f"out{index}.txt", "w") as out:
            process = subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        process.output = folder / f"out{index}.txt"
        started.append(process)
    return started


def scattered_rows():
    """The rows of this process on a mesh where devices of the processes alternate, which must land where the mesh has them."""
    import jax

    from dflash_jax.config import MeshConfig
    from dflash_jax.sharding import make_mesh, place_rows, process_rows

    half = len(jax.devices()) // 2
    alternating = [jax.devices()[i // 2 + half * (i % 2)] for i in range(2 * half)]
    mesh = jax.sharding.Mesh(np.reshape(alternating, make_mesh(MeshConfig()).devices.shape), make_mesh(MeshConfig()).axis_names)
    rows, values = process_rows(mesh, 8), np.arange(24).reshape(8, 3)
    for shard in place_rows(values[rows], mesh).addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
    return rows.tolist()


def train_and_tell():
    """train.py, and a line of JSON at its end."""
    import pytest

    from dflash_jax.cli import run
    from dflash_jax.stop import StopRequests
    from train import main as train

    asked, pause = StopRequests.asked, float(os.environ["STEP_PAUSE"])
    with pytest.MonkeyPatch.context() as patch:
        reads = count_reads(patch)
        patch.setattr(StopRequests, "asked", lambda self: (time.sleep(pause), asked(self))[1])

        def counted(argv):
            status = train(argv)
            print(json.dumps({"bytes_read": int(np.sum(reads)), "scattered": scattered_rows()}), flush=True)
            return status

        run(counted)


class Killed(BaseException):
    """Nothing catches it but the test."""


def cached_in_parts(config):
    """Write a cache of a shard a batch. The second host is gone before it has sealed its second shard, the first one shard later;
    then both come again. The exit status, and the batches that they computed again."""
    import pytest

    from dflash_jax import precompute
    from dflash_jax.distributed import is_main, wait_for_all
    from dflash_jax.feature_store import ShardWriter

    sealed, computed, seal, place_batch = [], [], ShardWriter.seal, precompute.place_batch

    def sealing(self, end):
        if len(sealed) == (2 if is_main() else 1):
            raise Killed
        seal(self, end)
        sealed.append(end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute, "SHARD_BYTES", 1)
        with patch.context() as killing:
            killing.setattr(ShardWriter, "seal", sealing)
            with pytest.raises(Killed):
                precompute.precompute(config)
        wait_for_all("both are gone")
        patch.setattr(precompute, "place_batch", lambda raw, mesh: (computed.append(None), place_batch(raw, mesh))[1])
        return precompute.precompute(config), len(computed)


def agree(argv):
    """What two hosts agree on, each with a text (`train`) and folders of its own; a line of JSON. They write one cache of features.
    Then the first fails while the second waits for it."""
    from tiny_text import tiny_tokenizer

    from dflash_jax.cli import parse_config
    from dflash_jax.distributed import from_main, initialize, is_main, text_from_main, wait_for_all, wait_for_main
    from dflash_jax.errors import ConfigError
    from dflash_jax.records import open_records
    from dflash_jax.stop import StopRequests

    config = parse_config(argv)
    initialize(config.distributed)
    own, tokenizer = Path(config.train.run_dir) / str(config.distributed.process_index), tiny_tokenizer()

    def records(folder):
        data = dataclasses.replace(config.data, train=[str(own / "text.jsonl")], records=str(folder))
        return open_records(data, tokenizer, tokenizer.vocab_size)

    told = {"text": text_from_main("\u00e9" if is_main() else "something longer")}
    (own / "unshared").mkdir(parents=True, exist_ok=True)
    found = records(own.parent / "records")
    told |= {"records": found.folder.name, "rows": [record.id for record in found.read(range(len(found)))]}
    try:
        records(own / "unshared")
    except ConfigError as error:
        told["refused"] = str(error)
    told["cached"] = cached_in_parts(config)
    with StopRequests() as stop:
        questions = 0
        while not stop.asked():
            questions += from_main(1)  # a step
            if questions == 20 and not is_main():
                os.kill(os.getpid(), signal.SIGTERM)
        told |= {"stopped": questions, "again": stop.asked(), "status": stop.status}
    print(json.dumps(told), flush=True)
    wait_for_all("told")  # the failure ends the other at once
    if is_main():
        raise ConfigError("a planted error")
    wait_for_main("the other, which is gone")


if __name__ == "__main__":
    if sys.argv[1] == "agree":
        from dflash_jax.cli import run

        run(agree, sys.argv[2:])
    train_and_tell()
