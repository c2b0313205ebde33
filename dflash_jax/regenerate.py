"""Training text: the target answers prompts (paper, section 4: drafters learn from the target's own answers)."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from dflash_jax.config import DecodeConfig
from dflash_jax.conversations import read_jsonl
from dflash_jax.decode import DecodeState, decode, prefill_lengths
from dflash_jax.errors import ConfigError, DataError, PromptError, named
from dflash_jax.generate import start
from dflash_jax.lock import only_process
from dflash_jax.prompts import Prompt
from dflash_jax.sampling import sampling_rows
from dflash_jax.targets import Target

_LINE_START = b'{"id": '
ROUNDS = 8
"""tokens decoded between looks at which rows are done"""
REFILL_SHARE = 8
"""an eighth of the batch is filled again at once: one small prefill, few rows that wait"""


def regenerate(
    target: Target, prompts: Sequence[Prompt], out: str | Path, config: DecodeConfig, batch_size: int, target_name: str = ""
) -> int:
    """Answer every turn of every prompt and append one JSON line each to `out`; prompts already answered there are skipped.

    Lines hold id, set, messages, answer_tokens (the ids of the last answer, stop token included), finish_reason and decode (the
    settings and `target_name`; a run with others is refused, so that a file holds one kind of answers). A line is written when its
    prompt is done, so a kill loses only what was being decoded; a line cut by a kill is removed first. Prompts that do not fit the
    target's context are counted and reported. Returns how many lines were written.
    """
    out = Path(out)
    config = dataclasses.replace(config, block_size=None)  # no drafter: a wide pass would only cost
    twice = next((name for name, count in Counter(prompt["id"] for prompt in prompts).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"two prompts are called {twice}: give each its own id, or a finished one could hide the other")
    room = target.config.max_position - config.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{target.config.max_position} tokens: lower it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()
    with only_process(out):
        return _regenerate(target, prompts, out, config, batch_size, room, _settings(config) | {"target": target_name})


def _regenerate(
    target: Target, prompts: Sequence[Prompt], out: Path, config: DecodeConfig, batch_size: int, room: int, settings: dict[str, Any]
) -> int:
    done = _finished(out, settings)
    for prompt in prompts:
        first = [*_Conversation(prompt).messages, {"role": "user", "content": prompt["turns"][0]}]
        if prompt["id"] in done and done[prompt["id"]][: len(first)] != first:
            raise DataError(f"{out}: its answer to {prompt['id']} is to another prompt of that id: give another output file")
    waiting = [_Conversation(prompt) for prompt in prompts if prompt["id"] not in done]
    too_long, written = 0, 0
    with (
        named(out),
        open(out, "a", encoding="utf-8") as file,
        tqdm(total=len(prompts), initial=len(prompts) - len(waiting), unit="prompt") as bar,
    ):
        while waiting:
            fitting = [c for c in waiting if c.encode(target) <= room]
            too_long += len(waiting) - len(fitting)
            bar.update(len(waiting) - len(fitting))
            waiting = []  # all turns k come before turns k + 1
            for group in _same_shape(fitting, config.max_new_tokens):
                for conversation, answer in _answer(target, group, config, batch_size):
                    if conversation.take(target, answer):
                        file.write(conversation.line(target, answer, settings) + "\n")
                        file.flush()
                        written += 1
                        bar.update()
                    else:
                        waiting.append(conversation)
        os.fsync(file.fileno())
    if too_long:
        print(f"{too_long} prompts left out: longer than {room} tokens (context {target.config.max_position} - max_new_tokens)")
    return written


class _Conversation:
    """A prompt on its way: the messages so far and the turns still to come."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.turns = list(prompt["turns"])
        self.messages: list[dict[str, str]] = [{"role": "system", "content": prompt["system"]}] if "system" in prompt else []
        self.tokens: list[int] = []

    def encode(self, target: Target) -> int:
        """Append the next user turn and encode; returns the length in tokens."""
        self.messages.append({"role": "user", "content": self.turns.pop(0)})
        try:
            self.tokens = target.tokenizer.encode_chat(self.messages)
        except PromptError as error:
            raise PromptError(f"prompt {self.prompt['id']}: {error}") from None
        return len(self.tokens)

    def seed(self, run_seed: int) -> int:
        """What this turn is sampled with: its own, so that batches and resumed runs cannot change or repeat a draw."""
        name = f"{run_seed}/{self.prompt['id']}/{len(self.messages)}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])

    def take(self, target: Target, answer: list[int]) -> bool:
        """Append an answer; True when no turn is left. One cut by the length cap ends the conversation: nobody answers a torso."""
        self.messages.append({"role": "assistant", "content": target.tokenizer.decode(answer)})
        return not self.turns or answer[-1] not in target.config.stop_token_ids

    def line(self, target: Target, answer: list[int], settings: dict[str, Any]) -> str:
        reason = "stop" if answer[-1] in target.config.stop_token_ids else "length"
        row = {"id": self.prompt["id"], "set": self.prompt["set"], "messages": self.messages}  # id first: _LINE_START
        return json.dumps(row | {"answer_tokens": answer, "finish_reason": reason, "decode": settings}, ensure_ascii=False)


def _settings(config: DecodeConfig) -> dict[str, Any]:
    """What decides the answers: a greedy one depends on its length cap alone."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed") if config.temperature else ("max_new_tokens",)
    return {name: getattr(config, name) for name in names}


def _answer(target: Target, waiting: list[_Conversation], config: DecodeConfig, batch_size: int) -> Iterator[Any]:
    """Yield (conversation, answer token ids) as rows finish. Rows that are done take the next prompts, so the batch stays full.

    All prompts have the same padded length and capacity (`_same_shape`), so few programs are compiled, whatever their number is.
    """
    refill = 1 << (max(1, batch_size // REFILL_SHARE).bit_length() - 1)  # a power of two, as `start` pads: it must fit free rows
    waiting = waiting[::-1]
    rows: list[_Conversation | None] = []
    state: DecodeState | None = None
    while waiting or any(rows):
        free = [place for place, row in enumerate(rows) if row is None]
        while waiting and (state is None or len(free) >= refill):
            chosen = [waiting.pop() for _ in range(min(len(waiting), batch_size if state is None else refill))]
            own = sampling_rows(len(chosen), config.temperature, config.top_k, config.top_p, config.min_p)
            own = own._replace(seed_B=jnp.asarray([c.seed(config.seed) for c in chosen], jnp.uint32))
            fresh, _ = start(target, None, [c.tokens for c in chosen], config, sampling=own)
            spare = fresh.done_B.shape[0] - len(chosen)
            if state is None:
                state, rows = fresh, [*chosen, *[None] * spare]
            else:  # spare rows of the refill are done, so they may lie on rows that are free
                places, free = free[: fresh.done_B.shape[0]], free[len(chosen) :]
                state = _put_rows(state, fresh, jnp.asarray(places, jnp.int32))
                for place, conversation in zip(places, chosen, strict=False):
                    rows[place] = conversation
        assert state is not None
        state = decode(target.params, (), state, jnp.int32(ROUNDS), target=target, drafter=None)
        # whole arrays: a slice on the device would be compiled for every length of an answer
        done_B, length_B, tokens_BL = jax.device_get((state.done_B, state.length_B, state.tokens_BL))
        for place, row in enumerate(rows):
            if row is not None and done_B[place]:
                yield row, tokens_BL[place, len(row.tokens) : length_B[place]].tolist()
                rows[place] = None


def _same_shape(conversations: list[_Conversation], max_new_tokens: int) -> list[list[_Conversation]]:
    """Groups of equal padded prompt length and cache capacity, short ones first."""

    def shape(conversation: _Conversation) -> tuple[int, int]:
        return prefill_lengths([len(conversation.tokens)], max_new_tokens, 1)

    return [list(group) for _, group in groupby(sorted(conversations, key=shape), key=shape)]


@partial(jax.jit, donate_argnums=0)
def _put_rows(state: DecodeState, fresh: DecodeState, places_R: jax.Array) -> DecodeState:
    """Rows of `fresh` in place of the rows `places_R` of `state`."""
    return jax.tree.map(lambda x, y: x.at[places_R].set(y), state, fresh)


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Messages of the answered prompts by id. A last line without its newline is what a kill left behind, and is removed, but only
    when it begins as our lines do: the file of somebody else is left as it is. Lines that do not say how they were decoded pass."""
    if not out.exists() or out.stat().st_size == 0:
        return {}
    content = out.read_bytes()
    whole = content.rfind(b"\n") + 1
    done = {}

    def add(row: dict[str, Any], where: str) -> None:
        if row.get("decode", settings) != settings:
            raise ConfigError(f"{where}: an answer decoded with {row['decode']}, not with {settings}: give another output file")
        done[row["id"]] = row["messages"]

    for number, row in read_jsonl(out, whole) if whole else ():
        if not isinstance(row.get("id"), str) or not isinstance(row.get("messages"), list):
            raise DataError(f"{out}:{number}: not a line that regenerate wrote: give another output file")
        add(row, f"{out}:{number}")
    cut = content[whole:]
    last: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        last = json.loads(cut)
    if (
        isinstance(last, dict) and isinstance(last.get("id"), str) and isinstance(last.get("messages"), list)
    ):  # a whole line only lacks its newline
        add(last, f"{out}: its last line")
        with open(out, "ab") as end:
            end.write(b"\n")
        return done
    if last is not None or not (cut.startswith(_LINE_START) or _LINE_START.startswith(cut)):
        raise DataError(f"{out}: its last line is not one that regenerate wrote: give another output file")
    if cut:
        with open(out, "rb+") as file:
            file.truncate(whole)
    return done
