"""Which block width pays: what a round costs at each width, measured once and kept in a file, against the acceptance seen.

A round of w slots emits tau(w) tokens and costs c(w) seconds, which depends on the machine, the models, the batch and the context
but not on what the tokens are. The best width is the one with the most tokens a second; width 1 is plain decoding.
"""

import hashlib
import json
import math
import os
import platform
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import Rule
from dflash_jax.decode import PLAIN_ROUNDS, DecodeState, decode
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError
from dflash_jax.targets import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""candidates, besides the whole block"""
MEASURED_ROUNDS, REPEATS = 8, 5
HALF_LIFE = 64
"""rounds after which what was seen counts half: texts change"""
FIRST_ROUNDS, FIRST_LOOK = 16, 4
"""so many rounds are looked at in small lots before the policy is trusted with longer calls"""
PROBE_ROUNDS = 2
PROBE_SHARE = 0.01
"""of the time goes into whole blocks while narrower ones are used: what they accept is unknown otherwise"""


class WidthTable:
    """Seconds a round by width, in a JSON file: measured where it lacks the case at hand, which takes a compilation a width."""

    def __init__(self, path: str | Path) -> None:
        """Raises `ConfigError` when the file holds something else."""
        self.path = Path(path)
        self._cases = _read(self.path)

    def costs(self, target: Target, drafter: Drafter, state: DecodeState, rule: Rule) -> dict[int, float]:
        """Seconds a round of every candidate width for states of this shape; measures and saves them if they are not known."""
        case = _case(target, drafter, state, rule)
        if case not in self._cases:
            measured = measure_widths(target, drafter, state, rule)
            with _saving:
                self._cases = _read(self.path) | {case: measured}  # others may have saved meanwhile
                self._save()
        return self._cases[case]

    def _save(self) -> None:
        text = json.dumps(self._cases, indent=1, sort_keys=True) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            beside.write_text(text, encoding="utf-8")
            beside.replace(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error}): name another file for the table of widths") from None


_saving = threading.Lock()
"""threads would write over each other; two processes that save within the same millisecond lose one measurement, no more"""


def _read(path: Path) -> dict[str, dict[int, float]]:
    """The cases of a file; none if there is no file yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cases = {case: {int(width): float(cost) for width, cost in costs.items()} for case, costs in found.items()}
        sound = all(1 in costs and min(costs) >= 1 and all(0 < c < math.inf for c in costs.values()) for costs in cases.values())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}): name a JSON file for the table of widths") from None
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        sound = False
    if not sound:
        raise ConfigError(f"{path} is no table of widths (seconds by width, case by case): delete it, or name another file")
    return cases


def _case(target: Target, drafter: Drafter, state: DecodeState, rule: Rule) -> str:
    """What the costs depend on, in words that a reader of the file understands."""
    (batch, capacity), block_size = state.tokens_BL.shape, state.accepted_BK.shape[1]
    device = jax.devices()[0]
    models = hashlib.sha256(repr((target.config, drafter.config)).encode()).hexdigest()[:12]
    machine = f"{jax.device_count()} x {device.device_kind}, {os.cpu_count()} {platform.machine()} cores, jax {jax.__version__}"
    shape = f"batch {batch}, context {capacity}, blocks up to {block_size}"
    return f"{machine}; {target.config.model_type} {models}, {target.config.dtype}; {shape}; {_kind(state, rule)}"


def _kind(state: DecodeState, rule: Rule) -> str:
    """Noise and sorting cost too, where a row asks for them. An engine counts as what its rows were when it began: greedy."""
    if state.sampling is None:
        return "greedy"
    temperature_B, top_k_B, top_p_B, min_p_B = (np.asarray(x) for x in state.sampling[:4])
    if not (temperature_B > 0).any():
        return f"greedy, {rule}"
    cuts_B = (top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0)
    return f"sampled, {rule}" + ", cut" * bool((cuts_B & (temperature_B > 0)).any())


def candidates(block_size: int) -> list[int]:
    """Widths worth a compilation for blocks of up to `block_size` slots."""
    return [width for width in WIDTHS if width < block_size] + [block_size]


def measure_widths(target: Target, drafter: Drafter, like: DecodeState, rule: Rule) -> dict[int, float]:
    """Seconds a round of each candidate width: the median of interleaved runs over a state with the shapes of `like`.

    What a round costs does not depend on how many drafts stand, so any text will do.
    """
    block_size, capacity = like.accepted_BK.shape[1], like.tokens_BL.shape[1]
    widths = candidates(block_size)
    rounds = max(1, min(MEASURED_ROUNDS, PLAIN_ROUNDS, (capacity - 1) // (2 * block_size)))
    start = max(1, min(capacity // 2, capacity - (rounds + 1) * block_size))

    def fresh(state: DecodeState) -> DecodeState:
        return state._replace(
            length_B=jnp.full_like(state.length_B, start),
            end_B=jnp.full_like(state.end_B, capacity),
            done_B=jnp.zeros_like(state.done_B),
            stops_BS=jnp.full_like(state.stops_BS, -1),
        )

    # The sampling is the caller's own, in arrays that may be donated.
    state = fresh(jax.tree.map(jnp.zeros_like, like)._replace(sampling=jax.tree.map(jnp.copy, like.sampling)))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(REPEATS + 1):
        for width in widths:
            before = time.perf_counter()
            state = decode(
                target.params, drafter.params, state, jnp.int32(rounds), target=target, drafter=drafter, rule=rule, width=width
            )
            jax.block_until_ready(state)
            if repeat:  # the first one compiles
                seconds[width].append((time.perf_counter() - before) / rounds)
            state = fresh(state)
    return {width: statistics.median(times) for width, times in seconds.items()}


class WidthPolicy:
    """Chooses the width of the next rounds from their costs and the acceptance seen so far."""

    def __init__(self, costs: dict[int, float], block_size: int) -> None:
        self.costs = {width: cost for width, cost in costs.items() if width <= block_size}
        self.widest = max(self.costs)
        # Half an imagined round in which every draft stood: the first real ones decide, and the widest block is tried first.
        self._seen_K = np.full(self.widest, 0.5)
        self._stood_K = np.full(self.widest, 0.5)
        self._rounds = 0
        self._since_probe = 0.0
        """seconds decoded since the whole block was last used"""

    def tau(self, width: int) -> float:
        """Tokens that a round of this width is expected to emit."""
        return float((self._stood_K / self._seen_K)[:width].sum())

    def next(self) -> tuple[int, int | None]:
        """The width, and for how many rounds at most; None: as many as the caller likes."""
        best = max(self.costs, key=lambda width: self.tau(width) / self.costs[width])
        if best < self.widest:
            extra = PROBE_ROUNDS * (self.costs[self.widest] - self.costs[best])
            if self._since_probe * PROBE_SHARE >= extra:
                return self.widest, PROBE_ROUNDS
        return best, FIRST_LOOK if self._rounds < FIRST_ROUNDS else None

    def saw(self, width: int, rounds: int, accepted_K: np.ndarray) -> None:
        """`rounds` passes of this width were made; `accepted_K[k]`: how many rows' rounds emitted k drafted tokens in them."""
        reached_K = np.cumsum(accepted_K[::-1])[::-1][: self.widest].astype(float)
        rows = reached_K[0]
        if width > 1 and rows:
            kept = 0.5 ** (rounds / HALF_LIFE)
            # The anchor's own slot always stands; slots past the width say nothing about themselves.
            self._seen_K[:width] = kept * self._seen_K[:width] + rows
            self._stood_K[:width] = kept * self._stood_K[:width] + reached_K[:width]
        self._rounds += rounds
        self._since_probe = 0.0 if width == self.widest else self._since_probe + rounds * self.costs[width]


def decode_by(
    policy: WidthPolicy, target: Target, drafter: Drafter, state: DecodeState, rule: Rule, most: int = PLAIN_ROUNDS
) -> DecodeState:
    """At most `most` rounds of the width that the policy takes; it learns from what they accepted. The state is donated."""
    width, limit = policy.next()
    rounds = min(most, PLAIN_ROUNDS, limit or most)
    before = jax.device_get((state.accepted_BK, state.rounds_B))
    models: Any = {"target": target, "drafter": drafter}
    state = decode(target.params, drafter.params, state, jnp.int32(rounds), rule=rule, width=width, **models)
    now = jax.device_get((state.accepted_BK, state.rounds_B))
    accepted_BK, rounds_B = (new - old for new, old in zip(now, before, strict=True))
    policy.saw(width, int(rounds_B.max()), accepted_BK.sum(axis=0))
    return state
