"""The width that pays: the loop at every width, the policy's choices, and the table of costs."""

import inspect
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import BLOCK, dense_drafter, dense_target, scripted_drafter, table_target

import dflash_jax.widths as widths_module
from dflash_jax.config import DecodeConfig
from dflash_jax.decode import PLAIN_ROUNDS, decode
from dflash_jax.errors import ConfigError
from dflash_jax.generate import advancing, finish, generate, start
from dflash_jax.widths import WidthPolicy, WidthTable, candidates, measure_widths

PROMPTS = [[5, 9, 2, 40, 7], [11], [3, 3, 8, 30, 31, 32, 33, 2, 1]]
COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.6}


@pytest.fixture(scope="module")
def pair():
    return dense_target(), dense_drafter()


@pytest.fixture(scope="module")
def light():
    """Models whose programs are small, for what is told by shapes and configs."""
    return table_target(), scripted_drafter([[0]] * 4)


def decoded(pair, plan, new=40, **options):
    """Decode by a plan of (width, rounds), repeated."""
    target, drafter = pair
    state, lengths = start(target, drafter, PROMPTS, DecodeConfig(max_new_tokens=new, **options), [])
    turn = 0
    while not bool(state.done_B.all()):
        width, rounds = plan[turn % len(plan)]
        state = decode(target.params, drafter.params, state, jnp.int32(rounds), target=target, drafter=drafter, width=width)
        turn += 1
    return finish(state, lengths), state


@pytest.mark.one_cell
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_any_plan_of_widths_gives_the_plain_text(pair, sampled):
    """Blocks after plain rounds too: the drafter's context has caught up, or its drafts would change."""
    target, _ = pair
    plain = generate(target, None, PROMPTS, 40, stop_token_ids=[], **sampled)
    mixed, _ = decoded(pair, [(1, 5), (3 if sampled else BLOCK, 2), (1, 99)], **sampled)
    assert mixed.tokens == plain.tokens
    assert mixed.finish_reason == plain.finish_reason


def test_the_context_after_plain_rounds_is_that_of_blocks(pair):
    _, blocks = decoded(pair, [(BLOCK, 99)])
    _, plain = decoded(pair, [(1, 7), (1, PLAIN_ROUNDS)])
    # compared where both have written what was verified: all but the last token's position
    for one, other in zip(jax.tree.leaves(blocks.draft_cache), jax.tree.leaves(plain.draft_cache), strict=True):
        for row, prompt in enumerate(PROMPTS):
            known = len(prompt) + 39
            np.testing.assert_allclose(one[row, :, :known], other[row, :, :known], atol=2e-5)


@pytest.mark.one_cell
def test_drafted_tokens_are_counted_by_width(pair):
    out, state = decoded(pair, [(1, 4), (3, 1), (BLOCK, 1)], new=9)
    for row in out.stats.rows:
        assert row.emitted == 8
        assert row.accepted <= row.drafted
    np.testing.assert_array_equal(state.rounds_B, np.sum(state.accepted_BK, axis=1))
    useless, _ = decoded(pair, [(1, 99)], new=9)
    assert [row.drafted for row in useless.stats.rows] == [0, 0, 0]
    assert [row.rounds for row in useless.stats.rows] == [8, 8, 8]


@pytest.mark.one_cell
def test_no_round_is_more_than_was_asked_for(pair):
    target, drafter = pair
    for width, most in ((1, PLAIN_ROUNDS), (3, 40)):
        state, _ = start(target, drafter, PROMPTS, DecodeConfig(max_new_tokens=100), [])
        state = decode(target.params, drafter.params, state, jnp.int32(40), target=target, drafter=drafter, width=width)
        assert int(state.rounds_B[0]) == most


# ---------------------------------------------------------------------------------------------------------------------
# Policy


def play(accepts, costs, rounds=400, seed=0):
    """Simulate a drafter whose slot k stands with probability `accepts` after the one before. Time a token, and widths used."""
    random, policy = np.random.default_rng(seed), WidthPolicy(costs, max(costs))
    used, times, tokens = [], [], []
    while len(used) < rounds:
        width, limit = policy.next()
        for _ in range(limit or 16):
            stands = np.cumprod(random.random(width - 1) < accepts).sum() if width > 1 else 0
            histogram = np.bincount([int(stands)], minlength=max(costs))
            policy.saw(width, 1, histogram)
            used.append(width)
            times.append(costs[width])
            tokens.append(stands + 1)
    return np.array(used), np.array(times), np.array(tokens)


@pytest.mark.one_cell
def test_a_useless_drafter_costs_little():
    used, times, tokens = play(0.0, COSTS)
    assert set(used[:4]) == {8}, "the drafter gets its chance"
    assert times[48:].sum() / tokens[48:].sum() < 1.03
    assert times[:128].sum() / tokens[:128].sum() < 1.05, "a short answer, its first rounds included"
    assert (used[48:] == 8).any(), "and later another one"


@pytest.mark.one_cell
def test_a_good_drafter_is_used_at_its_best_width():
    def rate(accepts, width):
        return sum(accepts**k for k in range(width)) / COSTS[width]

    for accepts in (0.3, 0.6, 0.95):
        _, times, tokens = play(accepts, COSTS, 1500)
        best = max(COSTS, key=lambda width: rate(accepts, width))
        assert tokens[200:].sum() / times[200:].sum() > 0.95 * rate(accepts, best), accepts
    assert best == 8


@pytest.mark.one_cell
def test_a_drafter_that_becomes_good_is_found():
    random, policy = np.random.default_rng(1), WidthPolicy(COSTS, 8)
    widths = []
    for round_ in range(4000):
        width, limit = policy.next()
        for _ in range(limit or 4):
            accepts = 0.0 if round_ < 200 else 0.9
            stands = np.cumprod(random.random(width - 1) < accepts).sum() if width > 1 else 0
            policy.saw(width, 1, np.bincount([int(stands)], minlength=8))
        widths.append(width)
    assert widths[190] == 1
    assert widths[-1] == 8


@pytest.mark.one_cell
def test_widths_above_the_block_size_are_not_used():
    assert candidates(6) == [1, 2, 3, 4, 6]
    assert candidates(5) == [1, 2, 3, 4, 5]
    assert WidthPolicy(COSTS, 4).next()[0] <= 4


# ---------------------------------------------------------------------------------------------------------------------
# Table


def fake_costs(monkeypatch, costs=COSTS):
    calls = []
    monkeypatch.setattr(widths_module, "measure_widths", lambda *_: calls.append(1) or dict(costs))
    return calls


@pytest.mark.one_cell
def test_costs_are_measured_once_a_case(light, tmp_path, monkeypatch):
    target, drafter = light
    calls = fake_costs(monkeypatch)
    path = tmp_path / "new" / "widths.json"
    state, _ = start(target, drafter, PROMPTS, DecodeConfig(max_new_tokens=8), [])
    for _ in range(2):  # the second table reads the file
        table = WidthTable(path)
        assert table.costs(target, drafter, state, "match") == COSTS
    assert len(calls) == 1
    wider, _ = start(target, drafter, PROMPTS * 2, DecodeConfig(max_new_tokens=8), [])
    longer, _ = start(target, drafter, PROMPTS, DecodeConfig(max_new_tokens=200), [])
    sampled, _ = start(target, drafter, PROMPTS, DecodeConfig(max_new_tokens=8, temperature=1.0), [])
    cut, _ = start(target, drafter, PROMPTS, DecodeConfig(max_new_tokens=8, temperature=1.0, top_p=0.9), [])
    short, _ = start(target, drafter, PROMPTS, DecodeConfig(max_new_tokens=8, block_size=3), [])
    cases = [(wider, "match"), (longer, "match"), (sampled, "match"), (sampled, "block"), (cut, "block"), (short, "match")]
    for other, rule in cases:
        table.costs(target, drafter, other, rule)
    table.costs(target, scripted_drafter([[0]] * 4, mlp_dim=32), state, "match")
    assert len(calls) == 8
    assert len(json.loads(path.read_text())) == 8
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"


@pytest.mark.one_cell
@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "nonsense",
        '{"case": {"1": 0.1, "2": 0}}',
        '{"case": {"2": 0.1}}',
        '{"case": [1]}',
        '{"c": {"1": 1, "-2": 1}}',
        '{"c": {"1": 1e999}}',
    ],
)
def test_a_foreign_file_is_refused(text, tmp_path):
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"w\.json"):
        WidthTable(path)
    assert path.read_text() == text


@pytest.mark.one_cell
def test_measured_costs_are_of_every_width(light, monkeypatch):
    """The state that is measured with is a copy: the caller's stays as it is."""
    target, drafter = light
    state, _ = start(target, drafter, PROMPTS, DecodeConfig(max_new_tokens=8, temperature=0.7, block_size=3), [])
    before = jax.tree.map(np.array, state)
    made = []
    monkeypatch.setattr(widths_module, "decode", lambda *a, **k: made.append((k["width"], k["rule"])) or decode(*a, **k))
    costs = measure_widths(target, drafter, state, "block")
    assert list(costs) == [1, 2, 3]
    assert all(0 < cost < 60 for cost in costs.values())
    assert made == 6 * [(width, "block") for width in costs], "compiled once, then five times in turn"
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state))


@pytest.mark.one_cell
def test_generate_follows_the_table(pair, tmp_path, monkeypatch):
    target, drafter = pair
    plain = generate(target, None, PROMPTS, 60, stop_token_ids=[])
    # Before anything was seen the whole block looks best: only what the rounds accept can tell that it is not.
    fake_costs(monkeypatch, {1: 1.0, BLOCK: 3.0})
    dear = generate(target, drafter, PROMPTS, 60, stop_token_ids=[], widths=WidthTable(tmp_path / "dear.json"))
    assert dear.tokens == plain.tokens
    assert 0 < dear.stats.pooled.drafted < 2 * dear.stats.pooled.rounds, "most rounds are plain"
    fake_costs(monkeypatch, {1: 9.0, 2: 9.0, 3: 9.0, BLOCK: 1.0})
    cheap = generate(target, drafter, PROMPTS, 60, stop_token_ids=[], widths=WidthTable(tmp_path / "cheap.json"))
    fixed = generate(target, drafter, PROMPTS, 60, stop_token_ids=[])
    assert cheap.tokens == plain.tokens
    assert cheap.stats == fixed.stats


@pytest.mark.one_cell
def test_tables_on_one_file_keep_what_each_measured(light, tmp_path, monkeypatch):
    target, drafter = light
    fake_costs(monkeypatch)
    path = tmp_path / "w.json"
    states = [start(target, drafter, PROMPTS[:n], DecodeConfig(max_new_tokens=8), [])[0] for n in (1, 2, 3)]
    tables = [WidthTable(path) for _ in states]
    threads = [threading.Thread(target=t.costs, args=(target, drafter, s, "match")) for t, s in zip(tables, states, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(path.read_text())) == 3
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.one_cell
def test_what_is_no_table_is_refused(pair, tmp_path):
    target, drafter = pair
    with pytest.raises(ConfigError, match="cannot be read"):
        WidthTable(tmp_path)
    with pytest.raises(ConfigError, match="give a WidthTable"):
        inspect.unwrap(advancing)(target, drafter, None, "match", str(tmp_path / "w.json"))


@pytest.mark.one_cell
def test_an_audit_wants_one_width(pair, tmp_path):
    target, drafter = pair
    with pytest.raises(ConfigError, match="audit"):
        generate(target, drafter, PROMPTS, 8, temperature=1.0, audit=True, widths=WidthTable(tmp_path / "w.json"))
