"""`generate` equals plain decoding and a Python loop without caches, token for token, whatever drafts and however it is batched."""

import dataclasses
import inspect
import math
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny_models import (
    BLOCK,
    CONTEXT,
    DRAFTER,
    MASK,
    TAPS,
    VOCAB,
    constant_drafter,
    dense_drafter,
    dense_target,
    random_prompt,
    scripted_drafter,
    table_target,
)

from dflash_jax.config import DecodeConfig
from dflash_jax.decode import decode, prefill
from dflash_jax.drafter import Drafter
from dflash_jax.errors import ConfigError, PromptError
from dflash_jax.generate import check_prompts, check_stop_tokens, check_whole, generate, rule_of, start, stream

NO_STOP = ()


@cache
def dense_twin():
    return reference.from_scratch(dense_target(), dense_drafter())


@cache
def table_twin():
    return reference.from_scratch(table_target(), dense_drafter())


def script_of(drafter, row=0):
    """A scripted drafter's draft, in Python."""
    script, good = (np.asarray(drafter.params[name][row]) for name in ("script_BL", "good_B"))

    def draft(text):
        return [int(script[len(text) - 1 + k] + (k > good)) % VOCAB for k in range(1, BLOCK)]

    return draft


def assert_row(out, row, wanted):
    """Tokens, reason and the acceptance of one row, against the Python loop."""
    assert out.tokens[row] == wanted.tokens
    assert out.finish_reason[row] == wanted.reason
    stats = out.stats.rows[row]
    if wanted.histogram:
        assert (stats.rounds, list(stats.accepted_histogram)) == (wanted.rounds, wanted.histogram)
    assert stats.emitted == len(wanted.tokens) - 1
    assert sum(stats.accepted_histogram) == stats.rounds
    assert stats.accepted == sum(k * n for k, n in enumerate(stats.accepted_histogram))
    assert stats.drafted == stats.rounds * (len(stats.accepted_histogram) - 1)


# ---------------------------------------------------------------------------------------------------------------------
# A real model

DENSE_PROMPTS = [random_prompt(length, length) for length in (1, 5, 6, 12)]


@pytest.mark.parametrize("kind", ["plain", "random", "constant", "perfect"])
def test_dense_target_equals_recomputing_everything(kind):
    """Unequal rows in one batch: 1 token, a block less one, a block, two blocks."""
    next_token, draft, _ = dense_twin()
    plain = [reference.plain(next_token, prompt, 2 * BLOCK + 3) for prompt in DENSE_PROMPTS]
    assert len({tuple(answer.tokens) for answer in plain}) == 4
    drafter = {
        "plain": lambda: None,
        "random": dense_drafter,
        "constant": lambda: constant_drafter(plain[0].tokens[3], rows=4),
        "perfect": lambda: scripted_drafter([p + a.tokens for p, a in zip(DENSE_PROMPTS, plain, strict=True)]),
    }[kind]()
    out = generate(dense_target(), drafter, DENSE_PROMPTS, 2 * BLOCK + 3, stop_token_ids=NO_STOP)
    for row, prompt in enumerate(DENSE_PROMPTS):
        rule = draft if kind == "random" else script_of(drafter, row) if drafter else lambda text: []
        block = BLOCK if drafter else 1
        wanted = reference.speculative(next_token, rule, prompt, 2 * BLOCK + 3, block)
        assert wanted.tokens == plain[row].tokens
        assert_row(out, row, wanted)
    taus = {"plain": 1.0, "perfect": (2 * BLOCK + 2) / 3}  # 14 tokens after the first: 6, 6 and the 2 that are left
    if kind in taus:
        assert out.stats.acceptance_length == pytest.approx(taus[kind])


@pytest.mark.one_cell
def test_dense_rows_equal_their_own_runs_and_ignore_their_neighbours():
    together = generate(dense_target(), dense_drafter(), DENSE_PROMPTS, 15)
    for row, prompt in enumerate(DENSE_PROMPTS):
        assert generate(dense_target(), dense_drafter(), [prompt], 15).tokens[0] == together.tokens[row]
    others = [random_prompt(50 + row, 3 + row) for row in range(4)]
    others[2] = DENSE_PROMPTS[2]
    assert generate(dense_target(), dense_drafter(), others, 15).tokens[2] == together.tokens[2]


@pytest.mark.one_cell
def test_own_head_embedding_and_learned_mask_decode():
    """A drafter of another width with everything its own: same text, and its own drafts are what the Python loop drafts."""
    own = {"own_embedding": True, "own_head": True, "learned_mask_embedding": True, "mask_token_id": None}
    drafter = dense_drafter(draft_hidden_dim=8, num_draft_layers=1, sliding_window=(), causal=(), **own)
    next_token, draft, _ = reference.from_scratch(dense_target(), drafter)
    prompt = DENSE_PROMPTS[1]
    assert_row(generate(dense_target(), drafter, [prompt], 9), 0, reference.speculative(next_token, draft, prompt, 9, BLOCK))


@pytest.mark.one_cell
def test_a_drafter_of_few_tokens_changes_no_text():
    """With a part of the vocabulary the drafts change, and nothing else does."""
    whole = dense_drafter(4, num_draft_layers=1, sliding_window=(), causal=())
    ids = tuple(range(1, VOCAB, 5))
    cut = Drafter(dataclasses.replace(whole.config, draft_token_ids=ids), whole.params)
    next_token, draft, _ = reference.from_scratch(dense_target(), cut)
    prompt = DENSE_PROMPTS[1]
    assert set(draft(prompt)) <= set(ids)
    out = generate(dense_target(), cut, [prompt], 24)
    assert_row(out, 0, reference.speculative(next_token, draft, prompt, 24, BLOCK))
    assert out.stats.pooled.accepted > 0, "else wrong drafts would not show"
    assert out.tokens[0] == reference.plain(next_token, prompt, 24).tokens


# ---------------------------------------------------------------------------------------------------------------------
# A rigged target: every length, stop and cap


def texts_of(target, prompts, length=60):
    return [prompt + reference.plain(target.next_token, prompt, length).tokens for prompt in prompts]


@pytest.mark.one_cell
@pytest.mark.parametrize("kind", ["random", "constant", "perfect", "half"])
@pytest.mark.parametrize("length", range(1, 2 * BLOCK + 1))
def test_prompt_lengths(kind, length):
    target, prompt = table_target(), random_prompt(100 + length, length)
    text = texts_of(target, [prompt])[0]
    drafter = {
        "random": dense_drafter,
        "constant": lambda: constant_drafter(text[length + 1]),
        "perfect": lambda: scripted_drafter([text]),
        "half": lambda: scripted_drafter([text], good=[2]),
    }[kind]()
    draft = table_twin()[1] if kind == "random" else script_of(drafter)
    out = generate(target, drafter, [prompt], 20)
    assert_row(out, 0, reference.speculative(target.next_token, draft, prompt, 20, BLOCK))
    assert out.tokens[0] == text[length : length + 20]


@pytest.mark.one_cell
@pytest.mark.parametrize("max_new_tokens", range(1, 3 * BLOCK + 2))
def test_every_length_cap(max_new_tokens):
    """Exactly as many tokens as asked; a perfect drafter commits a block a round, a useless one a token."""
    target, prompt = table_target(), random_prompt(1, 7)
    text = texts_of(target, [prompt])[0]
    wanted = text[7 : 7 + max_new_tokens]
    rounds = {"perfect": math.ceil((max_new_tokens - 1) / BLOCK), "useless": max_new_tokens - 1}
    for kind, good in (("perfect", BLOCK), ("useless", 0)):
        out = generate(target, scripted_drafter([text], good=[good]), [prompt], max_new_tokens)
        assert (out.tokens[0], out.finish_reason) == (wanted, ["length"])
        assert out.stats.pooled.rounds == rounds[kind]
    assert generate(target, None, [prompt], max_new_tokens).tokens[0] == wanted


STOP = 33


@pytest.mark.one_cell
@pytest.mark.parametrize("cap", range(1, 11))
@pytest.mark.parametrize("good", [BLOCK, 2, 0])
def test_stop_at_every_place_against_every_cap(cap, good):
    """The stop stands at position 9, so rows of 2..9 tokens write it as their 8th..1st: at every slot, and as the prefill token.

    The earlier of stop and cap wins, nothing follows a stop, and a stop at the cap is a stop.
    """
    target = table_target({9: STOP})
    prompts = [[1 + token % 30 for token in random_prompt(200 + length, length)] for length in range(2, 10)]
    texts = texts_of(target, prompts)
    drafter = scripted_drafter(texts, good=[good] * 8)
    out = generate(target, drafter, prompts, cap, stop_token_ids=[STOP])
    reasons = set()
    for row, prompt in enumerate(prompts):
        wanted = reference.speculative(target.next_token, script_of(drafter, row), prompt, cap, BLOCK, stops=(STOP,))
        assert wanted.tokens == reference.plain(target.next_token, prompt, cap, stops=(STOP,)).tokens
        assert_row(out, row, wanted)
        reasons.add((wanted.reason, len(wanted.tokens)))
    assert ("stop", 1) in reasons


@pytest.mark.one_cell
def test_stop_sets():
    """The target's own stops by default, each alone; the caller's instead; none at all; a stop inside the prompt is text."""
    prompt = [4, 11, 12, 5]
    target = table_target({6: 11, 9: 12}, stop_token_ids=(12, 11))
    text = texts_of(table_target({6: 11, 9: 12}), [prompt])[0]
    assert text[4] not in (11, 12)
    drafter = scripted_drafter([text])

    def run(stops):
        out = generate(target, drafter, [prompt], 10, stop_token_ids=stops)
        return len(out.tokens[0]), out.finish_reason[0]

    assert run(None) == (3, "stop")
    assert run([12]) == (6, "stop")
    assert run([]) == (10, "length")
    assert run([11, *range(40, 52)]) == (3, "stop")  # more stops than one bucket of 8


@pytest.mark.one_cell
@pytest.mark.parametrize("good", [BLOCK, 1])
def test_mask_token_as_text_is_kept(good):
    """The target may write the mask token, once, or again and again."""
    for script in ({8: MASK}, {position: MASK for position in range(7, 25)}):
        target, prompt = table_target(script), random_prompt(3, 6)
        text = texts_of(target, [prompt])[0]
        drafter = scripted_drafter([text], good=[good])
        out = generate(target, drafter, [prompt], 20)
        assert MASK in out.tokens[0]
        assert_row(out, 0, reference.speculative(target.next_token, script_of(drafter), prompt, 20, BLOCK))


@pytest.mark.one_cell
@pytest.mark.parametrize("new", [109, 110, 111])
@pytest.mark.parametrize("good", [BLOCK, 3])
def test_capacity_edge(new, good):
    """12 + 110 + one block fill 128 cache slots to the last; one token more takes the next size."""
    target, prompt = table_target(max_position=512), random_prompt(5, 12)
    text = texts_of(target, [prompt], 130)[0]
    out = generate(target, scripted_drafter([text], good=[good]), [prompt], new)
    assert out.tokens[0] == text[12 : 12 + new]
    state, _ = start(target, scripted_drafter([text]), [prompt], DecodeConfig(new))
    assert state.tokens_BL.shape == (1, 128 if new <= 110 else 256)


@pytest.mark.one_cell
@pytest.mark.parametrize("length", [1, 100, CONTEXT - 2, CONTEXT - 1])
def test_context_edge(length):
    """An answer ends where the context does, with "length"; asking for more tokens than memory could hold costs nothing."""
    target, prompt = table_target(), random_prompt(6, length)
    text = texts_of(target, [prompt], CONTEXT)[0]
    for drafter in (scripted_drafter([text]), scripted_drafter([text], good=[2]), None):
        out = generate(target, drafter, [prompt], 2**40)
        assert (out.tokens[0], out.finish_reason[0]) == (text[length:CONTEXT], "length")
    state, _ = start(target, None, [prompt], DecodeConfig(2**40))
    assert state.tokens_BL.shape[1] <= 256


@pytest.mark.one_cell
@pytest.mark.parametrize("rows", range(1, 6))
def test_batches_equal_single_runs(rows):
    """Every batch size (spare rows fill it up to a power of two), unequal rows that stop and accept differently."""
    target = table_target({20: STOP})
    prompts = [random_prompt(300 + row, 2 + 3 * row) for row in range(rows)]
    texts = texts_of(target, prompts)
    good = [0, 1, BLOCK - 2, BLOCK - 1, 3][:rows]
    out = generate(target, scripted_drafter(texts, good=good), prompts, 17, stop_token_ids=[STOP])
    for row, prompt in enumerate(prompts):
        alone_drafter = scripted_drafter([texts[row]], good=[good[row]])
        alone = generate(target, alone_drafter, [prompt], 17, stop_token_ids=[STOP])
        assert (out.tokens[row], out.finish_reason[row]) == (alone.tokens[0], alone.finish_reason[0])
        assert out.stats.rows[row] == alone.stats.rows[0]
    assert len(out.tokens) == len(out.stats.rows) == rows
    pooled, singles = out.stats.pooled, out.stats.rows
    for name in ("rounds", "drafted", "accepted", "emitted"):
        assert getattr(pooled, name) == sum(getattr(row, name) for row in singles)
    assert out.stats.acceptance_length == pooled.emitted / pooled.rounds
    assert out.stats.acceptance_length_macro == pytest.approx(np.mean([row.emitted / row.rounds for row in singles]))
    shares = pooled.accepted_per_position
    assert len(shares) == BLOCK - 1
    assert list(shares) == sorted(shares, reverse=True)
    assert sum(shares) * pooled.rounds == pytest.approx(pooled.accepted)


WIDE = [0, 1, BLOCK - 2, BLOCK - 1]


def test_plain_decoding_of_a_fixed_width_is_bfloat16_speculation_bit_for_bit():
    """Passes of a block's width round alike, whatever the other slots hold. Rows of unequal length, capped and stopped."""
    target = dense_target().with_dtype("bfloat16")
    wide = generate(target, None, DENSE_PROMPTS, 2 * BLOCK + 3, block_size=BLOCK, stop_token_ids=NO_STOP)
    assert wide.stats.acceptance_length == 1
    assert [row.rounds for row in wide.stats.rows] == [2 * BLOCK + 2] * 4
    for good in (WIDE, WIDE[::-1]):
        drafter = scripted_drafter([p + t for p, t in zip(DENSE_PROMPTS, wide.tokens, strict=True)], good=good)
        fast = generate(target, drafter, DENSE_PROMPTS, 2 * BLOCK + 3, stop_token_ids=NO_STOP)
        assert fast.tokens == wide.tokens
        assert fast.stats.acceptance_length > 2
    stop = wide.tokens[2][9]
    stopped = generate(target, None, DENSE_PROMPTS, 2 * BLOCK + 3, block_size=BLOCK, stop_token_ids=[stop])
    assert stopped.tokens[2] == wide.tokens[2][: wide.tokens[2].index(stop) + 1]
    assert stopped.finish_reason[2] == "stop"


@pytest.mark.parametrize(("slots", "batch"), [(2, 1), (5, 1), (BLOCK, 4), (16, 1)])
def test_a_pass_of_bfloat16_gives_each_slot_the_same_bits(slots, batch):
    """A token alone in slot 0 among slots of anything, and inside a block of its text: hidden states and taps do not differ."""
    target = dense_target().with_dtype("bfloat16")
    random = np.random.default_rng(slots)
    text = random.integers(0, VOCAB, (batch, 3 * slots)).astype(np.int32)

    @jax.jit
    def read(tokens_BK, first, cache):
        positions_BK = first + jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
        hidden_BKD, taps_BKM, cache = target.extend(target.params, tokens_BK, positions_BK, cache, TAPS)
        return (target.unembed(target.params, hidden_BKD), taps_BKM), cache

    alone, cache = [], target.init_cache(batch, CONTEXT)
    for at in range(2 * slots):
        filler = random.integers(0, VOCAB, (batch, slots)).astype(np.int32)
        filler[:, 0] = text[:, at]
        out, cache = read(filler, np.int32(at), cache)
        alone.append([np.asarray(x)[:, 0] for x in out])
    cache = target.init_cache(batch, CONTEXT)
    for first in range(0, 2 * slots, slots):
        out, cache = read(text[:, first : first + slots], np.int32(first), cache)
        for slot in range(slots):
            for together, one in zip(out, alone[first + slot], strict=True):
                np.testing.assert_array_equal(np.asarray(together)[:, slot], one)


@pytest.mark.one_cell
def test_plain_decoding_of_a_fixed_width_at_the_edges():
    """Sampled, up to a stop and up to the context's end, past which the other slots lie."""
    target, options = table_target({20: STOP}), {"temperature": 1.0, "seed": [3, 3], "stop_token_ids": [STOP]}
    plain, wide = (generate(target, None, [[1, 2], [3] * 100], 10**6, block_size=size, **options) for size in (None, BLOCK))
    assert (wide.tokens, wide.finish_reason) == (plain.tokens, plain.finish_reason)
    assert wide.finish_reason == ["stop", "length"]


@pytest.mark.one_cell
def test_a_request_after_a_longer_one_is_like_a_first_one():
    target, drafter = dense_target(), dense_drafter()
    prompt = DENSE_PROMPTS[1]
    fresh = generate(target, drafter, [prompt], 15)
    generate(target, drafter, [random_prompt(8, 16)], 100)
    again = generate(target, drafter, [prompt], 15)
    assert again == fresh


@pytest.mark.one_cell
@pytest.mark.parametrize("block_size", [2, 4])
def test_smaller_blocks_than_trained(block_size):
    target, prompt = table_target(), random_prompt(9, 5)
    text = texts_of(target, [prompt])[0]
    out = generate(target, scripted_drafter([text]), [prompt], 13, block_size=block_size)
    assert out.tokens[0] == text[5:18]
    assert out.stats.pooled.rounds == 12 // block_size
    assert out.stats.acceptance_length == block_size


def test_no_round_has_no_acceptance_length():
    out = generate(table_target(), constant_drafter(3), [[1, 2, 3]], 1)
    assert out.stats.pooled.rounds == 0
    assert math.isnan(out.stats.acceptance_length)
    assert math.isnan(out.stats.acceptance_length_macro)
    assert all(math.isnan(x) for x in out.stats.pooled.accepted_per_position)


@pytest.mark.one_cell
@pytest.mark.parametrize("new", [1, 2, 40])
def test_stream_equals_generate(new):
    target, prompt = table_target({30: STOP}), random_prompt(4, 9)
    drafter = scripted_drafter(texts_of(target, [prompt]), good=[1])
    *pieces, last = stream(target, drafter, prompt, DecodeConfig(new), [STOP])
    assert last == generate(target, drafter, [prompt], new, stop_token_ids=[STOP])
    assert [token for piece in pieces for token in piece] == last.tokens[0]
    assert all(pieces)
    assert len(pieces[0]) == 1
    assert len(pieces) == {1: 1, 2: 2, 40: 4}[new]  # 21 tokens after the first, 2 a round, 4 rounds a piece


def test_nothing_compiles_twice_within_a_bucket():
    """Other prompts, lengths, caps, seeds, stops and parameters of the same shapes run the programs that are there."""
    target, drafter = table_target(), constant_drafter(3)
    sampled = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 1}
    generate(target, drafter, [[1, 2, 3]], 5)
    generate(target, drafter, [[1, 2, 3]], 5, **sampled)
    before = prefill._cache_size(), decode._cache_size()
    for length, new in ((1, 1), (7, 90), (16, 106)):
        generate(target, drafter, [random_prompt(length, length)], new, stop_token_ids=range(40, 40 + min(length, 8)))
        generate(table_target({9: 4}), constant_drafter(4), [random_prompt(length, length)], new)
        generate(target, drafter, [[5] * length], new, temperature=1.5, top_k=0, min_p=0.1, seed=7)
    assert (prefill._cache_size(), decode._cache_size()) == before
    generate(target, drafter, [[1] * 33], 5)  # the count does count
    assert prefill._cache_size() == before[0] + 1
    assert decode._cache_size() == before[1]


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def other(**changes):
    """A drafter whose config does not fit; its parameters are never looked at."""
    return Drafter(dataclasses.replace(DRAFTER, **changes), ())


LONG = [1] * CONTEXT
BAD = {
    "no prompts": (lambda: {"prompts": []}, PromptError, "there is no prompt"),
    "empty prompt": (lambda: {"prompts": [[1], []]}, PromptError, "prompt 1 is empty"),
    "id too large": (
        lambda: {"prompts": [[1], [2, VOCAB]]},
        PromptError,
        f"prompt 1 holds the token id {VOCAB}: ids lie in 0..{VOCAB - 1}",
    ),
    "negative id": (lambda: {"prompts": [[3, -1]]}, PromptError, "prompt 0 holds the token id -1"),
    "too long": (
        lambda: {"prompts": [LONG]},
        PromptError,
        f"prompt 0 has {CONTEXT} tokens; the context has room for {CONTEXT - 1}",
    ),
    "no tokens": (lambda: {"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0"),
    "block too small": (lambda: {"block_size": 1}, ConfigError, f"block_size is 1: .* 2..{BLOCK} slots"),
    "block too large": (lambda: {"block_size": BLOCK + 1}, ConfigError, f"block_size is {BLOCK + 1}"),
    "width of a pass": (
        lambda: {"drafter": None, "block_size": 0},
        ConfigError,
        "block_size is 0: give a whole number, 1 or more",
    ),
    "row": (lambda: {"temperature": [0.5, 1.0]}, ConfigError, "temperature has 2 values for 1 rows"),
    "temperature": (lambda: {"temperature": -1.0}, ConfigError, "temperature is -1.0"),
    "top_k": (lambda: {"top_k": -2}, ConfigError, "top_k is -2"),
    "top_p": (lambda: {"top_p": 0.0}, ConfigError, "top_p is 0.0"),
    "min_p": (lambda: {"min_p": 1.0}, ConfigError, "min_p is 1.0"),
    "seed": (lambda: {"seed": -1}, ConfigError, "seed is -1"),
    "width": (
        lambda: {"drafter": other(target_hidden_dim=8, draft_hidden_dim=8)},
        ConfigError,
        "target_hidden_dim is 8, but",
    ),
    "vocabulary": (lambda: {"drafter": other(vocab_size=62)}, ConfigError, "vocab_size is 62, but the target has 61"),
    "depth": (lambda: {"drafter": other(num_target_layers=4)}, ConfigError, "num_target_layers is 4, but the target has 2"),
    "mask stops": (
        lambda: {"target": table_target(stop_token_ids=(MASK,))},
        ConfigError,
        f"mask_token_id {MASK} is a stop or pad token",
    ),
    "mask pads": (lambda: {"target": table_target(pad_token_id=MASK)}, ConfigError, f"mask_token_id {MASK} is a stop or pad token"),
}


@pytest.mark.one_cell
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name):
    changes, error, message = BAD[name]
    good = {"target": table_target(), "drafter": constant_drafter(1), "prompts": [[1, 2]], "max_new_tokens": 3}
    before = prefill._cache_size()
    with pytest.raises(error, match=message):
        generate(**(good | changes()))
    assert prefill._cache_size() == before, "refused before anything ran"


@pytest.mark.one_cell
@pytest.mark.parametrize(
    ("prompts", "mend"),
    [
        ("hello", "it is text"), (["hello"], "it is text"), ([1, 2, 3], "list of prompts"), (np.array([1, 2]), "list of prompts"),
        ([[1.5, 2]], "whole numbers"), ([[[1, 2], [3]]], "one list"), ([[True]], "whole numbers"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_token_ids_is_refused(prompts, mend):
    with pytest.raises(PromptError, match=f"prompt 0 is not a list of token ids: .*{mend}"):
        inspect.unwrap(check_prompts)(table_target(), prompts)


def test_unknown_verify_rule_is_refused():
    options = SimpleNamespace(verify="guess", temperature=1.0)  # the type checker of the tests would object to a DecodeConfig
    with pytest.raises(ConfigError, match="verify 'guess' is unknown"):
        inspect.unwrap(rule_of)(options)


@pytest.mark.one_cell
@pytest.mark.parametrize("ids", [[VOCAB], [-1], [1.5], ["2"], [True], "12", 3])
def test_what_is_no_stop_token_is_refused(ids):
    with pytest.raises(ConfigError, match="token"):
        inspect.unwrap(check_stop_tokens)(table_target(), ids)


@pytest.mark.one_cell
def test_stop_tokens_come_in_any_collection():
    for ids in ([5, 2, 5], (2, 5), {2, 5}, np.array([5, 2]), jnp.array([5, 2])):
        assert inspect.unwrap(check_stop_tokens)(table_target(), ids) == [2, 5]
    assert check_stop_tokens(table_target(), None) == sorted(table_target().config.stop_token_ids)


@pytest.mark.one_cell
def test_whole_numbers_become_pythons_own():
    """A narrow one would overflow where lengths are added up."""
    assert check_whole("n", np.uint8(200)) + 200 == 400
    for number in (True, 2.0, None, 0):
        with pytest.raises(ConfigError, match="^n is"):
            check_whole("n", number)
