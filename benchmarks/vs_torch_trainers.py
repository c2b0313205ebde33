"""Anchors a second of this package's training step and of SpecForge's (PyTorch) on a CPU: the same work, step by step in turn.

    make install VERSION=3.11 && make .venv-3.11/.oracle
    .venv-3.11/bin/python benchmarks/vs_torch_trainers.py --steps 8

Both train the same drafter on the same tokens, given features of SmolLM2-135M and anchors, forward, backward and AdamW with
clipping; SpecForge through its `OnlineDFlashModel` and its `BF16Optimizer`. Each side runs in the fastest of a few settings of its
own, found before; setting up and compilation are left out. A rate is the anchors of a step over the median time of one. The last
line is JSON; `ratio` is ours over theirs, and `trial_seconds` a step of every setting (SpecForge's default has chunks of 128
blocks). In float32 the losses of every step must agree within 1e-4 of themselves, in bfloat16 the first within 0.01: else it was
not the same work, and the status is 1.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.bench import DTYPES
from dflash_jax.cli import run
from dflash_jax.config import Config, DataConfig, MeshConfig, OptimConfig, TrainConfig
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError, DFlashError
from dflash_jax.hf import load_text_target, save_drafter
from dflash_jax.model_config import DFlashConfig, Dtype, default_target_layer_ids
from dflash_jax.optim import optimizer
from dflash_jax.prompts import packaged_prompts
from dflash_jax.sharding import make_mesh
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import Batch, init_state, make_train_step, target_features

RUN = 8
"""anchors side by side; the runs are spread evenly over a row"""
TRIALS = 2
"""timed steps a setting"""
RATE, CLIP, FOREVER = 1e-5, 1.0, 10**9
"""learning rate, constant because the cosine lasts forever; gradient norm"""
EQUAL = {"float32": 1e-4, "bfloat16": 1e-2}
"""largest relative difference of losses: of every step in float32, of the first in bfloat16"""


class Size(NamedTuple):
    """What a step trains on."""

    rows: int
    tokens: int
    """a row"""
    anchors: int
    """a row; a multiple of RUN"""
    block_size: int
    layers: int = 3


SIZES = {"A": Size(4, 256, 24, 8), "B": Size(1, 1024, 128, 16)}


class Work(NamedTuple):
    """What both sides are given."""

    size: Size
    target: DenseTarget
    drafter: Drafter
    folder: Path
    """the drafter's first parameters, as SpecForge loads them"""
    tokens_BT: np.ndarray
    loss_mask_BT: np.ndarray
    taps_BTM: np.ndarray


class Side(Protocol):
    """A trainer in one setting."""

    setting: str

    def reset(self) -> None:
        """Back to the first parameters."""

    def step(self) -> float:
        """One optimizer step, done when it returns; the loss before it."""


def make_work(size: Size, target: DenseTarget, mask_token_id: int, tokens: Sequence[int], folder: Path) -> Work:
    """Rows cut from `tokens`, of which just so many are supervised that every eligible anchor is one of the step."""
    c = target.config
    config = DFlashConfig(
        target_hidden_dim=c.hidden_size,
        draft_hidden_dim=c.hidden_size,
        vocab_size=c.vocab_size,
        num_target_layers=c.num_layers,
        loss_decay_gamma={16: 7.0, 10: 5.0}.get(size.block_size, 4.0),
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        mlp_dim=c.mlp_dim,
        block_size=size.block_size,
        num_draft_layers=size.layers,
        target_layer_ids=default_target_layer_ids(c.num_layers, 5),
        mask_token_id=mask_token_id,
        rope=c.rope,
    )
    drafter = Drafter.random(jax.random.key(0), config)
    tokens_BT = np.resize(np.asarray(tokens, np.int32), (size.rows, size.tokens))
    runs = size.anchors // RUN
    loss_mask_BT = np.broadcast_to(np.arange(size.tokens) % (size.tokens // runs) > size.tokens // runs - RUN - 2, tokens_BT.shape)
    batch = Batch(jnp.asarray(tokens_BT), jnp.asarray(loss_mask_BT), jnp.full(size.rows, size.tokens))
    features = jax.jit(target_features, static_argnums=(0, 3))
    taps_BTM = np.asarray(features(target, target.params, batch, config.target_layer_ids), np.float32)
    save_drafter(drafter, folder, dtype="float32")
    return Work(size, target, drafter, folder, tokens_BT, loss_mask_BT, taps_BTM)


class Ours:
    """This package's step as `train.py` runs it on one device, given features as train.features memory gives them."""

    def __init__(self, work: Work, dtype: Dtype, remat: bool) -> None:
        self.setting = f"remat {str(remat).lower()}"
        self.target = work.target.with_dtype(dtype)
        self.first = work.drafter.params
        self.drafter = Drafter(dataclasses.replace(work.drafter.config, dtype=dtype), self.first)
        config = Config(
            data=DataConfig(batch_size=work.size.rows),
            optim=OptimConfig(learning_rate=RATE, warmup_ratio=0.0, beta2=0.999, clip_norm=CLIP),
            train=TrainConfig(anchors_per_row=work.size.anchors, remat=remat),
        )
        self.tx = optimizer(config.optim, FOREVER)
        self.mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
        self.train_step = make_train_step(config, self.target, self.drafter, self.tx, self.mesh)
        lengths_B = jnp.full(work.size.rows, work.size.tokens)
        self.batch = Batch(jnp.asarray(work.tokens_BT), jnp.asarray(work.loss_mask_BT), lengths_B)
        self.taps_BTM = jnp.asarray(work.taps_BTM)
        self.reset()

    def reset(self) -> None:
        copies = jax.tree.map(jnp.copy, self.first)  # the step takes its state's buffers
        self.state = init_state(Drafter(self.drafter.config, copies), self.tx, self.mesh)

    def step(self) -> float:
        self.state, metrics = jax.block_until_ready(self.train_step(self.state, self.target.params, self.batch, self.taps_BTM))
        return float(metrics.sums.loss)


class SpecForge:
    """SpecForge's training module and optimizer over our target's embedding and head and our drafter's first parameters."""

    def __init__(self, work: Work, dtype: Dtype, attention: str, chunk: int) -> None:
        self.setting = f"{attention} attention, objective_chunk_blocks {chunk}"
        self.work, self.attention, self.chunk = work, attention, chunk
        self.torch, self.Model, self.Drafter, self.Optimizer = specforge_parts()
        self.dtype = getattr(self.torch, dtype)
        c = work.target.config
        kernels = work.target.head_kernel(work.target.params), work.target.params["embed_tokens"]
        head_VD, embedding_VD = (self.torch.tensor(np.asarray(x[...], np.float32)).to(self.dtype) for x in kernels)
        self.head = self.torch.nn.Linear(c.hidden_size, c.vocab_size, bias=False, dtype=self.dtype).requires_grad_(False)
        self.head.weight.data = head_VD
        self.embedding = self.torch.nn.Embedding.from_pretrained(embedding_VD)
        self.tokens = self.torch.tensor(work.tokens_BT).long()
        self.taps, self.loss_mask = self.torch.tensor(work.taps_BTM).to(self.dtype), self.torch.tensor(work.loss_mask_BT).float()
        self.reset()

    def reset(self) -> None:
        config = self.work.drafter.config
        with quiet():
            drafter = self.Drafter.from_pretrained(self.work.folder, dtype=self.dtype, attn_implementation=self.attention)
        self.model = self.Model(
            drafter.train(), self.head, self.embedding, config.mask_token_id, config.block_size, self.attention,
            num_anchors=self.work.size.anchors, loss_decay_gamma=config.loss_decay_gamma, objective_chunk_blocks=self.chunk,
        )  # fmt: skip
        with quiet():
            self.optimizer = self.Optimizer(drafter, RATE, max_grad_norm=CLIP, total_steps=FOREVER, warmup_ratio=0.0)

    def step(self) -> float:
        loss, _, _ = self.model(self.tokens, self.taps, self.loss_mask)
        loss.backward()
        with quiet():
            self.optimizer.step()
        return float(loss.item())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def specforge_parts() -> tuple[Any, Any, Any, Any]:
    """torch, and SpecForge's training module, drafter and optimizer."""
    try:
        with quiet():
            import torch
            from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
            from specforge.modeling.draft.dflash import DFlashDraftModel
            from specforge.optimizer import BF16Optimizer
            from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(
            f"SpecForge cannot be imported ({error}): make .venv-3.11/.oracle installs it, run this with .venv-3.11/bin/python"
        ) from None
    logging.disable_progress_bar()
    return torch, OnlineDFlashModel, DFlashDraftModel, BF16Optimizer


def timed(side: Side) -> tuple[float, float]:
    """The loss of a step, and its seconds."""
    started = time.perf_counter()
    loss = side.step()
    return loss, time.perf_counter() - started


def fastest(sides: Sequence[Side]) -> tuple[Side, dict[str, float]]:
    """The side whose best step of `TRIALS` in turn is the fastest, reset; and the seconds of all by setting."""
    for side in sides:
        side.step()  # sets itself up
    rounds = [[timed(side)[1] for side in sides] for _ in range(TRIALS)]
    best = [min(times) for times in zip(*rounds, strict=True)]
    chosen = sides[best.index(min(best))]
    chosen.reset()
    return chosen, {side.setting: round(took, 3) for side, took in zip(sides, best, strict=True)}


def compare(ours: Side, theirs: Side, anchors: int, dtype: Dtype, steps: int) -> dict[str, Any]:
    """Rates, their ratio, and the losses of both sides. Raises `DFlashError` when they did not do the same work."""
    sides = {"ours": ours, "specforge": theirs}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(steps):
        for name, side in sides.items():
            loss, took = timed(side)
            losses[name].append(loss)
            times[name].append(took)
    same = [math.isclose(a, b, rel_tol=EQUAL[dtype]) for a, b in zip(*losses.values(), strict=True)]
    if not all(same if dtype == "float32" else same[:1]):
        raise DFlashError(f"this is not the same work, stop and find out why: losses {losses}")
    result: dict[str, Any] = {"ratio": round(statistics.median(times["specforge"]) / statistics.median(times["ours"]), 3)}
    for name, side in sides.items():
        rate = round(anchors / statistics.median(times[name]), 2)
        result[name] = {"anchors_per_second": rate, "losses": [round(x, 5) for x in losses[name]], "setting": side.setting}
    return result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = "; ".join(f"{name}: {size}" for name, size in SIZES.items())
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help=sizes)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", type=int, default=8, help="timed steps a side, size and dtype")
    args = parser.parse_args(argv)
    if args.steps < 1:
        raise ConfigError(f"--steps is {args.steps}: it must be at least 1")
    torch = specforge_parts()[0]
    target = load_text_target("smollm2-135m", dtype="float32")
    texts = "\n".join(turn for prompt in packaged_prompts("train", limit=200) for turn in prompt["turns"])
    tokens = target.tokenizer.encode(texts)
    result: dict[str, Any] = {}
    for name in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            work = make_work(SIZES[name], target, 16, tokens, Path(folder))
            for dtype in args.dtypes:
                print(f"{name}, {dtype}", flush=True)
                settings = [(attention, chunk) for attention in ("eager", "sdpa") for chunk in (128, 0)]
                theirs, their_trials = fastest([SpecForge(work, dtype, *setting) for setting in settings])
                ours, our_trials = fastest([Ours(work, dtype, remat) for remat in (True, False)])
                anchors = work.size.rows * work.size.anchors
                one = compare(ours, theirs, anchors, dtype, args.steps) | {"trial_seconds": our_trials | their_trials}
                print(json.dumps(one), flush=True)
                result.setdefault(name, {})[dtype] = one
    result |= {"steps": args.steps, "threads": torch.get_num_threads(), "jax": jax.__version__, "torch": torch.__version__}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run(main)
