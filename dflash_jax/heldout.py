"""Prompts held out from training: decoded now and then, for the acceptance length that decoding really has."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from dflash_jax.config import Config, DecodeConfig
from dflash_jax.conversations import expand_files, first_messages, read_prompts
from dflash_jax.distributed import text_from_main
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError, PromptError
from dflash_jax.generate import advancing, check_prompts, finish, start
from dflash_jax.prompts import packaged_prompts
from dflash_jax.targets import DenseTarget

PACKAGED = "packaged"
ROUNDS = 8
"""decoded between two questions whether to stop"""


class HeldOut(NamedTuple):
    """Encoded prompts, and how long an answer gets."""

    prompts: list[list[int]]
    max_new_tokens: int

    @property
    def name(self) -> str | None:
        """The same for the same prompts and lengths only: then acceptance lengths can be compared. None without prompts."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:16] if self.prompts else None

    def measure(self, target: DenseTarget, drafter: Drafter, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """What a line of metrics says of the drafter; None when asked to stop. All processes call it and ask at the same rounds."""
        state, lengths = start(target, drafter, self.prompts, DecodeConfig(max_new_tokens=self.max_new_tokens))
        advance = advancing(target, drafter, state, "match", None)
        while not bool(state.done_B.all()):
            if stop():
                return None
            state = advance(state, ROUNDS)
        stats = finish(state, lengths).stats
        return {
            "eval_acceptance_length": stats.acceptance_length,
            "eval_acceptance_length_macro": stats.acceptance_length_macro,
            "eval_accepted_per_position": list(stats.pooled.accepted_per_position),
            "eval_prompts": self.name,
        }


def held_out(config: Config, target: DenseTarget) -> HeldOut:
    """The prompts of `data.heldout`; none when nothing is to be evaluated. The target's parameters are not read.

    Raises `DataError` for files, `PromptError` for prompts that cannot be used, `ConfigError` when processes have different ones.
    """
    data, most = config.data, config.train.eval_max_new_tokens
    if not data.heldout or not config.train.eval_every:
        return HeldOut([], most)
    if data.heldout == [PACKAGED]:
        prompts = packaged_prompts("eval", limit=data.heldout_prompts)
    else:
        prompts = read_prompts(expand_files(data.heldout, "data.heldout"))[: data.heldout_prompts]
    found = HeldOut([target.tokenizer.encode_chat(first_messages(prompt)) for prompt in prompts], most)
    try:
        check_prompts(target, found.prompts)
    except PromptError as error:
        raise PromptError(f"data.heldout: {error}") from None
    if text_from_main(str(found.name)) != str(found.name):
        raise ConfigError("data.heldout holds other prompts here than for process 0: give all processes the same files")
    return found
