"""One row of a `DecodeState` at a time: how an engine fills, stops and reads rows while the others decode."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.audit import begin, sums_of
from dflash_jax.decode import DecodeState, commit
from dflash_jax.drafter import Drafter
from dflash_jax.sampling import TARGET_DRAW, Sampling, draw, sampling_rows
from dflash_jax.targets import Target


class Chunk(NamedTuple):
    """A piece of one prompt, and what the request wants. C is one of few sizes, so that few programs are compiled."""

    tokens_C: Any
    """token ids, padded to C"""
    start: Any
    """position of the first one; at 0 the row begins with empty caches"""
    count: Any
    """how many are not padding"""
    row: Any
    source: Any
    """the row whose caches hold the positions before `start`: `row` itself or, after a prefix hit, another one, which is copied"""
    last: Any
    """whether the prompt ends here: then the first token is drawn and the row begins to decode"""
    end: Any
    """length at which the row stops"""
    stops_S: Any
    sampling: Sampling
    """of one row"""


class Report(NamedTuple):
    """What a host reads after a step; W tokens a row."""

    tokens_BW: Array
    """committed tokens from the asked position on; what lies at or past `length_B` means nothing"""
    length_B: Array
    done_B: Array
    rounds_B: Array
    drafted_B: Array
    accepted_BK: Array
    audit: tuple[Array, Array, Array] | None
    """`audit.sums_of` the rows, where an audit runs"""


def empty_state(
    target: Target, drafter: Drafter | None, batch: int, capacity: int, block_size: int, stop_slots: int, audit: bool
) -> DecodeState:
    """A state whose rows are all done: one placeholder token each, nothing in the caches."""

    def zeros() -> Array:  # a new array each time: one buffer cannot be donated twice
        return jnp.zeros((batch,), jnp.int32)

    return DecodeState(
        tokens_BL=jnp.zeros((batch, capacity), jnp.int32),
        length_B=zeros() + 1,
        end_B=zeros() + 2,
        done_B=jnp.ones((batch,), bool),
        stops_BS=jnp.full((batch, stop_slots), -1, jnp.int32),
        target_cache=target.init_cache(batch, capacity),
        draft_cache=drafter.init_cache(batch, capacity) if drafter is not None else (),
        sampling=jax.tree.map(jnp.asarray, sampling_rows(batch, 0.0, 0, 1.0, 0.0, 0)),
        rounds_B=zeros(),
        drafted_B=zeros(),
        accepted_BK=jnp.zeros((batch, block_size), jnp.int32),
        audit=begin(batch, block_size, target.config.vocab_size) if audit else None,
    )


@partial(jax.jit, static_argnames=("target", "drafter"), donate_argnames=("state",))
def prefill_chunk(
    params: Any, draft_params: Any, state: DecodeState, chunk: Chunk, *, target: Target, drafter: Drafter | None
) -> DecodeState:
    """Read a piece of a prompt into one row; no other row changes. The state is donated: use the returned one.

    The row is taken out, extended as a batch of one and put back, so what is computed does not depend on the neighbours.
    """
    capacity = state.tokens_BL.shape[1]
    from_start = chunk.start == 0
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, chunk.source, 1), state)
    caches = (row.target_cache, row.draft_cache)
    empty = (target.init_cache(1, capacity), drafter.init_cache(1, capacity) if drafter is not None else ())
    # Whatever the row's last tenant left, a number that is not finite too, is gone.
    target_cache, draft_cache = jax.tree.map(lambda new, old: jnp.where(from_start, new, old), empty, caches)
    slots_1C = jnp.arange(chunk.tokens_C.shape[0], dtype=jnp.int32)[None]
    positions_1C = jnp.where(slots_1C < chunk.count, chunk.start + slots_1C, -1)
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    hidden_1CD, taps_1CM, target_cache = target.extend(params, chunk.tokens_C[None], positions_1C, target_cache, taps)
    if drafter is not None:
        draft_cache = drafter.extend_context(draft_params, taps_1CM, positions_1C, draft_cache)
    text_1L = jnp.where(from_start, 0, row.tokens_BL)
    places_C = jnp.where(positions_1C[0] < 0, capacity, positions_1C[0])
    length_1 = (chunk.start + chunk.count)[None]
    row = row._replace(
        tokens_BL=text_1L.at[0, places_C].set(chunk.tokens_C, mode="drop"),
        length_B=length_1,
        end_B=chunk.end[None],
        done_B=jnp.zeros((1,), bool),
        stops_BS=chunk.stops_S[None],
        target_cache=target_cache,
        draft_cache=draft_cache,
        sampling=chunk.sampling,
        rounds_B=jnp.zeros_like(row.rounds_B),
        drafted_B=jnp.zeros_like(row.drafted_B),
        accepted_BK=jnp.zeros_like(row.accepted_BK),
        audit=jax.tree.map(jnp.zeros_like, row.audit),
    )
    last_11D = jax.lax.dynamic_slice_in_dim(hidden_1CD, chunk.count - 1, 1, axis=1)
    first_11 = draw(target.unembed(params, last_11D), length_1[:, None], chunk.sampling, TARGET_DRAW)
    row, _ = commit(row, first_11, chunk.last.astype(jnp.int32)[None])
    row = row._replace(done_B=row.done_B | ~chunk.last)  # until its prompt is read, the row is done for the decode loop
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, chunk.row, 0), state, row)


@partial(jax.jit, donate_argnames=("state",))
def freeze(state: DecodeState, rows_B: Bool[Array, " B"]) -> DecodeState:
    """End these rows where they are. The state is donated: use the returned one."""
    return state._replace(done_B=state.done_B | rows_B)


@partial(jax.jit, static_argnames=("width",))
def report(state: DecodeState, since_B: Int[Array, " B"], *, width: int) -> Report:
    """What is new from position `since_B` on, at most `width` tokens a row."""
    slots_BW = since_B[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    slots_BW = jnp.minimum(slots_BW, state.tokens_BL.shape[1] - 1)
    tokens_BW = jnp.take_along_axis(state.tokens_BL, slots_BW, axis=1)
    audit = sums_of(state.audit) if state.audit is not None else None
    return Report(tokens_BW, state.length_B, state.done_B, state.rounds_B, state.drafted_B, state.accepted_BK, audit)
