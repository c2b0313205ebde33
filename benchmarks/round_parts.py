"""Where a round's time goes: draft, verify, context, commit and the host's gap, beside a plain step, and what memory it reads.

    .venv-3.12/bin/python benchmarks/round_parts.py                    # the embedded model and the shipped drafter
    .venv-3.12/bin/python benchmarks/round_parts.py --target DIR --drafter DIR --block_size 16 --accepted 4

A folder with a config.json and no weights gets random ones: what a round costs depends on shapes alone. Each part runs in a device
loop of its own, all parts in turn, compilation apart; medians are given. The last line is JSON.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax import decode as loop
from dflash_jax.cli import run
from dflash_jax.config import DecodeConfig, read_json
from dflash_jax.decode import DecodeState, decode
from dflash_jax.drafter import Drafter, abstract_drafter, check_drafter_fits
from dflash_jax.errors import ConfigError
from dflash_jax.generate import start
from dflash_jax.hf import load_drafter, load_target
from dflash_jax.hf_config import target_config
from dflash_jax.hf_drafter import config_from_json
from dflash_jax.hf_weights import check_dtype
from dflash_jax.progress import device_bytes
from dflash_jax.targets import DenseTarget
from dflash_jax.targets.dense import abstract_decoder
from dflash_jax.verify import Verified

ROOT = Path(__file__).parents[1]
READ_BYTES = 2**28
"""enough to leave every cache behind when the speed of memory is measured"""


def random_params(abstract: Any, dtype: str) -> Any:
    """Parameters of the shapes of `abstract`, made on the device."""
    leaves, tree = jax.tree.flatten(nnx.state(abstract, nnx.Param))

    @jax.jit
    def make(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(leaves))
        return [
            (x.shape[-1] ** -0.5 * jax.random.normal(k, x.shape) if x.ndim > 1 else jnp.ones(x.shape)).astype(dtype)
            for k, x in zip(keys, leaves, strict=True)
        ]

    return jax.tree.unflatten(tree, make(jax.random.key(0)))


def load(target_path: str, drafter_path: str, dtype: str) -> tuple[DenseTarget, Drafter]:
    """Models from folders, with random parameters where a folder has none."""

    def bare(path: str) -> bool:
        return (Path(path) / "config.json").exists() and not any(Path(path).glob("*.safetensors"))

    if bare(target_path):
        sizes = target_config(Path(target_path), check_dtype(dtype))
        target = DenseTarget(sizes, random_params(abstract_decoder(sizes), dtype))
    else:
        target = load_target(target_path, dtype)
    if not bare(drafter_path):
        return target, load_drafter(drafter_path, target)
    where = str(Path(drafter_path) / "config.json")
    config = dataclasses.replace(config_from_json(read_json(where), where, target.config), dtype=check_dtype(dtype))
    check_drafter_fits(config, target.config)
    return target, Drafter(config, random_params(abstract_drafter(config), dtype))


def forced(accepted: int) -> Callable[[Any, Any], Verified]:
    """A `verify_block` that lets so many drafts of each round stand, whatever the target thinks of them."""

    def verify_block(draft_BJ: jax.Array, target_BK: jax.Array) -> Verified:
        accepted_B = jnp.full((draft_BJ.shape[0],), min(accepted, draft_BJ.shape[1]), jnp.int32)
        tokens_BK = jnp.concatenate([draft_BJ, target_BK[:, -1:]], axis=1)
        return Verified(tokens_BK, accepted_B, accepted_B + 1, accepted_B.mean(dtype=jnp.float32))

    return verify_block


def parts(
    target: DenseTarget, drafter: Drafter, prompts: list[list[int]], block: int, rounds: int
) -> tuple[dict[str, Callable[[], float]], dict[str, DecodeState]]:
    """What is timed, each a function that returns the seconds of a round (of a call, for `call of one round`), and their states."""
    new = rounds * block + 1
    state, _ = start(target, drafter, prompts, DecodeConfig(new, block_size=block), [])
    plain, _ = start(target, None, prompts, DecodeConfig(new + block - 1), [])  # caches of the same capacity
    params, draft_params = target.params, drafter.params
    head_VD = drafter.head(draft_params, target, params)
    batch = state.length_B.shape[0]
    taps = len(drafter.config.target_layer_ids) * target.config.hidden_size
    drafts_BJ = jnp.zeros((batch, block - 1), jnp.int32)
    taps_BKM = jnp.ones((batch, block, taps), jnp.float32)
    tokens_BK = jnp.ones((batch, block), jnp.int32)
    held: dict[str, DecodeState] = {}

    def drafting(params: Any, draft_params: Any, head_VD: Any, state: DecodeState) -> DecodeState:
        def body(_: Any, state: DecodeState) -> DecodeState:
            drafts_BJ, _ = loop.draft(params, draft_params, head_VD, state, target, drafter, block)
            rows_B = jnp.arange(batch, dtype=jnp.int32)
            return state._replace(tokens_BL=state.tokens_BL.at[rows_B, state.length_B - 1].set(drafts_BJ[:, 0]))

        return jax.lax.fori_loop(0, rounds, body, state)

    def verifying(params: Any, state: DecodeState, drafts_BJ: Any) -> tuple[DecodeState, Any]:
        def body(_: Any, carry: tuple[DecodeState, Any]) -> tuple[DecodeState, Any]:
            state, verified, _ = loop.verify(params, carry[0], carry[1], None, target, drafter)
            return state, verified.tokens_BK[:, 1:]

        return jax.lax.fori_loop(0, rounds, body, (state, drafts_BJ))

    def extending(draft_params: Any, state: DecodeState, taps_BKM: Any) -> tuple[DecodeState, Any]:
        def body(_: Any, carry: tuple[DecodeState, Any]) -> tuple[DecodeState, Any]:
            state, taps_BKM = carry
            positions_BK = state.length_B[:, None] - 1 + jnp.arange(block, dtype=jnp.int32)[None]
            state = loop.with_context(draft_params, state, drafter, taps_BKM, positions_BK)
            return state, taps_BKM + 1  # other taps in each round, so that nothing can leave the loop

        return jax.lax.fori_loop(0, rounds, body, (state, taps_BKM))

    def committing(state: DecodeState, tokens_BK: Any) -> tuple[DecodeState, Any]:
        def body(_: Any, carry: tuple[DecodeState, Any]) -> tuple[DecodeState, Any]:
            state, tokens_BK = carry
            accepted_B = tokens_BK[:, 0] % block
            one = Verified(tokens_BK, accepted_B, accepted_B + 1, jnp.float32(0))
            return loop.booked(state, one, block - 1), tokens_BK + 1

        return jax.lax.fori_loop(0, rounds, body, (state, tokens_BK))

    def timed(name: str, state: DecodeState, call: Callable[[DecodeState], Any], share: int) -> Callable[[], float]:
        """Every call starts from the same lengths; what was written past them is never seen."""
        held[name] = state
        length_B = np.asarray(state.length_B)

        def once() -> float:
            ready = held[name]._replace(length_B=jnp.asarray(length_B), done_B=jnp.zeros_like(held[name].done_B))
            jax.block_until_ready(ready)
            before = time.perf_counter()
            out = jax.block_until_ready(call(ready))
            took = time.perf_counter() - before
            held[name] = out if isinstance(out, DecodeState) else out[0]
            return took / share

        return once

    def compiled(function: Any, state_at: int, *args: Any) -> Any:
        return jax.jit(function, donate_argnums=(state_at,)).lower(*args).compile()

    def own(state: DecodeState) -> DecodeState:
        return jax.tree.map(jnp.copy, state)  # each part donates its own

    both, alone = {"target": target, "drafter": drafter}, {"target": target, "drafter": None}
    draft_pass = compiled(drafting, 3, params, draft_params, head_VD, state)
    verify_pass = compiled(verifying, 1, params, state, drafts_BJ)
    context = compiled(extending, 1, draft_params, state, taps_BKM)
    commit = compiled(committing, 0, state, tokens_BK)

    def round_of(count: int) -> Callable[[DecodeState], Any]:
        return lambda state: decode(params, draft_params, state, jnp.int32(count), **both)

    def plain_of(count: int) -> Callable[[DecodeState], Any]:
        return lambda state: decode(params, (), state, jnp.int32(count), **alone)

    timers = {
        "plain step": timed("plain", own(plain), plain_of(rounds), rounds),
        "round": timed("round", own(state), round_of(rounds), rounds),
        "call of one round": timed("one", own(state), round_of(1), 1),
        "draft": timed("draft", own(state), lambda s: draft_pass(params, draft_params, head_VD, s), rounds),
        "verify": timed("verify", own(state), lambda s: verify_pass(params, s, drafts_BJ), rounds),
        "context": timed("context", own(state), lambda s: context(draft_params, s, taps_BKM), rounds),
        "commit": timed("commit", own(state), lambda s: commit(s, tokens_BK), rounds),
    }
    return timers, held


def memory_speed() -> float:
    """Bytes a second that the device reads: the best of five sums over more than its caches hold."""
    numbers = jnp.ones((READ_BYTES // 4,), jnp.float32)
    total = jax.jit(jnp.sum).lower(numbers).compile()
    times = []
    for _ in range(5):
        before = time.perf_counter()
        total(numbers).block_until_ready()
        times.append(time.perf_counter() - before)
    return READ_BYTES / min(times)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="as for load_target, or a folder with config.json alone")
    parser.add_argument("--drafter", default=str(ROOT / "assets/smollm2-135m-dflash"), help="a folder; config.json alone will do")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32: take the one that you decode in")
    parser.add_argument("--block_size", type=int, default=4, help="slots a block; 2 to the size that the drafter was trained for")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--prompt_length", type=int, default=128, help="tokens before the first round")
    parser.add_argument("--rounds", type=int, default=16, help="rounds a call: enough to make the host's part of a call small")
    parser.add_argument("--repeats", type=int, default=9, help="calls of each part; more where the machine is noisy")
    parser.add_argument(
        "--accepted", type=int, default=None, help="let so many drafts stand in every round (random weights: none do)"
    )
    args = parser.parse_args(argv)
    for name in ("batch", "prompt_length", "rounds", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}: it must be at least 1")
    target, drafter = load(args.target, args.drafter, args.dtype)
    last = args.prompt_length + args.rounds * args.block_size + 1
    if last > target.config.max_position:
        raise ConfigError(
            f"{last} positions are more than the target's {target.config.max_position}: lower --prompt_length or --rounds"
        )
    random = np.random.default_rng(0)
    prompts = random.integers(0, target.config.vocab_size, (args.batch, args.prompt_length)).tolist()
    forcing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if args.accepted is not None:
        forcing = mock.patch.object(loop, "verify_block", forced(args.accepted))
    times: dict[str, list[float]] = {}
    with forcing:
        timers, states = parts(target, drafter, prompts, args.block_size, args.rounds)
        for timer in timers.values():
            timer()  # compiles
        for _ in range(args.repeats):
            for name, timer in timers.items():
                times.setdefault(name, []).append(timer())
    ms = {name: round(1e3 * statistics.median(values), 3) for name, values in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["round"], times["plain step"], strict=True))
    gap = statistics.median(a - b for a, b in zip(times["call of one round"], times["round"], strict=True))
    embedding = 0 if target.config.tie_embeddings else device_bytes(target.params["embed_tokens"])
    head = device_bytes(drafter.head(drafter.params, target, target.params))
    read = {"plain step": device_bytes(target.params) - embedding}  # of an embedding that is no head, some rows
    read["round"] = read["plain step"] + device_bytes(drafter.params) + head
    speed = memory_speed()
    seen = states["round"]
    stood_K = np.asarray(seen.accepted_BK).sum(axis=0)
    result: dict[str, Any] = {
        "round_over_plain_step": round(ratio, 3),
        "ms": ms,
        "sum_of_parts_over_round": round(sum(ms[name] for name in ("draft", "verify", "context", "commit")) / ms["round"], 3),
        "host_gap_ms": round(1e3 * gap, 3),
        "parameter_gb_read": {name: round(size / 1e9, 3) for name, size in read.items()},
        "gb_per_second": {name: round(size / 1e6 / ms[name], 1) for name, size in read.items()},
        "memory_gb_per_second": round(speed / 1e9, 1),
        "share_of_memory_speed": {name: round(size / 1e-3 / ms[name] / speed, 3) for name, size in read.items()},
        "block_size": args.block_size,
        "batch": args.batch,
        "prompt_length": args.prompt_length,
        "acceptance_length": round(1 + float((stood_K * np.arange(len(stood_K))).sum() / stood_K.sum()), 3),
        "dtype": args.dtype,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    for name, value in ms.items():
        print(f"{name:>18} {value:10.3f} ms")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run(main)
