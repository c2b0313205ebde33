"""Decoding in one device loop: draft a block, verify it, commit what stands, until every row is done.

Between rounds one invariant holds, for `n = length_B[r]` committed tokens of row r: the target cache covers positions 0..n-2, the
drafter's context cache too (the newest of them in a layer with a window), and token n-1 (the anchor: known, not yet seen by the
target) opens the next block. Plain decoding is the same loop with blocks of one slot.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.audit import AuditState, count, observe
from dflash_jax.config import Rule
from dflash_jax.drafter import Drafter
from dflash_jax.sampling import (
    ACCEPT_DRAW,
    DRAFT_DRAW,
    REDRAW,
    TARGET_DRAW,
    Sampling,
    any_sampled,
    draw,
    draw_with_law,
    law,
    uniforms,
)
from dflash_jax.targets import Target
from dflash_jax.verify import Verified, verify_block, verify_jointly, verify_rejection

PLAIN_ROUNDS = 16
"""most rounds of one slot whose taps wait for the drafter"""


class DecodeState(NamedTuple):
    """Everything a round reads and writes; all shapes are fixed. L is the token buffer's length, also the capacity of caches.

    The row is the first axis of every array, those of the caches too. A row that is done stays bit for bit as it is.
    """

    tokens_BL: Array
    """committed tokens, prompt included; what lies at or past length_B means nothing"""
    length_B: Array
    """committed tokens a row"""
    end_B: Array
    """length at which a row stops: prompt + max_new_tokens"""
    done_B: Array
    stops_BS: Array
    """stop token ids a row, padded with -1"""
    target_cache: Any
    draft_cache: Any
    """the drafter's context keys and values; an empty tuple in plain decoding"""
    sampling: Sampling | None
    """None: every row is greedy"""
    rounds_B: Array
    """verify passes a row took part in"""
    drafted_B: Array
    """tokens drafted in them"""
    accepted_BK: Array
    """how many rounds of a row emitted k drafted tokens, k = 0..K-1"""
    audit: AuditState | None = None
    """None: no audit, and nothing of it in the program"""


def prefill_lengths(prompt_lengths: list[int], max_new_tokens: int, block_size: int) -> tuple[int, int]:
    """Padded prompt length (a power of two) and cache capacity (a multiple of 128, one block of slack): few compilations."""
    longest = max(prompt_lengths)
    padded = max(16, 1 << (longest - 1).bit_length())
    capacity = -(-(max(padded, longest + max_new_tokens) + block_size) // 128) * 128
    return padded, capacity


@partial(jax.jit, static_argnames=("target", "drafter", "block_size", "capacity"))
def prefill(
    params: Any,
    draft_params: Any,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    end_B: Int[Array, " B"],
    stops_BS: Int[Array, "B S"],
    sampling: Sampling | None,
    *,
    target: Target,
    drafter: Drafter | None,
    block_size: int,
    capacity: int,
) -> DecodeState:
    """Read the prompts (right-padded), fill both caches and commit the target's first token."""
    batch, padded = tokens_BT.shape
    slots_T = jnp.arange(padded, dtype=jnp.int32)
    positions_BT = jnp.where(slots_T[None] < lengths_B[:, None], slots_T[None], -1)
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    hidden_BTD, taps_BTM, target_cache = target.extend(params, tokens_BT, positions_BT, target.init_cache(batch, capacity), taps)
    draft_cache: Any = ()
    if drafter is not None:
        draft_cache = drafter.extend_context(draft_params, taps_BTM, positions_BT, drafter.init_cache(batch, capacity))
    last_B1D = jnp.take_along_axis(hidden_BTD, (lengths_B - 1)[:, None, None], axis=1)
    first_B1 = draw(target.unembed(params, last_B1D), lengths_B[:, None], sampling, TARGET_DRAW)
    buffer_BL = jnp.pad(tokens_BT, ((0, 0), (0, capacity - padded)))
    state = DecodeState(
        tokens_BL=buffer_BL,
        length_B=lengths_B,
        end_B=end_B,
        done_B=jnp.zeros((batch,), bool),
        stops_BS=stops_BS,
        target_cache=target_cache,
        draft_cache=draft_cache,
        sampling=sampling,
        rounds_B=jnp.zeros((batch,), jnp.int32),
        drafted_B=jnp.zeros((batch,), jnp.int32),
        accepted_BK=jnp.zeros((batch, block_size), jnp.int32),
    )
    return commit(state, first_B1, jnp.ones((batch,), jnp.int32))[0]


def draft(
    params: Any,
    draft_params: Any,
    head_VD: Array | None,
    state: DecodeState,
    target: Target,
    drafter: Drafter,
    block_size: int,
    rule: Rule = "match",
) -> tuple[Int[Array, "B J"], Float[Array, "B J V"] | None]:
    """One parallel pass of the drafter: tokens for slots 1..K-1 after each row's anchor, and the law they were drawn from.

    `match` needs no law (None, unless an audit asks for it) and drafts the likeliest tokens, unless the drafter has a temperature.
    The other rules draw as the row samples, at the drafter's temperature if it has one.
    """
    anchors_B = state.length_B - 1
    anchor_tokens_B = jnp.take_along_axis(state.tokens_BL, anchors_B[:, None], axis=1)[:, 0]
    block_BKD = drafter.embed_block(draft_params, anchor_tokens_B, block_size, partial(target.embed, params))
    positions_BK = anchors_B[:, None] + jnp.arange(block_size, dtype=jnp.int32)[None]
    hidden_BKD = drafter.propose(draft_params, block_BKD, positions_BK, state.draft_cache)
    logits_BJV = drafter.unembed(hidden_BKD[:, 1:], head_VD, target, params)
    temperature, positions_BJ = drafter.config.temperature, positions_BK[:, 1:]
    if rule != "match" and state.sampling is not None:
        own = state.sampling
        if temperature > 0:
            own = own._replace(temperature_B=jnp.where(own.temperature_B > 0, temperature, 0.0))
        chosen_BJ, q_BJV = draw_with_law(logits_BJV, positions_BJ, own, DRAFT_DRAW, anchors_B)
        return drafter.token_ids(chosen_BJ), drafter.over_vocabulary(q_BJV)
    if temperature == 0:
        return drafter.token_ids(draw(logits_BJV, positions_BJ, None, DRAFT_DRAW)), None
    batch = state.length_B.shape[0]
    seeds_B = state.sampling.seed_B if state.sampling is not None else jnp.arange(batch, dtype=jnp.uint32)
    off_B = jnp.zeros((batch,), jnp.float32)
    own = Sampling(off_B + temperature, jnp.zeros((batch,), jnp.int32), off_B + 1, off_B, seeds_B)
    if state.audit is None:
        return drafter.token_ids(draw(logits_BJV, positions_BJ, own, DRAFT_DRAW, anchors_B)), None
    chosen_BJ, q_BJV = draw_with_law(logits_BJV, positions_BJ, own, DRAFT_DRAW, anchors_B)
    return drafter.token_ids(chosen_BJ), drafter.over_vocabulary(q_BJV)


def verify(
    params: Any,
    state: DecodeState,
    draft_BJ: Int[Array, "B J"],
    q_BJV: Float[Array, "B J V"] | None,
    target: Target,
    drafter: Drafter | None,
    rule: Rule = "match",
) -> tuple[DecodeState, Verified, tuple[Float[Array, "B K M"], Int[Array, "B K"]]]:
    """One pass of the target over [anchor, drafts]: its grown cache, what to commit, and what `with_context` takes.

    `match`: the target's own keyed draw must equal the draft, so the text is that of plain decoding, token for token. `rejection`
    and `block` judge by the law the drafts were drawn from (`q_BJV`): the text is another sample of the same law. Without a drafter
    the slots after the anchor hold any token, and none of them stands: plain decoding in passes of the state's width.
    """
    anchors_B = state.length_B - 1
    anchor_tokens_B1 = jnp.take_along_axis(state.tokens_BL, anchors_B[:, None], axis=1)
    block_BK = jnp.concatenate([anchor_tokens_B1, draft_BJ], axis=1)
    judged = block_BK.shape[1]
    if drafter is None:
        block_BK = jnp.pad(block_BK, ((0, 0), (0, state.accepted_BK.shape[1] - judged)))
    positions_BK = anchors_B[:, None] + jnp.arange(block_BK.shape[1], dtype=jnp.int32)[None]
    positions_BK = jnp.where(state.done_B[:, None], -1, positions_BK)  # padding: a done row writes nothing
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    hidden_BKD, taps_BKM, target_cache = target.extend(params, block_BK, positions_BK, state.target_cache, taps)
    logits_BKV = target.unembed(params, hidden_BKD)[:, :judged]
    sampling = state.sampling
    if rule == "match" or q_BJV is None or sampling is None:
        drawn_BK = draw(logits_BKV, positions_BK[:, :judged] + 1, sampling, TARGET_DRAW)
        verified = verify_block(draft_BJ, drawn_BK)
    else:
        verified = jax.lax.cond(
            any_sampled(sampling),
            lambda x_BKV: _verify_by_law(draft_BJ, q_BJV, law(x_BKV, sampling), anchors_B, sampling, rule),
            lambda x_BKV: verify_block(draft_BJ, draw(x_BKV, positions_BK + 1, None, TARGET_DRAW)),
            logits_BKV,
        )
    if state.audit is not None and sampling is not None:
        audit = observe(state.audit, draft_BJ, q_BJV, law(logits_BKV, sampling), verified.tokens_BK)
        state = state._replace(audit=audit)
    return state._replace(target_cache=target_cache), verified, (taps_BKM, positions_BK)


def with_context(
    draft_params: Any, state: DecodeState, drafter: Drafter | None, taps_BKM: Array, positions_BK: Array
) -> DecodeState:
    """Rejected slots are written too: the next block cannot see them, and the next verify pass rewrites them."""
    if drafter is None:
        return state
    return state._replace(draft_cache=drafter.extend_context(draft_params, taps_BKM, positions_BK, state.draft_cache))


def _verify_by_law(draft_BJ: Array, q_BJV: Array, p_BKV: Array, anchors_B: Array, sampling: Sampling, rule: Rule) -> Verified:
    slots_1J = jnp.arange(1, p_BKV.shape[1], dtype=jnp.int32)[None]
    accept_BJ = uniforms(anchors_B[:, None] + slots_1J, sampling, ACCEPT_DRAW, anchors_B)
    redraw_B = uniforms(anchors_B[:, None], sampling, REDRAW, anchors_B)[:, 0]
    judge = verify_rejection if rule == "rejection" else verify_jointly
    return judge(draft_BJ, q_BJV, p_BKV, accept_BJ, redraw_B)


def commit(state: DecodeState, tokens_BK: Int[Array, "B K"], tau_B: Int[Array, " B"]) -> tuple[DecodeState, Int[Array, " B"]]:
    """Append the first tau tokens of each live row, cut at the first stop token or the length cap, whichever comes first."""
    slots = tokens_BK.shape[1]
    k_K = jnp.arange(slots, dtype=jnp.int32)
    is_stop_BK = (tokens_BK[:, :, None] == state.stops_BS[:, None]).any(-1)
    first_stop_B = jnp.where(is_stop_BK.any(1), jnp.argmax(is_stop_BK, axis=1).astype(jnp.int32), slots)
    emitted_B = jnp.minimum(jnp.minimum(tau_B, first_stop_B + 1), state.end_B - state.length_B)
    emitted_B = jnp.where(state.done_B, 0, emitted_B)
    capacity = state.tokens_BL.shape[1]
    slots_BK = jnp.where(k_K[None] < emitted_B[:, None], state.length_B[:, None] + k_K[None], capacity)
    rows_B1 = jnp.arange(tokens_BK.shape[0], dtype=jnp.int32)[:, None]
    length_B = state.length_B + emitted_B
    state = state._replace(
        tokens_BL=state.tokens_BL.at[rows_B1, slots_BK].set(tokens_BK, mode="drop"),
        length_B=length_B,
        done_B=state.done_B | (emitted_B > first_stop_B) | (length_B >= state.end_B),
    )
    return state, emitted_B


def booked(state: DecodeState, verified: Verified, drafted: int) -> DecodeState:
    """`commit`, and the counts of a round that drafted so many tokens a row."""
    live_B = ~state.done_B
    state, emitted_B = commit(state, verified.tokens_BK, verified.tau_B)
    if state.audit is not None:
        state = state._replace(audit=count(state.audit, emitted_B))
    # The bonus token is not a drafted one; a cut run may end inside its accepted prefix.
    accepted_B = jnp.minimum(verified.accepted_B, emitted_B)
    slots_K = jnp.arange(state.accepted_BK.shape[1], dtype=jnp.int32)
    hit_BK = live_B[:, None] & (slots_K[None] == accepted_B[:, None])
    return state._replace(
        rounds_B=state.rounds_B + live_B.astype(jnp.int32),
        drafted_B=state.drafted_B + jnp.where(live_B, drafted, 0),
        accepted_BK=state.accepted_BK + hit_BK.astype(jnp.int32),
    )


@partial(jax.jit, static_argnames=("target", "drafter", "rule", "width"), donate_argnames=("state",))
def decode(
    params: Any,
    draft_params: Any,
    state: DecodeState,
    max_rounds: Int[Array, ""],
    *,
    target: Target,
    drafter: Drafter | None,
    rule: Rule = "match",
    width: int | None = None,
) -> DecodeState:
    """At most `max_rounds` rounds on the device; fewer when every row is done. The state is donated: use the returned one.

    `width`: slots a block, up to the state's K (None). At 1 a drafter drafts nothing, plain decoding at its price; its context
    follows after the last of at most `PLAIN_ROUNDS` rounds, in one pass.
    """
    batch, slots = state.accepted_BK.shape
    width = slots if width is None else width
    plain = drafter is not None and width == 1
    head_VD = drafter.head(draft_params, target, params) if drafter is not None and not plain else None
    unread: tuple[Array, ...] = ()
    if drafter is not None and plain:
        taps = len(drafter.config.target_layer_ids) * target.config.hidden_size
        unread = (jnp.zeros((batch, PLAIN_ROUNDS, taps), jnp.float32), jnp.full((batch, PLAIN_ROUNDS), -1, jnp.int32))
        max_rounds = jnp.minimum(max_rounds, PLAIN_ROUNDS)

    def unfinished(carry: tuple[Array, DecodeState, tuple[Array, ...]]) -> Array:
        rounds, state, _ = carry
        return (rounds < max_rounds) & ~state.done_B.all()

    def one_round(carry: tuple[Array, DecodeState, tuple[Array, ...]]) -> tuple[Array, DecodeState, tuple[Array, ...]]:
        rounds, state, unread = carry
        draft_BJ, q_BJV = jnp.zeros((batch, 0), jnp.int32), None
        if drafter is not None and not plain:
            draft_BJ, q_BJV = draft(params, draft_params, head_VD, state, target, drafter, width, rule)
        state, verified, context = verify(params, state, draft_BJ, q_BJV, target, drafter, rule)
        if plain:
            unread = tuple(jax.lax.dynamic_update_slice_in_dim(x, new, rounds, 1) for x, new in zip(unread, context, strict=True))
        else:
            state = with_context(draft_params, state, drafter, *context)
        return rounds + 1, booked(state, verified, draft_BJ.shape[1]), unread

    _, state, unread = jax.lax.while_loop(unfinished, one_round, (jnp.int32(0), state, unread))
    return with_context(draft_params, state, drafter, *unread) if plain else state
