"""One law from logits to tokens: against sorting in numpy, against frequencies, and keyed by position."""

import inspect
import itertools
import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny_models import (
    BLOCK,
    constant_drafter,
    dense_drafter,
    dense_target,
    random_prompt,
    scripted_drafter,
    table_target,
)

from dflash_jax.config import DecodeConfig
from dflash_jax.decode import decode
from dflash_jax.errors import ConfigError
from dflash_jax.generate import generate, start
from dflash_jax.sampling import DRAFT_DRAW, TARGET_DRAW, Sampling, draw, process_logits, sampling_rows

B, K, V = 6, 4, 61
process = jax.jit(process_logits)
jitted_draw = jax.jit(draw, static_argnames="purpose")


def logits(seed=0, shape=(B, K, V), scale=3.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def rows(*settings, seeds=None):
    """One (temperature, top_k, top_p, min_p) a row."""
    columns = list(zip(*settings, strict=True))
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    seeds = range(len(settings)) if seeds is None else seeds
    return Sampling(*(jnp.asarray(c, kind) for c, kind in zip(columns, kinds, strict=True)), jnp.asarray(list(seeds), jnp.uint32))


SETTINGS = {
    "temperature": [(t, 0, 1.0, 0.0) for t in (0.0, 0.1, 0.7, 1.0, 1.3, 10.0)],
    "top-k": [(1.0, k, 1.0, 0.0) for k in (1, 2, 5, 60, 61, 1000)],
    "top-p": [(0.7, 0, p, 0.0) for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 1.0)],
    "min-p": [(1.3, 0, 1.0, p) for p in (0.0, 1e-4, 0.01, 0.1, 0.5, 0.999)],
    "together": [
        (0.7, 5, 0.8, 0.0),
        (1.3, 20, 0.9, 0.05),
        (1.0, 3, 0.3, 0.0),
        (2.0, 40, 1.0, 0.2),
        (0.5, 0, 0.6, 0.1),
        (1.0, 7, 1.0, 0.0),
    ],
}


@pytest.mark.one_cell
@pytest.mark.parametrize("name", SETTINGS)
def test_process_logits_against_sorting(name):
    """Which tokens remain and at what logits, each row with its own settings."""
    for seed in range(10):
        x = logits(seed)
        ours = np.asarray(process(x, rows(*SETTINGS[name])))
        for b, k in np.ndindex(B, K):
            wanted = reference.process_logits(x[b, k], *SETTINGS[name][b])
            np.testing.assert_allclose(ours[b, k], wanted, rtol=1e-5, err_msg=f"{SETTINGS[name][b]}, seed {seed}")


def test_what_is_off_cuts_nothing_and_top_k_always_cuts():
    """Sums of rounded probabilities must decide neither: top_p 1 keeps every token, top_k 5 keeps 5 of them."""
    x = logits(1, (B, 50, V), 8.0)
    off, five = rows(*B * [(1.0, 0, 1.0, 0.0)]), rows(*B * [(1.0, 5, 1.0, 0.0)])
    np.testing.assert_array_equal(process(x, off), x)
    assert (np.isfinite(np.asarray(process(x, five))).sum(-1) == 5).all()


def test_ties_and_impossible_tokens():
    """Equal logits stay or go together; a token the model forbids stays forbidden."""
    x = jnp.asarray([[[1.0, 3.0, 2.0, 2.0, -jnp.inf, 0.0]]])
    got = process(x, rows((1.0, 2, 1.0, 0.0)))[0, 0]
    np.testing.assert_array_equal(got, [-jnp.inf, 3.0, 2.0, 2.0, -jnp.inf, -jnp.inf])
    np.testing.assert_array_equal(process(x, rows((1.0, 0, 1.0, 0.0)))[0, 0], x[0, 0])


POSITIONS = np.arange(4000, dtype=np.int32).reshape(1, -1)


@pytest.mark.one_cell
@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (0.7, 4, 1.0, 0.0), (1.3, 0, 0.7, 0.05)])
def test_frequencies_follow_the_law(setting):
    x = logits(2, (1, 1, 8), 1.0)
    sampling = rows(setting, seeds=[11])
    tokens = np.asarray(jitted_draw(np.broadcast_to(x, (1, 4000, 8)), POSITIONS, sampling, TARGET_DRAW))[0]
    law = np.exp(reference.process_logits(x[0, 0], *setting))
    law /= law.sum()
    counts = np.bincount(tokens, minlength=8)
    assert (counts[law == 0] == 0).all()
    chi2 = ((counts - 4000 * law) ** 2 / np.maximum(4000 * law, 1e-9))[law > 0].sum()
    freedom = (law > 0).sum() - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom), f"chi-square {chi2:.1f} with {freedom} degrees of freedom"


@pytest.mark.one_cell
def test_a_draw_depends_on_seed_position_and_purpose_only():
    """The same token whatever the width of the pass, its batch row, and the settings of other rows."""
    setting, x = (1.0, 0, 1.0, 0.0), logits(3)
    positions = np.broadcast_to(np.arange(10, 10 + K, dtype=np.int32), (B, K))
    whole = np.asarray(jitted_draw(x, positions, rows(*B * [setting]), TARGET_DRAW))
    for k in range(K):
        one = jitted_draw(x[:, k : k + 1], positions[:, k : k + 1], rows(*B * [setting]), TARGET_DRAW)
        np.testing.assert_array_equal(np.asarray(one)[:, 0], whole[:, k])
    alone = jitted_draw(x[4:5], positions[4:5], rows(setting, seeds=[4]), TARGET_DRAW)
    np.testing.assert_array_equal(np.asarray(alone)[0], whole[4])
    same = np.zeros((B, K, V), np.float32)
    other_purpose, other_seed = (
        np.asarray(jitted_draw(same, positions, rows(*B * [setting], seeds=seeds), purpose))
        for seeds, purpose in ((range(B), DRAFT_DRAW), (range(B, 2 * B), TARGET_DRAW))
    )
    flat = np.asarray(jitted_draw(same, positions, rows(*B * [setting]), TARGET_DRAW))
    for other in (other_purpose, other_seed, flat[:, ::-1]):
        assert (other != flat).mean() > 0.5
    assert len(np.unique(flat)) > 10


def test_draws_equal_the_reference():
    positions = np.asarray([[0, 1, 2, 3], [5, 6, 7, 8], [100, 200, 300, 400]], np.int32)
    settings, x = [(0.7, 0, 1.0, 0.0), (1.3, 9, 1.0, 0.0), (1.0, 0, 0.8, 0.02)], logits(4, (3, 4, V))
    got = np.asarray(jitted_draw(x, positions, rows(*settings, seeds=[3, 9, 2**31]), TARGET_DRAW))
    for b, k in np.ndindex(3, 4):
        names = dict(zip(("temperature", "top_k", "top_p", "min_p"), settings[b], strict=True))
        assert int(got[b, k]) == reference.keyed_draw(x[b, k], [3, 9, 2**31][b], int(positions[b, k]), **names)


@pytest.mark.one_cell
def test_greedy_rows_in_a_sampled_batch_are_greedy():
    x = logits(5)
    positions = np.broadcast_to(np.arange(K, dtype=np.int32), (B, K))
    mixed = jitted_draw(x, positions, rows(*[(t, 3, 0.9, 0.0) for t in (0.0, 5.0, 0.0, 5.0, 0.0, 5.0)]), TARGET_DRAW)
    greedy = jitted_draw(x, positions, None, TARGET_DRAW)
    np.testing.assert_array_equal(greedy, x.argmax(-1))
    mixed, greedy = np.asarray(mixed), np.asarray(greedy)
    np.testing.assert_array_equal(mixed[::2], greedy[::2])
    assert (mixed[1::2] != greedy[1::2]).any()


@pytest.mark.one_cell
def test_rows_draw_with_their_own_seed():
    sampling = sampling_rows(3, 0.5, 7, 0.9, 0.1, 40)
    assert sampling.seed_B.tolist() == [40, 41, 42]
    assert [x.tolist() for x in (sampling.top_k_B, sampling.temperature_B)] == [[7] * 3, [0.5] * 3]
    np.testing.assert_allclose(sampling.top_p_B, [0.9] * 3)
    np.testing.assert_allclose(sampling.min_p_B, [0.1] * 3)


GOOD = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
BAD = [("temperature", -0.1), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan)]
BAD += [("min_p", -0.1), ("min_p", 1.0), ("min_p", math.nan), ("seed", -1), ("seed", 2**31)]


@pytest.mark.one_cell
@pytest.mark.parametrize(("name", "value"), BAD)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}: give"):
        sampling_rows(1, **(GOOD | {name: value}))


def test_every_parameter_takes_one_value_a_row():
    """Lists, tuples and arrays; a list of seeds is taken as it is."""
    sampling = sampling_rows(3, [0, 0.5, 1], (0, 5, 2), np.array([1.0, 0.9, 0.25]), jnp.asarray([0.0, 0.5, 0.25]), [7, 7, 2])
    wanted = ([0, 0.5, 1], [0, 5, 2], [1.0, np.float32(0.9), 0.25], [0, 0.5, 0.25], [7, 7, 2])
    assert [x.tolist() for x in sampling] == [*map(list, wanted)]
    assert [x.dtype for x in sampling] == ["float32", "int32", "float32", "float32", "uint32"]
    assert sampling_rows(0).seed_B.shape == (0,)


BAD_ROWS = [
    ("temperature", [0.5], "temperature has 1 values for 2 rows: give one number, or one a prompt"),
    ("seed", (1, 2, 3), "seed has 3 values for 2 rows"),
    ("temperature", [0.5, -1], "temperature is -1 in row 1: give 0"),
    ("temperature", [0.5, math.inf], "temperature is inf in row 1"),
    ("temperature", 1e-9, "temperature is 1e-09: give 0"),
    ("temperature", "hot", "temperature is 'hot': give"),
    ("temperature", None, "temperature is None: give"),
    ("top_k", [1.5, 2], "top_k is 1.5 in row 0: give a whole number"),
    ("top_k", np.array([2.0, 2.0]), "top_k is 2.0 in row 0"),
    ("top_k", True, "top_k is True: give a whole number"),
    ("top_k", 2**31, "top_k is 2147483648: give"),
    ("top_p", [1.0, math.nan], "top_p is nan in row 1: give a share"),
    ("top_p", 1e-60, "top_p is 1e-60: give a share"),
    ("top_p", [[0.5, 0.5], [1, 1]], r"top_p is \[0.5, 0.5\] in row 0: give a share"),
    ("min_p", [True, 0.5], "min_p is True in row 0: give a share"),
    ("min_p", 1 - 1e-12, "min_p is 0.999999999999: give a share"),  # 1 in float32
    ("seed", [1, 2**31], "seed is 2147483648 in row 1: give a whole number"),
    ("seed", 1.0, "seed is 1.0: give a whole number"),
]


@pytest.mark.one_cell
@pytest.mark.parametrize(("name", "value", "message"), BAD_ROWS)
def test_bad_values_are_refused_with_their_row(name, value, message):
    with pytest.raises(ConfigError, match=message):
        inspect.unwrap(sampling_rows)(2, **(GOOD | {name: value}))  # the tests' type checker would object first


def parts(program):
    """The jaxprs inside an equation's parameters."""
    for value in program.params.values():
        for one in value if isinstance(value, (tuple, list)) else [value]:
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner


def needed(jaxpr, sampled):
    """Primitives that a call runs: of every `cond` one branch, the later if rows are sampled."""
    names = []
    for program in jaxpr.eqns:
        inside = [*parts(program)]
        if program.primitive.name == "cond":
            inside = inside[1:] if sampled else inside[:1]
        names += [program.primitive.name, *itertools.chain(*(needed(inner, sampled) for inner in inside))]
    return names


RANDOM = {"random_bits", "random_fold_in", "random_seed", "threefry2x32"}


@pytest.mark.one_cell
@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_greedy_batch_makes_no_noise_and_sorts_nothing(rule):
    """Although its program could: an engine passes `Sampling` always. A sampled one processes drafts and target's logits once."""
    target, drafter = dense_target(), dense_drafter()
    state, _ = start(target, drafter, [PROMPTS[0]], DecodeConfig(5, temperature=1.0))
    traced = decode.trace(target.params, drafter.params, state, jnp.int32(1), target=target, drafter=drafter, rule=rule)
    greedy, sampled = (needed(traced.jaxpr.jaxpr, sampled) for sampled in (False, True))
    assert not RANDOM & {*greedy}
    assert "sort" not in greedy
    assert RANDOM & {*sampled}
    assert sampled.count("sort") == (1 if rule == "match" else 2)


@pytest.mark.one_cell
def test_the_compiled_program_keeps_that_choice():
    """XLA did not turn the choice into computing both: sorting and random bits are in branches only."""
    x, positions, sampling = logits(0, (2, 3, 4096)), jnp.zeros((2, 3), jnp.int32), rows((0.0, 5, 1.0, 0.0), (0.0, 0, 1.0, 0.0))
    text = jitted_draw.lower(x, positions, sampling, purpose=TARGET_DRAW).compile().as_text()
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) .*?\{\n(.*?)^\}", text, flags=re.MULTILINE | re.DOTALL))
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", text, flags=re.MULTILINE)
    unconditional, waiting = "", [entry]
    while waiting:
        for line in bodies[waiting.pop()].splitlines():
            if " conditional(" not in line:
                unconditional += line
                waiting += [name for name in re.findall(r"%([\w.-]+)", line) if name in bodies]
    for work in (" sort(", "shift-right-logical"):  # the latter is threefry
        assert work in text
        assert work not in unconditional


# ---------------------------------------------------------------------------------------------------------------------
# In the decode loop

PROMPTS = [random_prompt(length, length) for length in (1, 5, 6, 12)]
# Draws compare in float64 with float32 noise; a near-tie of the two could flip, but not with these seeds.
SAMPLING = [
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6, "min_p": 0.02},
]


@cache
def dense_twin():
    return reference.from_scratch(dense_target())


@pytest.mark.parametrize("options", SAMPLING, ids=str)
def test_sampled_output_equals_plain_sampling_for_every_drafter(options):
    """Row r draws with seed + r, keyed by position, so drafts change nothing; and both are what the law and the keys say."""
    _, _, logits_of = dense_twin()
    drafters = (None, dense_drafter(temperature=0.8))
    outs = [generate(dense_target(), drafter, PROMPTS, 12, seed=5, verify="match", **options) for drafter in drafters]
    assert outs[0].tokens == outs[1].tokens
    assert outs[0].tokens != generate(dense_target(), None, PROMPTS, 12, seed=6, **options).tokens
    for row in (0, 3):
        wanted = reference.plain(
            lambda text, row=row: reference.keyed_draw(logits_of(text), 5 + row, len(text), **options), PROMPTS[row], 12
        )
        assert outs[0].tokens[row] == wanted.tokens


@pytest.mark.one_cell
@pytest.mark.parametrize("good", [0, 2, BLOCK])
def test_sampled_output_with_rigged_drafts(good):
    """A drafter that knows the draws commits whole blocks; one that misses changes nothing but the rounds."""
    target, options = table_target(), {"temperature": 0.9, "top_k": 20, "seed": 11, "verify": "match"}
    prompt = random_prompt(2, 5)
    answer = reference.plain(
        lambda text: reference.keyed_draw(target.logits(text), 11, len(text), temperature=0.9, top_k=20), prompt, 19
    )
    assert answer.tokens != reference.plain(target.next_token, prompt, 19).tokens
    out = generate(target, scripted_drafter([prompt + answer.tokens], good=[good]), [prompt], 19, **options)
    assert out.tokens[0] == answer.tokens
    assert out.stats.pooled.rounds == 18 // min(good + 1, BLOCK)


MIXED = {"temperature": [0.0, 0.7, 1.3, 0.9], "top_k": (0, 9, 0, 3), "min_p": [0, 0, 0.05, 0], "seed": np.array([3, 8, 3, 2])}


@pytest.mark.one_cell
def test_a_row_of_a_mixed_batch_is_what_it_is_without_the_others():
    """Greedy and sampled rows together, each with its own settings: each text is what it is in a batch of its own kind."""
    target, drafter = dense_target(), dense_drafter(temperature=0.8)
    together = generate(target, drafter, PROMPTS, 12, **MIXED)
    assert together.tokens[0] == reference.plain(dense_twin()[0], PROMPTS[0], 12).tokens
    for row in (1, 2, 3):
        seed = MIXED["seed"][row].item()
        own = {name: values[row] for name, values in MIXED.items()} | {"seed": [77, seed, 78, 79]}
        _, alone, *others = generate(target, drafter, [PROMPTS[row]] * 4, 12, **own).tokens  # as many rows: one program
        assert alone == together.tokens[row]
        assert alone not in others


@pytest.mark.one_cell
@pytest.mark.parametrize("kind", ["random", "constant", "perfect"])
def test_match_equals_plain_sampling_at_every_temperature_with_stops(kind):
    """Rows of unequal length at 0, 0.7 and 1.3; two of them meet a stop token within a block."""
    target, options = dense_target(), {"temperature": [0.0, 0.7, 1.3, 0.7], "seed": 5, "verify": "match"}
    free = generate(target, None, PROMPTS, 20, stop_token_ids=[], **options)
    stops = [free.tokens[1][7], free.tokens[2][10]]
    plain = generate(target, None, PROMPTS, 20, stop_token_ids=stops, **options)
    assert {*plain.finish_reason} == {"stop", "length"}
    drafter = {
        "random": lambda: dense_drafter(temperature=0.8),
        "constant": lambda: constant_drafter(free.tokens[1][3], rows=4),
        "perfect": lambda: scripted_drafter([p + t for p, t in zip(PROMPTS, free.tokens, strict=True)]),
    }[kind]()
    out = generate(target, drafter, PROMPTS, 20, stop_token_ids=stops, **options)
    assert (out.tokens, out.finish_reason) == (plain.tokens, plain.finish_reason)
    assert kind != "perfect" or out.stats.acceptance_length > 3
