"""Drafter layers with a window, whose caches are rings: equal to a drafter that reads the whole text anew for every block."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny_models import BLOCK, HIDDEN, TAPS, VOCAB, dense_drafter, dense_target, random_prompt

from dflash_jax.config import DecodeConfig
from dflash_jax.decode import commit, verify, with_context
from dflash_jax.generate import generate, start

pytestmark = pytest.mark.one_cell

# Windows shorter and longer than a block of 6, bidirectional and causal, with and without a layer that reads everything. The rings
# have 16 and 32 slots.
DRAFTERS = {
    "two windows": {"sliding_window": (4, 20), "causal": (False, True)},
    "mixed": {"sliding_window": (None, 9), "causal": (True, False)},
}
ALL_KINDS = {"num_draft_layers": 3, "sliding_window": (4, 20, None), "causal": (False, True, True)}
NEW = 26
PROMPTS = [random_prompt(row, length) for row, length in enumerate((3, 50, 37, 71))]


@pytest.fixture(scope="module")
def models():
    """A target, a drafter, and what they give from scratch: the next token, and the next block's logits."""
    target, drafter = dense_target(), dense_drafter(**ALL_KINDS)
    next_token, draft, _ = reference.from_scratch(target, drafter)

    def block_logits(text):
        rows = []
        draft(text, lambda row, _: rows.append(row) or 0)
        return np.stack(rows)

    return target, drafter, next_token, draft, block_logits


@partial(jax.jit, static_argnames=("target", "drafter"))
def forced_round(params, draft_params, state, forced_BJ, target, drafter):
    """The logits from which a round would draft, and then a round of other drafts."""
    positions_BK = state.length_B[:, None] - 1 + jnp.arange(BLOCK, dtype=jnp.int32)[None]
    anchor_B = jnp.take_along_axis(state.tokens_BL, positions_BK[:, :1], axis=1)[:, 0]
    block_BKD = drafter.embed_block(draft_params, anchor_B, BLOCK, partial(target.embed, params))
    hidden_BKD = drafter.propose(draft_params, block_BKD, positions_BK, state.draft_cache)
    logits_BJV = drafter.unembed(hidden_BKD[:, 1:], drafter.head(draft_params, target, params), target, params)
    state, verified, context = verify(params, state, forced_BJ, None, target, drafter)
    state = with_context(draft_params, state, drafter, *context)
    return logits_BJV, *commit(state, verified.tokens_BK, verified.tau_B)


def test_every_round_drafts_as_from_scratch(models):
    """Rounds that accept none, some or all of a block, each row its own number, in rows that begin and end apart."""
    target, drafter, next_token, _, block_logits = models
    texts = [prompt + reference.plain(next_token, prompt, NEW).tokens for prompt in PROMPTS]
    state, _ = start(target, drafter, PROMPTS, DecodeConfig(NEW))
    random, emitted = np.random.default_rng(0), []
    while not bool(state.done_B.all()):
        lengths, live = np.asarray(state.length_B), ~np.asarray(state.done_B)
        # Wrong drafts after the accepted ones; a row that is done stands still.
        accepted = random.choice([0, *range(BLOCK), BLOCK - 1], len(texts))
        forced = np.zeros((len(texts), BLOCK - 1), np.int32)
        for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            truth = np.array((text[n:] + [0] * BLOCK)[: BLOCK - 1])
            forced[row] = (truth + (np.arange(BLOCK - 1) >= accepted[row])) % VOCAB
        args = (target.params, drafter.params, state, jnp.asarray(forced))
        logits_BJV, state, emitted_B = forced_round(*args, target=target, drafter=drafter)
        for row, n in enumerate(lengths):
            wanted = block_logits(texts[row][:n])
            np.testing.assert_allclose(logits_BJV[row], wanted, rtol=1e-3, atol=1e-3, err_msg=f"row {row}, length {n}")
            if live[row]:
                assert emitted_B[row] == min(accepted[row] + 1, len(texts[row]) - n)
        emitted += emitted_B.tolist()
    assert set(emitted) == set(range(BLOCK + 1))
    for row, text in enumerate(texts):
        assert state.tokens_BL[row, : len(text)].tolist() == text


def test_text_and_acceptance_equal_the_dense_ones(models):
    target, drafter, next_token, draft, _ = models
    wanted = [reference.speculative(next_token, draft, prompt, NEW, BLOCK) for prompt in PROMPTS]
    out = generate(target, drafter, PROMPTS, max_new_tokens=NEW)
    assert out.tokens == [answer.tokens for answer in wanted]
    assert [list(row.accepted_histogram) for row in out.stats.rows] == [answer.histogram for answer in wanted]


@jax.jit
def extend(taps_BTM, positions_BT, cache):
    drafter = dense_drafter(**DRAFTERS["two windows"])
    return drafter.extend_context(drafter.params, taps_BTM, positions_BT, cache)


@jax.jit
def propose(block_BKD, positions_BK, cache):
    drafter = dense_drafter(**DRAFTERS["two windows"])
    return drafter.propose(drafter.params, block_BKD, positions_BK, cache)


@pytest.mark.parametrize("size", [80, 7])
def test_contexts_read_in_chunks(size):
    """Chunks longer and shorter than the rings, the last one padded, in rows of unequal lengths: as the formulas say in float64."""
    drafter, lengths = dense_drafter(**DRAFTERS["two windows"]), np.array([75, 22, 5], np.int32)
    random = np.random.default_rng(size)
    taps_BTM = jnp.asarray(random.standard_normal((3, 84, len(TAPS) * HIDDEN)), jnp.float32)
    block_BKD = jnp.asarray(random.standard_normal((3, BLOCK, HIDDEN)), jnp.float32)
    cache = jax.tree.map(lambda x: x + 1e3, drafter.init_cache(3, 128))
    for first in range(0, 80, size):
        at_T = np.arange(first, first + size, dtype=np.int32)
        cache = extend(taps_BTM[:, first : first + size], jnp.asarray(np.where(at_T < lengths[:, None], at_T, -1)), cache)
    hidden = propose(block_BKD, jnp.asarray(lengths[:, None] + np.arange(BLOCK, dtype=np.int32)), cache)
    for row, anchor in enumerate(lengths.tolist()):
        wanted = reference.draft_hidden(drafter.params, drafter.config, taps_BTM[row], anchor, block_BKD[row])
        np.testing.assert_allclose(hidden[row], wanted, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Size, and going back


def cache_slots(drafter, capacity):
    cache = jax.eval_shape(lambda: drafter.init_cache(2, capacity))
    assert [x.shape for x in cache.keys] == [x.shape for x in cache.values]
    return [x.shape[2] for x in cache.keys]


def test_rings_do_not_grow_with_the_capacity():
    windowed, mixed = (dense_drafter(**changes) for changes in DRAFTERS.values())
    assert cache_slots(windowed, 8) == [8, 8]
    assert cache_slots(windowed, 128) == cache_slots(windowed, 2**20) == [16, 32]
    assert cache_slots(mixed, 128) == [128, 16]
    assert cache_slots(mixed, 2**20) == [2**20, 16]
    assert cache_slots(dense_drafter(), 2**20) == [2**20, 2**20]


def test_what_must_be_written_again():
    """Against rings kept as lists of positions: what the next block may read is there, or it lies in the part to write again."""
    assert dense_drafter().context_reach() is None
    assert dense_drafter().kept_context(7, 1000) == 7
    answers = set()
    for changes, reach in zip(DRAFTERS.values(), (19, 8), strict=True):
        drafter = dense_drafter(**changes)
        assert drafter.context_reach() == reach
        slots = cache_slots(drafter, 1024)
        for newest in range(0, 80, 3):
            for prefix in range(newest + 2):
                held = [{p for p in range(newest + 1) if p > newest - size} for size in slots]
                read = [range(max(prefix - w + 1, 0), prefix) for w in drafter.config.sliding_window if w is not None]
                rings = [ring for ring, w in zip(held, drafter.config.sliding_window, strict=True) if w is not None]
                whole = all(set(positions) <= ring for positions, ring in zip(read, rings, strict=True))
                kept = drafter.kept_context(prefix, newest)
                assert kept == (prefix if whole else max(prefix - reach, 0))
                answers.add((whole, kept == prefix))
    assert len(answers) == 2
