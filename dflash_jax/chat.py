"""Answers in the terminal: streamed, with acceptance and speed, and side by side with plain decoding on request."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from dflash_jax.audit import ALARM, Audit
from dflash_jax.config import Config, DecodeConfig
from dflash_jax.divergence import first_divergence
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError, PromptError
from dflash_jax.generate import Generation, compiled, rule_of, start, stream
from dflash_jax.hf import load_drafter, load_text_target
from dflash_jax.targets import DenseTarget
from dflash_jax.tokenizer import StreamDecoder
from dflash_jax.widths import WidthTable

OTHER_SAMPLE = "another sample"


class Answer(NamedTuple):
    """One streamed answer."""

    tokens: list[int]
    seconds: float
    """from the request to the last token, compilation apart"""
    acceptance_length: float
    audit: Audit | None


def answer_prompts(config: Config, prompts: Sequence[str], compare: bool) -> int:
    """Stream each answer, then print acceptance and speed; `compare` adds plain decoding's and whether the texts agree."""
    if any(not prompt.strip() for prompt in prompts):
        raise PromptError("--prompt is empty: give some text")
    target = load_text_target(config.target.path, dtype=config.target.dtype)
    drafter = load_drafter(config.drafter.path, target) if config.drafter.path is not None else None
    if compare and drafter is None:
        raise ConfigError("--compare needs drafter.path: name the drafter to compare with plain decoding")
    lines, faults, audits = [], [], []
    for prompt in prompts:
        tokens = target.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        print(f"\n> {prompt}\n", flush=True)
        fast = _answer(target, drafter, tokens, config.decode, show=True)
        speed = len(fast.tokens) / fast.seconds
        line = [_shorten(prompt), str(len(fast.tokens)), f"{fast.acceptance_length:.2f}", f"{speed:.1f}"]
        if compare:
            plain = _answer(target, None, tokens, dataclasses.replace(config.decode, block_size=None), show=False)
            plain_speed = len(plain.tokens) / plain.seconds
            same, fault = _compared(target, tokens, plain.tokens, fast.tokens, config)
            faults += [fault] if fault else []
            line += [f"{plain_speed:.1f}", f"{speed / plain_speed:.2f}x", same]
        lines.append(line)
        audits += [fast.audit] if fast.audit is not None else []
    header = ["prompt", "tokens", "tau", "tokens/s"] + (["plain tokens/s", "speedup", "same text"] if compare else [])
    _print_table(header, lines)
    if compare and any(line[-1] == OTHER_SAMPLE for line in lines):
        print(f"decode.verify {rule_of(config.decode)} gives another sample of the same law; match gives the same text.")
    elif compare and any(line[-1] != "yes" for line in lines) and not faults:
        print("In bfloat16 a near-tie of the target can fall differently in a wide pass. --target.dtype float32 is exact.")
    for prompt, audit in zip(prompts, audits, strict=False):
        found = f"|z| above {ALARM:g}: the text does not follow the target's law" if audit.alarming else "as it should be"
        said = f"z {audit.z:.2f} over {audit.tokens} tokens, {found}" if audit.tokens else "no sampled token had a drafter's law"
        print(f"audit of {_shorten(prompt)}: {said}")
    for fault in dict.fromkeys(faults):
        print(f"error: {fault}: please report this prompt", file=sys.stderr)
    return 1 if faults else 0


def _compared(target: DenseTarget, prompt: list[int], plain: list[int], fast: list[int], config: Config) -> tuple[str, str | None]:
    """Whether two texts are the same, in words, and what is wrong if they should be."""
    options = config.decode
    if rule_of(options) != "match":
        return OTHER_SAMPLE, None
    apart = first_divergence(target, prompt, plain, fast, options.temperature, options.seed)
    if apart is None:
        return "yes", None
    if config.target.dtype == "float32":
        return f"no, from token {apart.token} on", "float32 texts must be equal"
    if options.temperature > 0 and (options.top_k > 0 or options.top_p < 1 or options.min_p > 0):
        return f"no, from token {apart.token} on", None  # a token may have been cut in one pass only: no margin says that
    same = f"no, from token {apart.token} on, margin {apart.margin:.3f}"
    fault = f"the texts part by a margin of {apart.margin:.3f}; bfloat16 explains {apart.bound:.3f} at most"
    return same, None if apart.near_tie else fault


def _answer(target: DenseTarget, drafter: Drafter | None, prompt: list[int], config: DecodeConfig, show: bool) -> Answer:
    state, _ = start(target, drafter, [prompt], config)  # compiles
    compiled(target, drafter, state, rule_of(config), WidthTable(config.widths) if config.widths is not None else None)
    text = StreamDecoder(target.tokenizer)
    before = time.perf_counter()
    for piece in stream(target, drafter, prompt, config):
        if isinstance(piece, Generation):
            seconds = time.perf_counter() - before
            if show:
                print(text.flush(), flush=True)
            return Answer(piece.tokens[0], seconds, piece.stats.acceptance_length, piece.stats.audit)
        if show:
            print(text.push(piece), end="", flush=True)
    raise AssertionError("a stream ends with its Generation")


def _shorten(text: str, width: int = 40) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= width else one_line[: width - 3] + "..."


def _print_table(header: list[str], lines: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *lines]) for i in range(len(header))]
    print()
    for row in [header, ["-" * width for width in widths], *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
