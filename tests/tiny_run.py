"""A whole run in small: a target folder with a tokenizer, conversations that fit it, and a config over both."""

import atexit
import contextlib
import dataclasses
import functools
import json
import resource
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
from tiny_folder import tiny_config, write_folder
from tiny_text import TEMPLATE, tiny_tokenizer

from dflash_jax.config import Config, DataConfig, DrafterSource, MeshConfig, OptimConfig, TargetSource, TrainConfig
from dflash_jax.drafter import Drafter
from dflash_jax.first_drafter import drafter_config
from dflash_jax.hf import load_target, save_drafter
from dflash_jax.sharding import make_mesh

VOCAB, LAYERS, MASK, STOP = 267, 4, 3, 2
CONFIG_JSON = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS, head_dim=8, eos_token_id=STOP)


@functools.cache
def scratch() -> Path:
    """A folder for what all tests of a process share, gone at its end."""
    folder = Path(tempfile.mkdtemp(prefix="dflash_jax_tests_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def target_folder():
    """A random Llama with 4 layers of width 32 over bytes."""
    folder = write_folder(
        scratch() / "target", CONFIG_JSON, tokenizer_config={"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    )
    tiny_tokenizer().backend.save(str(folder / "tokenizer.json"))
    return str(folder)


@functools.cache
def tiny_target():
    return load_target(target_folder(), dtype="float32")


@functools.cache
def drafter_folder():
    """A drafter with random parameters: useless, which must never show in the text."""
    drafter = Drafter.random(jax.random.key(7), drafter_config(Config(drafter=DRAFTER), tiny_target().config))
    save_drafter(drafter, scratch() / "drafter", dtype="float32")
    return str(scratch() / "drafter")


def mesh(data=1, fsdp=1, tensor=1, replica=1):
    return make_mesh(MeshConfig(data, fsdp, tensor, replica), jax.devices()[: data * fsdp * tensor * replica])


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write_lines(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@functools.cache
def conversations():
    """Twelve answers of different lengths that fit one bucket of 32."""
    rows = [{"messages": [user("a"), assistant(f"{i} hello"[: 3 + i % 5])]} for i in range(12)]
    return write_lines(scratch() / "train.jsonl", rows)


DRAFTER = DrafterSource(block_size=4, num_draft_layers=1, target_layer_ids=[0, 2], mask_token_id=MASK)


def tiny_run(run_dir, **changes):
    """A config of 4 steps; `changes` are written section__field=value."""
    config = Config(
        target=TargetSource(target_folder(), "float32"),
        drafter=DRAFTER,
        data=DataConfig(
            train=[conversations()],
            records=str(scratch() / "records"),
            max_length=32,
            packing=False,
            buckets=[32],
            batch_size=4,
            num_epochs=2,
        ),
        optim=OptimConfig(learning_rate=1e-2, warmup_ratio=0.25),
        train=TrainConfig(
            run_dir=str(run_dir),
            steps=4,
            anchors_per_row=3,
            anchor_chunk=2,
            logit_chunk=16,
            log_every=2,
            save_every=2,
            eval_every=0,
        ),
    )
    for name, value in changes.items():
        section, field = name.split("__")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: value})})
    return config


def leaves(tree):
    """Arrays of a pytree by path, on the host."""
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@contextlib.contextmanager
def files_of_at_most(size):
    """Longer writes fail in the file system, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
