"""A slot of an engine: a row of the device's state, and what the host knows of it."""

import numpy as np

from dflash_jax.request import Request


class Slot:
    """The text whose caches a row holds, and the request that it serves."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.request: Request | None = None
        self.read = 0
        """positions of the request's prompt that are in the caches"""
        self.old_text: list[int] = []
        """what the caches hold when no request is served"""
        self.newest = 0
        """last position ever written in the row since it began with empty caches, rejected ones included"""
        self.used = 0
        """step of the last use"""

    @property
    def decoding(self) -> bool:
        return self.request is not None and self.read == len(self.request.prompt)

    @property
    def text(self) -> list[int]:
        """Tokens whose keys and values both caches hold: of a decoding row all but the last, which the target has not seen."""
        if self.request is None:
            return self.old_text
        tokens = self.request.tokens
        return self.request.prompt[: self.read] + tokens[:-1]

    @property
    def length(self) -> int:
        """Committed tokens that the host knows of."""
        assert self.request is not None
        return len(self.request.prompt) + len(self.request.tokens)

    def shared(self, prompt: list[int]) -> int:
        """Tokens of a prompt whose caches this row holds; the last one is always read anew, for its hidden state."""
        text = self.text
        length = min(len(text), len(prompt) - 1)
        differ = np.flatnonzero(np.asarray(text[:length], np.int32) != np.asarray(prompt[:length], np.int32))
        return int(differ[0]) if differ.size else length
