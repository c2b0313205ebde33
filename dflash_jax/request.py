"""A request to an engine: what was asked, what has come so far, and where text stops."""

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

from dflash_jax.audit import Audit, judged
from dflash_jax.errors import ConfigError
from dflash_jax.generate import AcceptanceStats
from dflash_jax.sampling import Sampling
from dflash_jax.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]
_ids = itertools.count()


class TextWatch:
    """The text of a growing answer, cut before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._strings = strings
        self._settled: list[str] = []
        self._tail = ""
        self._found = False

    def push(self, token: int) -> bool:
        """Take one token; True when the text with it contains a stop string."""
        piece = self._decoder.push([token])
        self._tail += piece
        # A token may end a stop string and begin a character that the next one completes.
        seen = self._tail if piece else self._tail + self._decoder.pending()
        starts = [seen.find(string) for string in self._strings if string in seen]
        if starts:
            self._settled.append(seen[: min(starts)])
            self._tail, self._found = "", True
            return True
        tail = self._tail
        held = next((i for i in range(len(tail)) if any(string.startswith(tail[i:]) for string in self._strings)), len(tail))
        self._settled.append(tail[:held])
        self._tail = tail[held:]
        return False

    def take(self) -> str:
        """Text that is final since the last call: whole characters that cannot be the beginning of a stop string."""
        text = "".join(self._settled)
        self._settled.clear()
        return text

    def rest(self) -> str:
        """What `take` still held back, when no token comes any more."""
        return self.take() if self._found else self.take() + self._tail + self._decoder.flush()


class Request:
    """One prompt on its way through an `Engine`, made by `Engine.submit`. Reading and cancelling is safe from any thread."""

    def __init__(
        self,
        prompt: list[int],
        max_length: int,
        sampling: Sampling,
        stop_token_ids: tuple[int, ...],
        stop: tuple[str, ...],
        tokenizer: Tokenizer | None,
        advance: Callable[[int | None], int],
    ) -> None:
        """`max_length` counts the prompt too. `advance(None)` gives the engine's count of steps; `advance(n)` returns once a step
        after the n-th is over, and makes it if nobody else does."""
        self.id = next(_ids)
        """order of submission in this process"""
        self.prompt = prompt
        self.max_length = max_length
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.stop = stop
        self.watch = TextWatch(tokenizer, stop) if stop and tokenizer is not None else None
        self.read_tokens = 0
        """prompt tokens that were computed and not taken from an earlier request's caches"""
        self.cancelled = threading.Event()
        self._tokenizer = tokenizer
        self._advance = advance
        self._tokens: list[int] = []
        self._reason: FinishReason | None = None
        self._stats = AcceptanceStats(0, 0, 0, 0, ())
        self.audit_sums = (0.0, 0.0, 0.0)
        """for the engine: what `audit.judged` takes, of a sampled request"""

    @property
    def tokens(self) -> list[int]:
        """New tokens so far, a stop token included. With a stop string: up to the token that completes it."""
        return list(self._tokens)

    @property
    def text(self) -> str:
        """The answer so far as text; it ends before a stop string, and never within a character that is still to come.

        Raises `ConfigError` when the target has no tokenizer.
        """
        watch, done = self._new_watch(), self.done
        for token in self.tokens:
            watch.push(token)
        return watch.rest() if done else watch.take()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it has not."""
        return self._reason

    @property
    def done(self) -> bool:
        return self._reason is not None

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance so far. The passes of the step that found a stop string or a cancellation count as they were run."""
        return self._stats

    @property
    def audit(self) -> Audit:
        """Of an engine with `audit`: whether what was sampled so far follows the target's law. nan when nothing tells."""
        return judged(*self.audit_sums)

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose caches were taken from an earlier request (known once the first token is there)."""
        return len(self.prompt) - self.read_tokens if self._tokens else 0

    def cancel(self) -> None:
        """End it at the next step. What is there stays; a request that is done already stays as it is."""
        self.cancelled.set()

    def stream(self) -> Iterator[list[int]]:
        """New token ids as they come. Makes the engine's steps itself unless another thread does. To stop early, `cancel`."""
        sent = 0
        while True:
            steps, done = self._advance(None), self.done  # in this order: what comes in between is seen in the next turn
            new = self._tokens[sent:]
            sent += len(new)
            if new:
                yield new
            if done:
                return
            if not new:
                self._advance(steps)

    def stream_text(self) -> Iterator[str]:
        """`stream` as text: whole characters only, and nothing of a stop string. Raises `ConfigError` without a tokenizer."""
        watch = self._new_watch()
        for tokens in self.stream():
            for token in tokens:
                watch.push(token)
            if text := watch.take():
                yield text
        if text := watch.rest():
            yield text

    def add(self, tokens: Sequence[int], stats: AcceptanceStats) -> bool:
        """For the engine: take new tokens. True when a stop string ends the answer; what comes after it is dropped."""
        self._stats = stats
        for i, token in enumerate(tokens):
            if self.watch is not None and self.watch.push(token):
                self._tokens.extend(tokens[: i + 1])
                return True
        self._tokens.extend(tokens)
        return False

    def finish(self, reason: FinishReason) -> None:
        """For the engine: the answer is whole."""
        self._reason = reason

    def _new_watch(self) -> TextWatch:
        if self._tokenizer is None:
            raise ConfigError("this target has no tokenizer, so there is no text: read `tokens`, or load a target that has one")
        return TextWatch(self._tokenizer, self.stop)


def check_stop_strings(tokenizer: Tokenizer | None, stop: Any) -> tuple[str, ...]:
    """Stop strings: one, several or None. Raises `ConfigError`."""
    if not isinstance(stop, Collection | None):
        raise ConfigError(f"stop is {stop!r}: give a string or a list of strings")
    strings = (stop,) if isinstance(stop, str) else tuple(() if stop is None else stop)
    if strings and tokenizer is None:
        raise ConfigError("stop strings need the target's tokenizer, and it has none: give stop_token_ids")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"the stop string {string!r} is no text: give at least one character")
    return strings
