"""What a drafter is worth: acceptance and exactness over all prompts, then decoding speed against the fastest plain decoding."""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from dflash_jax.config import Config, DecodeConfig
from dflash_jax.conversations import first_messages, read_prompts
from dflash_jax.divergence import first_divergence
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError, PromptError
from dflash_jax.generate import (
    NO_LIMIT,
    AcceptanceStats,
    GenerationStats,
    advancing,
    check_prompts,
    compiled,
    finish,
    generate,
    pool,
    rule_of,
    start,
)
from dflash_jax.hf import load_drafter, load_text_target
from dflash_jax.prompts import Prompt, packaged_prompts
from dflash_jax.targets import DenseTarget
from dflash_jax.widths import WidthTable

DTYPES = ("float32", "bfloat16")
TRIAL_PROMPTS = 3
"""timed in both dtypes; the faster one is timed on"""


class Timing(NamedTuple):
    """Decoding of one prompt after its prefill."""

    tokens: list[int]
    emitted: int
    seconds: float
    rounds: int
    """verify passes"""


def bench(config: Config) -> int:
    """Measure as configured; the report's last line is JSON. Returns 1 when a float32 text differs from plain decoding's.

    `decode` says how: greedily, or sampled by a rule; the rules that give another sample are not compared with plain text.
    """
    for name, least in (("timed_prompts", 1), ("batch_size", 1), ("max_new_tokens", 2)):
        if getattr(config.bench, name) < least:
            raise ConfigError(f"bench.{name} is {getattr(config.bench, name)}: it must be at least {least}")
    prompts = _prompts(config)
    if config.drafter.path is None:
        raise ConfigError("drafter.path is not set: name the drafter to measure")
    same_text = rule_of(config.decode) == "match"
    target = load_text_target(config.target.path, dtype="float32")
    drafter = load_drafter(config.drafter.path, target, dtype="float32")
    encoded = []
    for prompt in prompts:
        try:
            encoded.append(target.tokenizer.encode_chat(first_messages(prompt)))
            check_prompts(target, encoded[-1:])
        except PromptError as error:
            what = str(error)
            what = f"it {what.removeprefix('prompt 0 ')}" if what.startswith("prompt 0 ") else what
            raise PromptError(f"prompt {prompt['id']}: {what}") from None
    rows, identical = _exactness(target, drafter, encoded, config)
    stats = GenerationStats(rows, pool(rows))
    for name in dict.fromkeys(prompt["set"] for prompt in prompts):
        of_set = pool([row for row, prompt in zip(rows, prompts, strict=True) if prompt["set"] == name])
        print(f"{name}: acceptance length {of_set.acceptance_length:.3f} (pooled)")
    print(f"accepted per position: {' '.join(f'{share:.3f}' for share in stats.pooled.accepted_per_position)}")
    speed = _speed(target, config, [encoded[i] for i in timed_prompts([p["set"] for p in prompts], config.bench.timed_prompts)])
    result = {
        "acceptance_length": round(stats.acceptance_length, 4) if stats.pooled.rounds else None,
        "acceptance_length_macro": round(stats.acceptance_length_macro, 4) if stats.pooled.rounds else None,
        **speed,
        "identical": identical == len(prompts) if same_text else None,
        "identical_prompts": identical if same_text else None,
        "prompts": len(prompts),
        "block_size": config.decode.block_size or drafter.config.block_size,
        "max_new_tokens": config.bench.max_new_tokens,
        "temperature": config.decode.temperature,
        "verify": rule_of(config.decode),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(result))
    return 0 if identical == len(prompts) or not same_text else 1


def _prompts(config: Config) -> list[Prompt]:
    limit = config.bench.limit
    if limit < 0:
        raise ConfigError(f"bench.limit is {limit}: give a number of prompts a set, or 0 for all")
    prompts = read_prompts(config.bench.prompts) if config.bench.prompts else packaged_prompts("eval")
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt["set"]] = taken.get(prompt["set"], 0) + 1
        if not limit or taken[prompt["set"]] <= limit:
            kept.append(prompt)
    return kept


def timed_prompts(sets: Sequence[str], count: int) -> list[int]:
    """Indices of `count` prompts, as many of each set as there are, evenly spread within it."""
    members = [[i for i, name in enumerate(sets) if name == wanted] for wanted in dict.fromkeys(sets)]
    shares = [0] * len(members)
    for _ in range(min(count, len(sets))):  # the set with the smallest share that has more
        shares[min((share, k) for k, share in enumerate(shares) if share < len(members[k]))[1]] += 1
    return sorted(m[j * len(m) // share] for m, share in zip(members, shares, strict=True) for j in range(share))


def _exactness(
    target: DenseTarget, drafter: Drafter, encoded: Sequence[list[int]], config: Config
) -> tuple[list[AcceptanceStats], int]:
    """Acceptance of every prompt in float32, and how many texts equal plain decoding's."""
    size, how = config.bench.batch_size, config.decode
    options: dict[str, Any] = {"max_new_tokens": config.bench.max_new_tokens, "temperature": how.temperature, "seed": how.seed}
    options |= {"top_k": how.top_k, "top_p": how.top_p, "min_p": how.min_p}
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    rows: dict[int, AcceptanceStats] = {}
    identical = 0
    with tqdm(total=len(encoded), unit="prompt", desc="exactness") as bar:
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            batch = [encoded[i] for i in chosen]
            fast = generate(target, drafter, batch, block_size=how.block_size, verify=how.verify, **options)
            if rule_of(how) == "match":
                plain = generate(target, None, batch, **options)
                identical += sum(a == b for a, b in zip(plain.tokens, fast.tokens, strict=True))
            rows |= dict(zip(chosen, fast.stats.rows, strict=True))
            bar.update(len(chosen))
    return [rows[i] for i in range(len(encoded))], identical


def time_decoding(
    target: DenseTarget, drafter: Drafter | None, prompt: list[int], options: DecodeConfig, widths: WidthTable | None = None
) -> Timing:
    """Decode one prompt after its prefill, compilation apart: it is over when the clock starts.

    `options.block_size` counts with a drafter only; with `widths` it is the largest width.
    """
    options = options if drafter is not None else dataclasses.replace(options, block_size=None)
    state, lengths = start(target, drafter, [prompt], options)
    rule = rule_of(options)
    advance = advancing(target, drafter, state, rule, widths)
    state = compiled(target, drafter, state, rule, widths)
    before = time.perf_counter()
    while not bool(state.done_B.all()):
        state = jax.block_until_ready(advance(state, NO_LIMIT))
    seconds = time.perf_counter() - before
    out = finish(state, lengths)
    return Timing(out.tokens[0], out.stats.pooled.emitted, seconds, out.stats.pooled.rounds)


def _speed(target: DenseTarget, config: Config, encoded: Sequence[list[int]]) -> dict[str, Any]:
    """Plain and speculative tokens a second, prompt by prompt in turn, each in its faster dtype.

    `useless` is a drafter of the same sizes with parameters of zero, whose drafts hardly ever stand: its rounds cost what any cost,
    which gives the acceptance length that breaks even. With a table of widths, both drafters are also timed at the widths that pay.
    """
    options = dataclasses.replace(config.decode, max_new_tokens=config.bench.max_new_tokens)
    widths = WidthTable(config.decode.widths) if config.decode.widths is not None else None
    targets = {dtype: target.with_dtype(dtype) for dtype in DTYPES}
    drafters = {dtype: load_drafter(str(config.drafter.path), targets[dtype], dtype=dtype) for dtype in DTYPES}
    useless = {dtype: Drafter(drafters[dtype].config, jax.tree.map(jnp.zeros_like, drafters[dtype].params)) for dtype in DTYPES}
    kinds = {"plain": None, "speculative": drafters, "useless": useless}
    runs: dict[tuple[str, str], list[Timing]] = {}

    def run(kind: str, dtype: str, prompt: list[int]) -> Timing:
        which = kinds[kind.removeprefix("adaptive ")]
        drafter = which[dtype] if which is not None else None
        timing = time_decoding(targets[dtype], drafter, prompt, options, widths if kind.startswith("adaptive") else None)
        runs.setdefault((kind, dtype), []).append(timing)
        return timing

    def rate(kind: str, dtype: str, most: int | None = None) -> float:
        timings = runs[kind, dtype][:most]
        return sum(t.emitted for t in timings) / max(sum(t.seconds for t in timings), 1e-9)

    for prompt in encoded[:TRIAL_PROMPTS]:
        for dtype in DTYPES:
            run("plain", dtype, prompt)
            run("speculative", dtype, prompt)
    best = {kind: max(DTYPES, key=lambda dtype: rate(kind, dtype)) for kind in ("plain", "speculative")}
    for kind, dtype in best.items():
        rates = ", ".join(f"{d} {rate(kind, d):.1f}" for d in DTYPES)
        print(f"{kind}: {rates} tokens/s on {min(TRIAL_PROMPTS, len(encoded))} prompts; timing {dtype}")
    best["useless"] = best["speculative"]
    if widths is not None:
        best |= {"adaptive speculative": best["speculative"], "adaptive useless": best["speculative"]}
    same = beyond = 0
    for index, prompt in enumerate(tqdm(encoded, unit="prompt", desc="timing")):
        for kind, dtype in best.items():
            wanted = min(index + 1, TRIAL_PROMPTS) if "useless" in kind else index + 1  # its rounds are all alike
            if len(runs.get((kind, dtype), ())) < wanted:
                run(kind, dtype, prompt)
        fast = runs["speculative", best["speculative"]][index]
        plain = runs["plain", best["plain"]][index]
        if best["plain"] != best["speculative"]:  # what the text is compared with has the dtype of the text
            plain = time_decoding(targets[best["speculative"]], None, prompt, options)
        parted = first_divergence(target, prompt, plain.tokens, fast.tokens, options.temperature, options.seed)
        same += parted is None
        cut = options.temperature > 0 and (options.top_k > 0 or options.top_p < 1 or options.min_p > 0)
        beyond += parted is not None and not parted.near_tie and not cut  # what was cut in one pass only has no margin
    plain_rate, fast_rate = rate("plain", best["plain"]), rate("speculative", best["speculative"])
    wasted = runs["useless", best["useless"]]
    round_seconds = sum(t.seconds for t in wasted) / max(sum(t.rounds for t in wasted), 1)
    result = {
        "plain_tokens_per_second": round(plain_rate, 2),
        "plain_dtype": best["plain"],
        "tokens_per_second": round(fast_rate, 2),
        "dtype": best["speculative"],
        "speedup": round(fast_rate / max(plain_rate, 1e-9), 4),
        "break_even_acceptance_length": round(round_seconds * rate("plain", best["plain"], TRIAL_PROMPTS), 4),
        "identical_timed": round(same / max(len(encoded), 1), 4),
        "diverged_beyond_rounding": beyond,
        "timed_prompts": len(encoded),
    }
    if rule_of(options) != "match":
        result |= {"identical_timed": None, "diverged_beyond_rounding": None}
    if widths is not None:
        result["adaptive_speedup"] = round(rate("adaptive speculative", best["speculative"]) / max(plain_rate, 1e-9), 4)
        plain_trial = max(rate("plain", best["plain"], TRIAL_PROMPTS), 1e-9)
        result["adaptive_speedup_of_a_useless_drafter"] = round(rate("adaptive useless", best["useless"]) / plain_trial, 4)
    return result
