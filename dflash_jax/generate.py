"""`generate`: token ids in, token ids and acceptance statistics out."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.audit import Audit, begin, result
from dflash_jax.config import DecodeConfig, Rule
from dflash_jax.decode import DecodeState, decode, prefill, prefill_lengths
from dflash_jax.drafter import Drafter, check_drafter_fits
from dflash_jax.errors import ConfigError, PromptError
from dflash_jax.sampling import PerRow, Sampling, sampling_rows
from dflash_jax.targets import Target
from dflash_jax.widths import WidthPolicy, WidthTable, decode_by

STREAM_ROUNDS = 4
STOP_SLOTS = 8
"""room for stop tokens comes in multiples of this: few compilations"""
NO_LIMIT = 2**31 - 1
DEFAULT_RULE: Rule = "block"
"""emitted most tokens a round where it was measured (docs/log.md, 2026-11-30)"""


@dataclass(frozen=True)
class AcceptanceStats:
    """Acceptance of one row, or of all rows together (pooled). The prefill token counts nowhere; only emitted tokens count."""

    rounds: int
    """verify passes"""
    drafted: int
    """drafted tokens: one less than the block's width a round"""
    accepted: int
    """drafted tokens that were emitted"""
    emitted: int
    """tokens emitted by verify passes"""
    accepted_histogram: tuple[int, ...]
    """rounds that emitted exactly 0, 1, ... K-1 drafted tokens"""

    @property
    def acceptance_length(self) -> float:
        """tau: tokens emitted a verify pass, bonus token included; nan without a pass."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """Share of the rounds in which slot 1, 2, ... K-1 was emitted (unconditional, so it only falls)."""
        at_least = np.cumsum(self.accepted_histogram[::-1])[::-1][1:]
        return tuple(float(x) / self.rounds if self.rounds else float("nan") for x in at_least)


@dataclass(frozen=True)
class GenerationStats:
    """Acceptance a row, pooled, and the macro mean of acceptance lengths over rows that had a verify pass."""

    rows: list[AcceptanceStats]
    pooled: AcceptanceStats
    audit: Audit | None = None
    """of a run with `audit`"""

    @property
    def acceptance_length(self) -> float:
        """Pooled tau."""
        return self.pooled.acceptance_length

    @property
    def acceptance_length_macro(self) -> float:
        """Mean of the rows' tau."""
        taus = [row.acceptance_length for row in self.rows if row.rounds]
        return float(np.mean(taus)) if taus else float("nan")


@dataclass(frozen=True)
class Generation:
    """What `generate` returns."""

    tokens: list[list[int]]
    """new tokens only, the stop token included"""
    finish_reason: list[Literal["stop", "length"]]
    stats: GenerationStats


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    temperature: PerRow = 0.0,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    seed: PerRow = 0,
    stop_token_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    verify: Rule | None = None,
    audit: bool = False,
    widths: WidthTable | None = None,
) -> Generation:
    """Decode a batch of prompts (lists of token ids). The tokens are the target's own whatever the drafter is.

    `temperature`, `top_k`, `top_p`, `min_p` and `seed` are one number, or one a prompt (a list or an array): greedy and sampled
    rows mix, and a row's text does not depend on the others. With one `seed`, row r draws with `seed + r`.

    `drafter` None decodes plainly; then `block_size` K makes every pass K slots wide, of which only the first counts: slow, but
    in bfloat16 too the very text of speculative decoding with that block size and batch. Else `block_size` goes up to the trained
    one; None takes that. `stop_token_ids` None takes the target's.

    `verify`: "match", the target's own draw must equal the draft, so that sampled text is plain decoding's token for token;
    "rejection" or "block" (the default, in the fewest passes), drafts are drawn too and judged by both laws: another sample of the
    same law. Greedy rows have one rule, and plain decoding's text. `audit` checks while it runs that sampled tokens follow the
    target's law (`stats.audit`): |z| > 4 says that they do not.

    `widths`: a table of what rounds cost here; then each few rounds take the width up to `block_size` that pays for the acceptance
    seen, plain decoding if none does. Without one every round has `block_size` slots. Under "rejection" and "block" the
    ends of rounds decide which sample comes out, so a seed gives the same text only without `widths`.

    An answer that reaches the target's context length ends with "length". Raises `PromptError` or `ConfigError` for unusable input.
    """
    sampling = sampling_rows(len(prompts), temperature, top_k, top_p, min_p, seed)
    warmest = max(np.asarray(sampling.temperature_B).tolist(), default=0.0)
    options = DecodeConfig(max_new_tokens, warmest, block_size=block_size, verify=verify, audit=audit)
    rule = rule_of(options)
    state, lengths = start(target, drafter, prompts, options, stop_token_ids, sampling)
    advance = advancing(target, drafter, state, rule, widths)
    while not bool(state.done_B.all()):
        state = advance(state, NO_LIMIT)
    return finish(state, lengths, audit)


def stream(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    options: DecodeConfig,
    stop_token_ids: Sequence[int] | None = None,
) -> Iterator[list[int] | Generation]:
    """Decode one prompt in chunks of a few rounds: yields new token ids as they are committed, then the `Generation`."""
    state, lengths = start(target, drafter, [prompt], options, stop_token_ids)
    advance = advancing(target, drafter, state, rule_of(options), WidthTable(options.widths) if options.widths else None)
    sent = lengths[0]
    while True:
        length, done = int(state.length_B[0]), bool(state.done_B[0])
        if length > sent:
            # the whole row: a slice on the device would be compiled for every length of a piece
            yield jax.device_get(state.tokens_BL)[0, sent:length].tolist()
        if done:
            break
        sent = length
        state = advance(state, STREAM_ROUNDS)
    yield finish(state, lengths, options.audit)


def advancing(
    target: Target, drafter: Drafter | None, state: DecodeState, rule: Rule, widths: WidthTable | None
) -> Callable[[DecodeState, int], DecodeState]:
    """The step of a decode loop: takes a state like this one and decodes at most so many rounds, of the width that pays if there is
    a table of widths. Raises `ConfigError` where the table does not suit."""
    if drafter is None or widths is None:
        params = (target.params, drafter.params if drafter is not None else ())
        models: Any = {"target": target, "drafter": drafter, "rule": _rule_of_program(drafter, rule), "width": None}
        return lambda state, rounds: decode(*params, state, jnp.int32(rounds), **models)
    if not isinstance(widths, WidthTable):
        raise ConfigError(f"widths is {widths!r}: give a WidthTable, as in widths=dflash_jax.WidthTable('widths.json')")
    if state.audit is not None:
        raise ConfigError("an audit needs blocks of one width: leave out audit or widths")
    policy = WidthPolicy(widths.costs(target, drafter, state, rule), state.accepted_BK.shape[1])
    return lambda state, rounds: decode_by(policy, target, drafter, state, rule, rounds)


def compiled(target: Target, drafter: Drafter | None, state: DecodeState, rule: Rule, widths: WidthTable | None) -> DecodeState:
    """The state as it is, once every program that `advancing` calls has been compiled: what is timed afterwards is decoding."""
    params = (target.params, drafter.params if drafter is not None else ())
    rule = _rule_of_program(drafter, rule)
    chosen: list[int | None] = [None]
    if drafter is not None and widths is not None:
        chosen = list(widths.costs(target, drafter, state, rule))
    for width in chosen:
        state = decode(*params, state, jnp.int32(0), target=target, drafter=drafter, rule=rule, width=width)
    return jax.block_until_ready(state)


def _rule_of_program(drafter: Drafter | None, rule: Rule) -> Rule:
    """Plain decoding drafts nothing, so no rule changes its program: it is compiled once for all."""
    return rule if drafter is not None else "match"


def rule_of(options: DecodeConfig) -> Rule:
    """The rule by which drafts stand: greedy rows have one. Raises `ConfigError`."""
    if options.verify not in (None, *get_args(Rule)):
        raise ConfigError(f"verify {options.verify!r} is unknown: give one of {', '.join(get_args(Rule))}")
    return "match" if options.temperature == 0 else options.verify or DEFAULT_RULE


def start(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    options: DecodeConfig,
    stop_token_ids: Sequence[int] | None = None,
    sampling: Sampling | None = None,
) -> tuple[DecodeState, list[int]]:
    """Check the input of `generate` and prefill: the state after the first token, and the prompt lengths.

    `sampling`: the parameters of each prompt's row, instead of those of `options`.
    """
    max_new_tokens = check_whole("max_new_tokens", options.max_new_tokens)
    block_size = check_block_size(target, drafter, options.block_size)
    lengths = check_prompts(target, prompts)
    room = target.config.max_position - max(lengths)
    padded, capacity = prefill_lengths(lengths, min(max_new_tokens, room), block_size)
    batch = 1 << (len(prompts) - 1).bit_length()  # spare rows repeat the first prompt and are done from the start
    tokens_BT = np.zeros((batch, padded), np.int32)
    lengths_B = np.full((batch,), lengths[0], np.int32)
    end_B = np.full((batch,), lengths[0] + 1, np.int32)
    tokens_BT[:, : lengths[0]] = np.asarray(prompts[0], np.int32)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        tokens_BT[row] = 0
        tokens_BT[row, :length] = np.asarray(prompt, np.int32)
        lengths_B[row], end_B[row] = length, min(length + max_new_tokens, target.config.max_position)
    stops = check_stop_tokens(target, stop_token_ids)
    stops_S = np.asarray(stops + [-1] * (-len(stops) % STOP_SLOTS or (0 if stops else STOP_SLOTS)), np.int32)
    if sampling is None:
        own = (options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
        sampling = sampling_rows(len(prompts), *own)
    sampled = bool(np.any(np.asarray(sampling.temperature_B) > 0))
    own_B = [*range(len(prompts)), *[0] * (batch - len(prompts))]
    state = prefill(
        target.params,
        drafter.params if drafter is not None else (),
        jnp.asarray(tokens_BT),
        jnp.asarray(lengths_B),
        jnp.asarray(end_B),
        jnp.asarray(np.tile(stops_S, (batch, 1))),
        Sampling(*(jnp.asarray(np.asarray(column)[own_B]) for column in sampling)) if sampled else None,
        target=target,
        drafter=drafter,
        block_size=block_size,
        capacity=capacity,
    )
    if options.audit and sampled and drafter is not None:
        state = state._replace(audit=begin(batch, block_size, target.config.vocab_size))
    return state, lengths


def finish(state: DecodeState, prompt_lengths: list[int], audit: bool = False) -> Generation:
    """Read a finished state back from the device."""
    tokens_BL, length_B, stops_BS, rounds_B, drafted_B, accepted_BK = jax.device_get(
        (state.tokens_BL, state.length_B, state.stops_BS, state.rounds_B, state.drafted_B, state.accepted_BK)
    )
    slots_K = np.arange(accepted_BK.shape[1])
    tokens: list[list[int]] = []
    reasons: list[Literal["stop", "length"]] = []
    rows: list[AcceptanceStats] = []
    for row, prompt_length in enumerate(prompt_lengths):
        new = tokens_BL[row, prompt_length : length_B[row]].tolist()
        tokens.append(new)
        reasons.append("stop" if new[-1] in stops_BS[row] else "length")
        rounds, histogram = int(rounds_B[row]), accepted_BK[row]
        accepted = int((histogram * slots_K).sum())
        counts = (rounds, int(drafted_B[row]), accepted, len(new) - 1)
        rows.append(AcceptanceStats(*counts, tuple(int(x) for x in histogram)))
    audited = result(state.audit, state.sampling.temperature_B if state.sampling is not None else None) if audit else None
    return Generation(tokens, reasons, GenerationStats(rows, pool(rows), audited))


def pool(rows: Sequence[AcceptanceStats]) -> AcceptanceStats:
    """All rows as one."""
    slots = max((len(row.accepted_histogram) for row in rows), default=1)
    histogram = np.zeros(slots, int)
    for row in rows:
        histogram[: len(row.accepted_histogram)] += row.accepted_histogram
    return AcceptanceStats(
        sum(row.rounds for row in rows),
        sum(row.drafted for row in rows),
        sum(row.accepted for row in rows),
        sum(row.emitted for row in rows),
        tuple(int(x) for x in histogram),
    )


def check_block_size(target: Target, drafter: Drafter | None, block_size: int | None) -> int:
    """Slots a block while decoding. Raises `ConfigError` for a size or a target that the drafter was not made for."""
    block_size = None if block_size is None else check_whole("block_size", block_size)
    if drafter is None:
        width, longest = 1 if block_size is None else block_size, target.config.max_position
        if not 1 <= width <= longest:
            raise ConfigError(f"block_size is {width}: without a drafter it is the width of a pass, 1..{longest} slots")
        return width
    trained = drafter.config.block_size
    size = trained if block_size is None else block_size
    if not 2 <= size <= trained:
        raise ConfigError(f"block_size is {size}: this drafter was trained for blocks of 2..{trained} slots")
    check_drafter_fits(drafter.config, target.config)
    return size


def check_whole(name: str, number: Any, least: int = 1) -> int:
    """The number as a Python int: narrow numpy ones overflow when one counts with them. Raises `ConfigError`."""
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least:
        raise ConfigError(f"{name} is {number!r}: give a whole number, {least} or more")
    return int(number)


def check_stop_tokens(target: Target, ids: Any) -> list[int]:
    """Stop tokens, each once; None takes the target's. Raises `ConfigError` for what are no token ids."""
    if ids is None:
        return sorted(set(target.config.stop_token_ids))
    vocab = target.config.vocab_size
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (Collection, np.ndarray, jax.Array)):
        raise ConfigError(f"stop_token_ids is {ids!r}: give a list of token ids")
    each = np.asarray(ids).reshape(-1).tolist() if isinstance(ids, (np.ndarray, jax.Array)) else list(ids)
    for token in each:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocab:
            raise ConfigError(f"the stop token {token!r} is no token id: ids lie in 0..{vocab - 1}")
    return sorted({int(token) for token in each})


def _mend(prompt: Any, ids: np.ndarray) -> str:
    if isinstance(prompt, (str, bytes)):
        return "it is text; give target.tokenizer.encode_chat([{'role': 'user', 'content': TEXT}])"
    if ids.ndim == 0:
        return "it is a single number; give a list of prompts, [prompt] for one"
    return "give what target.tokenizer.encode_chat returns, one list of whole numbers a prompt"


def check_prompts(target: Target, prompts: Sequence[Any]) -> list[int]:
    """The prompts' lengths. Raises `PromptError` for one that cannot be decoded."""
    if len(prompts) == 0:
        raise PromptError("there is no prompt: give at least one list of token ids")
    vocab, longest = target.config.vocab_size, target.config.max_position - 1
    for row, prompt in enumerate(prompts):
        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists within lists
            ids = np.zeros((0, 0))
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise PromptError(f"prompt {row} is not a list of token ids: {_mend(prompt, ids)}")
        if len(prompt) == 0:
            raise PromptError(f"prompt {row} is empty: give at least one token id")
        if len(prompt) > longest:
            raise PromptError(
                f"prompt {row} has {len(prompt)} tokens; the context has room for {longest} and one answer token: shorten it"
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocab:
            raise PromptError(f"prompt {row} holds the token id {low if low < 0 else high}: ids lie in 0..{vocab - 1}")
    return [len(prompt) for prompt in prompts]
