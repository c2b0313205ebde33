"""Continuous decoding: requests come and go while a fixed batch of rows decodes on the device.

A slot is a row of one `DecodeState` that never leaves the device. A step reads at most one piece of one prompt and then decodes
every live row for a few rounds, so a long prompt holds the others up by one piece at a time. What a request gets does not depend on
its neighbours, its slot or the time. Prompts that begin like an earlier text take its caches, the target's and the drafter's alike.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.audit import Audit, judged
from dflash_jax.config import DecodeConfig, Rule
from dflash_jax.decode import decode
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError, EngineError, PromptError
from dflash_jax.generate import (
    STOP_SLOTS,
    AcceptanceStats,
    check_block_size,
    check_prompts,
    check_stop_tokens,
    check_whole,
    rule_of,
)
from dflash_jax.request import Request, check_stop_strings
from dflash_jax.rows import Chunk, Report, empty_state, freeze, prefill_chunk, report
from dflash_jax.sampling import sampling_rows
from dflash_jax.slots import Slot
from dflash_jax.targets import Target
from dflash_jax.widths import WidthPolicy, WidthTable

SMALLEST_CHUNK = 16


class Engine:
    """Decodes requests of one target, with a drafter or plainly, in up to `max_batch` rows at once.

        engine = Engine(target, drafter)
        request = engine.submit(prompt_ids, max_new_tokens=100)
        for token_ids in request.stream(): ...      # or engine.run(), or engine.step() in a thread of its own

    `submit`, `Request.cancel` and reading a request are safe from any thread. Tokens equal `generate`'s for the same arguments.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        max_batch: int = 8,
        max_len: int = 2048,
        rounds_per_step: int = 4,
        prefill_chunk: int = 256,
        verify: Rule | None = None,
        block_size: int | None = None,
        reuse_prefixes: bool = True,
        widths: WidthTable | None = None,
        audit: bool = False,
    ) -> None:
        """`max_len`: most tokens of a prompt and its answer together; the target's context length if that is less.

        `rounds_per_step`: passes of the target between two looks at the rows. `prefill_chunk`: most prompt tokens a step reads.
        `verify` and `block_size` as in `generate`. `reuse_prefixes`: a prompt that begins like a text that a row still holds takes
        its caches (greedy and `match` tokens stay the same but for near-ties, because chunks fall elsewhere). `widths`: what rounds
        cost here; each step then takes the width up to `block_size` that pays for what the rows accept together (so samples of
        "rejection" and "block" then depend on the neighbours; greedy and "match" tokens never do). `audit` checks while it runs
        that sampled tokens follow the target's law: `Request.audit`, and `Engine.audit` of all. Raises `ConfigError`.
        """
        max_batch, prefill_chunk = check_whole("max_batch", max_batch), check_whole("prefill_chunk", prefill_chunk)
        rounds_per_step, max_len = check_whole("rounds_per_step", rounds_per_step), check_whole("max_len", max_len, 2)
        self.target, self.drafter = target, drafter
        self.max_len = min(max_len, target.config.max_position)
        self._rule = rule_of(DecodeConfig(temperature=1.0, verify=verify))
        self._block_size = check_block_size(target, drafter, block_size)
        self._stop_slots = -(-max(len(target.config.stop_token_ids), 1) // STOP_SLOTS) * STOP_SLOTS
        self._rounds = min(rounds_per_step, self.max_len)  # no row has more
        # most tokens that a row gets in a step: its first one, then blocks
        self._news = min(1 + self._rounds * self._block_size, self.max_len)
        self._chunk = prefill_chunk
        self._reuse = reuse_prefixes
        capacity = -(-(self.max_len + self._block_size) // 128) * 128
        self._state = empty_state(
            target, drafter, max_batch, capacity, self._block_size, self._stop_slots, audit and drafter is not None
        )
        self._audit_sums = (0.0, 0.0, 0.0)
        self._policy: WidthPolicy | None = None
        if widths is not None and not isinstance(widths, WidthTable):
            raise ConfigError(f"widths is {widths!r}: give a WidthTable, as in widths=dflash_jax.WidthTable('widths.json')")
        if audit and widths is not None:
            raise ConfigError("an audit needs blocks of one width: leave out audit or widths")
        if drafter is not None and widths is not None:
            self._policy = WidthPolicy(widths.costs(target, drafter, self._state, self._rule), self._block_size)
        self._width: int | None = None
        """of the last rounds; None: the whole block"""
        self._slots = [Slot(row) for row in range(max_batch)]
        self._waiting: deque[Request] = deque()
        self._queue_lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._stepped = threading.Condition()
        self._steps = 0
        """steps that are over; changes after the step's lock is free, so who finds the lock taken will see a change"""
        self._clock = 0
        self._unread = False
        """the device has gone on since the host last looked"""
        self._in_books = False
        """the host is writing things down: an interrupt would leave half of them"""
        self._broken: BaseException | None = None

    def submit(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 256,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop_token_ids: Collection[int] | None = None,
        stop: str | Collection[str] | None = None,
    ) -> Request:
        """Put a prompt (token ids) in the queue and return at once. Sampling arguments as in `generate`.

        `stop_token_ids` None takes the target's. `stop`: strings; the answer's tokens end with the first that completes one, its
        text ends before it. An answer that fills `max_len` ends with "length". Raises `PromptError` or `ConfigError` for anything
        that cannot be decoded, `EngineError` when the engine broke.
        """
        self._check_works()
        length = check_prompts(self.target, [prompt_ids])[0]
        if length + 1 > self.max_len:
            raise PromptError(
                f"the prompt has {length} tokens and the engine room for {self.max_len}, an answer token included: shorten it, or "
                f"give a larger max_len (the target's context has {self.target.config.max_position})"
            )
        max_new_tokens = check_whole("max_new_tokens", max_new_tokens)
        shares: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
        for name, number in shares.items():
            if not isinstance(number, Real):
                raise ConfigError(f"{name} is {number!r}: give a number")
        for name, number in {"top_k": top_k, "seed": seed}.items():
            check_whole(name, number, 0)
        request = Request(
            prompt=[int(token) for token in prompt_ids],
            max_length=min(length + max_new_tokens, self.max_len),
            sampling=sampling_rows(1, temperature, top_k, top_p, min_p, seed),
            stop_token_ids=self._check_stop_tokens(stop_token_ids),
            stop=check_stop_strings(self.target.tokenizer, stop),
            tokenizer=self.target.tokenizer,
            advance=self._advance,
        )
        with self._queue_lock:
            self._waiting.append(request)
        return request

    def step(self) -> bool:
        """Read one piece of a waiting prompt, decode all live rows a few rounds and look at what came; False when idle.

        A KeyboardInterrupt leaves the engine usable unless it took the state away or came while the host was writing down what it
        saw; then, and after any other error, the engine is broken, says so in every later call, and must be made anew.
        """
        self._step_lock.acquire()
        return self._step_and_unlock()

    def run(self) -> list[Request]:
        """Step until idle; returns the requests that were unfinished before, in the order in which they were submitted."""
        with self._step_lock, self._queue_lock:
            requests = [*self._waiting, *(slot.request for slot in self._slots if slot.request is not None)]
        while self.step():
            pass
        return sorted(requests, key=lambda request: request.id)

    @property
    def audit(self) -> Audit:
        """Of an engine with `audit`: whether the sampled requests that have ended follow the target's law, all together."""
        return judged(*self._audit_sums)

    def _advance(self, after: int | None) -> int:
        """For `Request.stream`: see `Request`."""
        if after is not None:
            if self._step_lock.acquire(blocking=False):
                self._step_and_unlock()
            else:  # queueing for the lock could starve beside a thread that does nothing but step
                with self._stepped:
                    self._stepped.wait_for(lambda: self._steps != after)
        return self._steps

    def _check_works(self) -> None:
        if self._broken is not None:
            raise EngineError(f"a step of this engine failed ({self._broken!r}): make a new Engine") from self._broken

    def _check_stop_tokens(self, ids: Any) -> tuple[int, ...]:
        stops = check_stop_tokens(self.target, ids)
        if len(stops) > self._stop_slots:
            raise ConfigError(f"there are {len(stops)} stop_token_ids: this engine has room for {self._stop_slots} a request")
        return tuple(stops)

    # -----------------------------------------------------------------------------------------------------------------
    # A step. `_state` always holds the newest state: programs consume the old one.

    def _step_and_unlock(self) -> bool:
        try:
            self._check_works()
            self._in_books = True
            return self._step()
        except EngineError:
            raise
        except BaseException as error:
            lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))
            if lost or self._in_books or not isinstance(error, KeyboardInterrupt):
                self._broken = error
            raise
        finally:
            self._step_lock.release()
            with self._stepped:
                self._steps += 1
                self._stepped.notify_all()

    def _step(self) -> bool:
        self._clock += 1
        if self._unread:  # an interrupt came before the last look
            self._look()
        self._drop_cancelled()
        self._admit()
        reading = [slot for slot in self._slots if slot.request is not None and not slot.decoding]
        if not reading and not any(slot.decoding for slot in self._slots):
            return False
        self._unread = True
        if reading:
            self._read_prompt(self._next(reading))
        if any(slot.decoding for slot in self._slots):
            self._width, limit = self._policy.next() if self._policy is not None else (None, None)
            rounds = jnp.int32(min(self._rounds, limit or self._rounds))
            models: Any = {"target": self.target, "drafter": self.drafter, "rule": self._rule, "width": self._width}
            with self._on_device():
                self._state = decode(self.target.params, self._draft_params, self._state, rounds, **models)
        self._look()
        return True

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Around what takes its time. An interrupt within loses nothing that the next step would not do again."""
        self._in_books = False
        yield
        self._in_books = True

    @property
    def _draft_params(self) -> Any:
        return self.drafter.params if self.drafter is not None else ()

    def _drop_cancelled(self) -> None:
        with self._queue_lock:
            cancelled = [request for request in self._waiting if request.cancelled.is_set()]
            for request in cancelled:
                self._waiting.remove(request)
        for request in cancelled:
            request.finish("cancelled")
        slots = [slot for slot in self._slots if slot.request is not None and slot.request.cancelled.is_set()]
        self._freeze(slots)
        for slot in slots:
            self._release(slot, "cancelled")

    def _admit(self) -> None:
        """Give free slots to the first in the queue."""
        while free := [slot for slot in self._slots if slot.request is None]:
            with self._queue_lock:
                if not self._waiting:
                    return
                request = self._waiting.popleft()
            slot = min(free, key=lambda slot: slot.used)
            shared = {free_slot.row: self._shared(request, free_slot) for free_slot in free}
            best = max(free, key=lambda slot: shared[slot.row])
            # The next turn of a chat goes on in its own row; one that shares less is copied, and the old text can serve again.
            if 2 * shared[best.row] > len(best.text):
                slot = best
            slot.read = self._usable(request, slot)
            slot.request, slot.used = request, self._clock

    def _next(self, reading: list[Slot]) -> Slot:
        """Whose prompt is read: the one with least left, so that short ones hardly wait, and every fourth time the oldest."""
        requests = {slot.row: slot.request for slot in reading}

        def rank(slot: Slot) -> tuple[int, int]:
            request = requests[slot.row]
            assert request is not None
            return (0 if self._clock % 4 == 3 else len(request.prompt) - slot.read), request.id

        return min(reading, key=rank)

    def _read_prompt(self, slot: Slot) -> None:
        """One piece of the slot's prompt, after copying what another row holds of it."""
        request = slot.request
        assert request is not None
        source, start = slot, slot.read
        for other in self._slots:
            usable = self._usable(request, other) if other is not slot else 0
            if usable > start:
                source, start = other, usable
        source.used = self._clock
        tokens = request.prompt[start : start + self._chunk]
        tokens_C = np.zeros((self._padded(len(tokens)),), np.int32)
        tokens_C[: len(tokens)] = tokens
        stops = request.stop_token_ids
        chunk = Chunk(
            tokens_C=tokens_C,
            start=np.int32(start),
            count=np.int32(len(tokens)),
            row=np.int32(slot.row),
            source=np.int32(source.row),
            last=np.bool_(start + len(tokens) == len(request.prompt)),
            end=np.int32(request.max_length),
            stops_S=np.asarray([*stops, *[-1] * (self._stop_slots - len(stops))], np.int32),
            sampling=request.sampling,
        )
        models: Any = {"target": self.target, "drafter": self.drafter}
        with self._on_device():
            self._state = prefill_chunk(self.target.params, self._draft_params, self._state, chunk, **models)
        request.read_tokens += len(tokens)
        slot.read = start + len(tokens)
        slot.newest = max(slot.read - 1, source.newest if start else 0)

    def _padded(self, count: int) -> int:
        """A whole chunk, or a power of two below it: few programs."""
        return min(self._chunk, max(SMALLEST_CHUNK, 1 << (count - 1).bit_length()))

    def _shared(self, request: Request, slot: Slot) -> int:
        return slot.shared(request.prompt) if self._reuse else 0

    def _usable(self, request: Request, slot: Slot) -> int:
        """Where reading begins after a hit: a drafter that keeps the newest positions only may need some filled again."""
        shared = self._shared(request, slot)
        return self.drafter.kept_context(shared, slot.newest) if self.drafter is not None else shared

    def _look(self) -> None:
        """Read what the device did, once, in arrays of one shape, and write it down."""
        live = [slot for slot in self._slots if slot.decoding]
        since_B = np.zeros((len(self._slots),), np.int32)
        for slot in live:
            since_B[slot.row] = slot.length
        with self._on_device():
            seen = jax.device_get(report(self._state, since_B, width=self._news))
        self._unread = False
        if self._policy is not None and self._width is not None:
            before = [slot.request.stats for slot in live if slot.request is not None]
            rows = [slot.row for slot in live]
            rounds = max((int(seen.rounds_B[row]) - old.rounds for row, old in zip(rows, before, strict=True)), default=0)
            accepted_K = seen.accepted_BK[rows].sum(axis=0)
            for old in before:
                accepted_K[: len(old.accepted_histogram)] -= np.asarray(old.accepted_histogram, accepted_K.dtype)
            self._policy.saw(self._width, rounds, accepted_K)
        stopped, ended = [], []
        for slot in live:
            request = slot.request
            assert request is not None
            length, done = int(seen.length_B[slot.row]), bool(seen.done_B[slot.row])
            slot.newest = max(slot.newest, length + self._block_size - 3)  # the last pass began at length - 2 at most
            new = seen.tokens_BW[slot.row, : length - since_B[slot.row]].tolist()
            if seen.audit is not None and request.sampling.temperature_B[0] > 0:
                score, variance, tokens = (float(sum_B[slot.row]) for sum_B in seen.audit)
                request.audit_sums = (score, variance, tokens)
            if request.add(new, _stats(seen, slot.row, length - len(request.prompt))):
                stopped.append(slot)
            elif done:
                ended.append(slot)
        self._freeze([slot for slot in stopped if not seen.done_B[slot.row]])
        for slot in stopped:
            self._release(slot, "stop")
        for slot in ended:
            assert slot.request is not None
            self._release(slot, "stop" if slot.request.tokens[-1] in slot.request.stop_token_ids else "length")

    def _freeze(self, slots: list[Slot]) -> None:
        if slots:
            rows_B = np.zeros((len(self._slots),), bool)
            rows_B[[slot.row for slot in slots]] = True
            self._state = freeze(self._state, rows_B)

    def _release(self, slot: Slot, reason: Any) -> None:
        request = slot.request
        assert request is not None
        slot.old_text, slot.request, slot.used = slot.text, None, self._clock
        score, variance, tokens = (a + b for a, b in zip(self._audit_sums, request.audit_sums, strict=True))
        self._audit_sums = (score, variance, tokens)
        request.finish(reason)


def _stats(seen: Report, row: int, new: int) -> AcceptanceStats:
    """As `generate.finish` counts: the first token comes from the prompt's pass and counts nowhere."""
    histogram = [int(count) for count in seen.accepted_BK[row]]
    rounds = int(seen.rounds_B[row])
    accepted = sum(k * count for k, count in enumerate(histogram))
    return AcceptanceStats(rounds, int(seen.drafted_B[row]), accepted, new - 1, tuple(histogram))
