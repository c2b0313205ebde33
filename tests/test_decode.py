"""The device loop: what a commit appends, what holds between rounds, and what it costs (compilations, copies, transfers)."""

import itertools
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny_models import (
    BLOCK,
    CONTEXT,
    HIDDEN,
    TAPS,
    constant_drafter,
    dense_drafter,
    dense_target,
    random_prompt,
    scripted_drafter,
    table_target,
)

from dflash_jax.config import DecodeConfig
from dflash_jax.decode import DecodeState, commit, decode, draft, prefill_lengths
from dflash_jax.generate import NO_LIMIT, finish, start
from dflash_jax.targets import Target, TrainableTarget


def advance(target, drafter, state, rounds=NO_LIMIT):
    params = drafter.params if drafter is not None else ()
    return decode(target.params, params, state, jnp.int32(rounds), target=target, drafter=drafter)


def draft_now(target, drafter, state):
    head_VD = drafter.head(drafter.params, target, target.params)
    return draft(target.params, drafter.params, head_VD, state, target, drafter, BLOCK)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Committing

SLOTS, PROMPT, LENGTH, STOPS = 5, 3, 16, (9, 8)
commit_all = jax.jit(commit)


def commit_by_hand(tokens, tau, room, done):
    """What one row emits and whether it is done: token by token, a stop or the cap ends it, whichever comes first."""
    emitted = []
    if not done:
        for token in tokens[:tau]:
            emitted.append(token)
            if token in STOPS or len(emitted) == room:
                return emitted, True
    return emitted, done


def test_every_stop_tau_cap_and_done():
    """Stops at every slot (and two of them), every tau, every room: one row each, in one batch."""
    rows = []
    for stop, tau, room, done in itertools.product((None, 0, 1, 2, 3, 4, (1, 3)), range(1, SLOTS + 1), range(1, 7), (False, True)):
        tokens = [20 + k for k in range(SLOTS)]
        for i, k in enumerate([] if stop is None else np.atleast_1d(stop)):
            tokens[k] = STOPS[i]
        rows.append((tokens, tau, room, done))
    batch = len(rows)
    zeros = jnp.zeros((batch,), jnp.int32)
    state = DecodeState(
        tokens_BL=jnp.full((batch, LENGTH), 7, jnp.int32),
        length_B=zeros + PROMPT,
        end_B=jnp.asarray([PROMPT + room for _, _, room, _ in rows], jnp.int32),
        done_B=jnp.asarray([done for *_, done in rows]),
        stops_BS=jnp.tile(jnp.asarray([*STOPS, -1, -1], jnp.int32), (batch, 1)),
        target_cache=(),
        draft_cache=(),
        sampling=None,
        rounds_B=zeros,
        drafted_B=zeros,
        accepted_BK=jnp.zeros((batch, SLOTS), jnp.int32),
    )
    tokens_BK, tau_B = (jnp.asarray(x, jnp.int32) for x in ([r[0] for r in rows], [r[1] for r in rows]))
    state, emitted_B = commit_all(state, tokens_BK, tau_B)
    text, length_B, done_B = (np.asarray(x) for x in (state.tokens_BL, state.length_B, state.done_B))
    outcomes = set()
    for b, row in enumerate(rows):
        wanted, done = commit_by_hand(*row)
        assert emitted_B[b] == len(wanted), row
        assert length_B[b] == PROMPT + len(wanted), row
        assert text[b].tolist() == [7] * PROMPT + wanted + [7] * (LENGTH - PROMPT - len(wanted)), row
        assert done_B[b] == done, row
        outcomes.add((len(wanted), done))
    assert len(outcomes) > 8


@pytest.mark.parametrize("block", [1, 2, 16])
def test_capacity_holds_prompt_answer_and_one_block(block):
    for prompt, new in itertools.product((1, 15, 16, 17, 100, 127, 128, 129, 1000), (1, 2, 111, 112, 128, 500)):
        padded, capacity = prefill_lengths([prompt, 1], new, block)
        assert padded >= max(prompt, 16)
        assert padded & (padded - 1) == 0
        assert capacity % 128 == 0
        assert capacity >= max(padded, prompt + new) + block
        assert capacity < max(padded, prompt + new) + block + 128


# ---------------------------------------------------------------------------------------------------------------------
# Between rounds


def test_the_protocol_is_enough():
    """The rigged target of these tests shares nothing with ours but the protocol."""
    assert isinstance(table_target(), Target)
    assert isinstance(dense_target(), TrainableTarget)
    assert not isinstance(table_target(), TrainableTarget)


@pytest.mark.one_cell
def test_invariant_and_progress_round_by_round():
    """One round at a time: the cache holds the text up to the anchor, finished rows stand still, and all at once agrees."""
    target = table_target()
    prompts = [random_prompt(row, length) for row, length in enumerate((2, 5, 9, 12))]
    texts = [prompt + reference.plain(target.next_token, prompt, 30).tokens for prompt in prompts]
    drafter = scripted_drafter(texts, good=[0, 1, BLOCK - 2, BLOCK - 1])
    begin = partial(start, target, drafter, prompts, DecodeConfig(20))
    state, lengths = begin()
    snapshots = []
    for done_rounds in range(1, 21):
        before = np.asarray(state.length_B)
        state = advance(target, drafter, state, 1)
        text, length, cached = (np.asarray(x) for x in (state.tokens_BL, state.length_B, state.target_cache["text_BC"]))
        for row, prompt in enumerate(prompts):
            n = length[row]
            assert text[row, :n].tolist() == texts[row][:n]
            np.testing.assert_array_equal(cached[row, : n - 1], text[row, : n - 1])
            step = min([1, 2, BLOCK - 1, BLOCK][row], len(prompt) + 20 - before[row])
            assert n - before[row] == step
        snapshots.append(finish(state, lengths))
        assert int(state.rounds_B.max()) == min(done_rounds, 19)
    assert bool(state.done_B.all())
    at_once = finish(advance(target, drafter, begin()[0]), lengths)
    assert at_once == snapshots[-1]
    assert advance(target, drafter, begin()[0], 0).rounds_B.max() == 0


def read(target, drafter, text):
    """Fresh caches of a text, read in one pass."""
    positions = jnp.arange(len(text), dtype=jnp.int32)[None]
    _, taps, cache = target.extend(target.params, text[None], positions, target.init_cache(1, CONTEXT), TAPS)
    return cache, drafter.extend_context(drafter.params, taps, positions, drafter.init_cache(1, CONTEXT))


def test_drafts_and_caches_after_rejections_equal_fresh_ones():
    """A useless drafter rejects in every round: each draft is the one made from scratch, and nothing rejected remains."""
    target, drafter = dense_target(), dense_drafter()
    state, lengths = start(target, drafter, [random_prompt(3, 9)], DecodeConfig(14))
    _, from_scratch, _ = reference.from_scratch(target, drafter)
    next_drafts = jax.jit(partial(draft_now, target, drafter))
    drafts = set()
    while not state.done_B.all():
        drafted = next_drafts(state)[0].tolist()
        assert drafted == from_scratch(state.tokens_BL[0, : int(state.length_B[0])].tolist())
        drafts.add(tuple(drafted))
        state = advance(target, drafter, state, 1)
    assert len(drafts) > 3
    n = int(state.length_B[0])
    assert n == lengths[0] + 14
    fresh = jax.jit(partial(read, target, drafter))
    text = np.asarray(state.tokens_BL)[0, : n - 1]
    for got, want in zip(
        jax.tree.leaves((state.target_cache, state.draft_cache)), jax.tree.leaves(fresh(jnp.asarray(text))), strict=True
    ):
        assert got.shape == want.shape
        np.testing.assert_allclose(got[:, :, : n - 1], want[:, :, : n - 1], rtol=1e-3, atol=1e-4)


@pytest.mark.one_cell
@pytest.mark.parametrize("seed", [None, 4])
def test_drafts_are_drawn_at_the_drafters_temperature(seed):
    """Each slot's draw is keyed by its row's seed, its position and the purpose; the argmax would be something else."""
    target, drafter = dense_target(), dense_drafter(temperature=1.3)
    options = DecodeConfig(14) if seed is None else DecodeConfig(14, temperature=0.7, seed=seed)
    state, _ = start(target, drafter, [random_prompt(3, 9), random_prompt(4, 6)], options)
    _, from_scratch, _ = reference.from_scratch(target, drafter)
    drafted_BJ = jax.jit(partial(draft_now, target, drafter))(state)
    for row in range(2):
        text = state.tokens_BL[row, : int(state.length_B[row])].tolist()
        keys = {"seed": (seed or 0) + row, "purpose": 1, "anchor": len(text) - 1, "temperature": 1.3}
        drawn = from_scratch(text, lambda x, at, keys=keys: reference.keyed_draw(x, position=at, **keys))
        assert drafted_BJ[row].tolist() == drawn
        assert drawn != from_scratch(text)


# ---------------------------------------------------------------------------------------------------------------------
# Cost


def test_state_is_donated_and_caches_are_updated_in_place():
    target, drafter = dense_target(), dense_drafter()
    state, _ = start(target, drafter, [random_prompt(0, 4)], DecodeConfig(14))
    caches = jax.tree.leaves((state.target_cache, state.draft_cache))
    size = sum(x.nbytes for x in caches)
    args = (target.params, drafter.params, state, jnp.int32(3))
    memory = decode.lower(*args, target=target, drafter=drafter).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size + state.tokens_BL.nbytes
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024, "an output has a buffer of its own"
    decode(*args, target=target, drafter=drafter)
    assert all(x.is_deleted() for x in caches)


def test_the_loop_never_leaves_the_device():
    target = table_target()
    drafter = constant_drafter(5)
    state, _ = start(target, drafter, [random_prompt(0, 4)], DecodeConfig(14))
    limit = jnp.int32(NO_LIMIT)
    program = str(decode.trace(target.params, drafter.params, state, limit, target=target, drafter=drafter).jaxpr)
    assert program.count("while[") == 1
    assert "callback" not in program
    with jax.transfer_guard("disallow"):
        state = decode(target.params, drafter.params, state, limit, target=target, drafter=drafter)
    assert bool(state.done_B.all())


def products(jaxpr):
    """Shapes of the operands of every matrix product, those of inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(operand.aval.shape for operand in equation.invars)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.one_cell
def test_context_is_projected_once_a_verified_token():
    """A round multiplies weights with the rows of its own block only: of the context so far nothing is projected again."""
    target, drafter = dense_target(), dense_drafter(head_dim=6, mlp_dim=20)
    state, _ = start(target, drafter, [random_prompt(0, 4)], DecodeConfig(14))
    program = decode.trace(target.params, drafter.params, state, jnp.int32(9), target=target, drafter=drafter).jaxpr
    with_weights = [(left, right) for left, right in products(program.jaxpr) if len(left) == len(right) == 2]
    assert {left[0] for left, _ in with_weights} == {BLOCK, BLOCK - 1}, "the head's rows are those of the drafted slots"
    keys_and_values = [right for _, right in with_weights if right == (HIDDEN, 12)]
    assert len(keys_and_values) == 8, "of the context and of the block, in each of two layers"


@pytest.mark.one_cell
def test_a_round_costs_the_same_however_many_there_were():
    """The first rounds of a text against its last ones: stretches of one length in turn, the median of their ratios, because one
    stretch that a busy machine left alone says nothing of the others."""
    target, drafter = dense_target(), dense_drafter()

    def stretch(state, rounds):
        before = time.perf_counter()
        state = decode(target.params, drafter.params, state, jnp.int32(rounds), target=target, drafter=drafter)
        return jax.block_until_ready(state), time.perf_counter() - before

    ratios = []
    for _ in range(25):
        state, _ = start(target, drafter, [random_prompt(0, 4)], DecodeConfig(120), [])
        state, early = stretch(jax.block_until_ready(state), 8)
        state, _ = stretch(state, 80)
        state, late = stretch(state, 8)
        ratios.append(late / early)
        assert int(state.rounds_B[0]) == 96
    assert np.median(ratios) < 1.3
