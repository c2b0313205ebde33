"""The audit of sampled text: its bookkeeping against a Python loop, honest samplers, and samplers with a fault."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import DRAFTER, HIDDEN, CommonDrafter, scripted_drafter, table_target

import dflash_jax.decode as decode_module
import dflash_jax.sampling as sampling_module
from dflash_jax.audit import UNIFORM_SHARE, begin, count, observe, result
from dflash_jax.config import DecodeConfig
from dflash_jax.decode import decode
from dflash_jax.generate import finish, generate, start

pytestmark = pytest.mark.one_cell

B, K, V = 3, 4, 7


def audited_by_hand(rounds, row):
    """One row: the function of a position is that of the first round that drafted for it, whoever emits the token."""
    functions, total, variance, tokens, anchor = {}, 0.0, 0.0, 0, 0
    for q_BJV, draft_BJ, p_BKV, tokens_BK, emitted_B in rounds:
        for slot in range(K - 1):
            one = np.eye(V)[draft_BJ[row, slot]]
            law = one if q_BJV is None else np.log((1 - UNIFORM_SHARE) * q_BJV[row, slot] + UNIFORM_SHARE / V)
            functions.setdefault(anchor + 1 + slot, law)
        for slot in range(emitted_B[row]):
            if slot < K - 1:  # the token after a whole block had no drafter's law
                p = p_BKV[row, slot].astype(np.float64)
                f = functions[anchor + 1 + slot] - (0 if q_BJV is None else np.log(p))
                total += f[tokens_BK[row, slot]] - (p * f).sum()
                variance += (p * (f - (p * f).sum()) ** 2).sum()
                tokens += 1
        anchor += emitted_B[row]
    return total, variance, tokens


@pytest.mark.parametrize("argmax", [False, True])
def test_bookkeeping_equals_a_loop(argmax):
    random = np.random.default_rng(0)
    rounds = []
    for _ in range(12):
        q_BJV, p_BKV = (random.dirichlet(np.full(V, 0.5), (B, slots)).astype(np.float32) for slots in (K - 1, K))
        draft_BJ, tokens_BK = (random.integers(0, V, (B, slots)).astype(np.int32) for slots in (K - 1, K))
        rounds.append((None if argmax else q_BJV, draft_BJ, p_BKV, tokens_BK, random.integers(0, K + 1, B).astype(np.int32)))
    assert {n for *_, emitted in rounds for n in emitted.tolist()} == set(range(K + 1))
    step = jax.jit(lambda audit, q, draft, p, tokens, emitted: count(observe(audit, draft, q, p, tokens), emitted))
    audit = begin(B, K, V)
    for arrays in rounds:
        audit = step(audit, *(x if x is None else jnp.asarray(x) for x in arrays))
    for row in range(B):
        wanted = audited_by_hand(rounds, row)
        got = (audit.sum_B[row], audit.variance_B[row], audit.tokens_B[row])
        np.testing.assert_allclose(got, wanted, rtol=1e-4)
    sums, variances, tokens = (np.array([audited_by_hand(rounds, row)[i] for row in (0, 2)]).sum() for i in range(3))
    found = result(audit, jnp.asarray([1.0, 0.0, 0.5]))  # row 1 is greedy: nothing of it counts
    greedy = np.array(audited_by_hand(rounds, 1))
    assert found.tokens == tokens
    np.testing.assert_allclose(found.z, sums / np.sqrt(variances), rtol=1e-4)
    assert abs((sums + greedy[0]) / np.sqrt(variances + greedy[1]) - found.z) > 1e-2


# ---------------------------------------------------------------------------------------------------------------------
# In the loop, on a vocabulary of a few hundred

MANY, ROWS, NEW = 200, 64, 33
random = np.random.default_rng(7)
COMMON = random.standard_normal(MANY).astype(np.float32)


@pytest.fixture(scope="module")
def target():
    table = table_target(vocab_size=MANY)
    table.params["logits_VV"] = jnp.asarray(COMMON[None] + 2 * random.standard_normal((MANY, MANY)), jnp.float32)
    table.params["common_V"] = jnp.asarray(COMMON)
    table.params["embedding_VD"] = jnp.zeros((MANY, HIDDEN), jnp.float32)
    return table


def audited(target, rule, case=0, rows=ROWS, top_p=1.0):
    """`case` names the program, so that a planted fault is compiled and not used again."""
    params = scripted_drafter([[0]] * rows).params
    config = dataclasses.replace(DRAFTER, vocab_size=MANY, block_size=4, loss_decay_gamma=50.0 + case)
    options = {"temperature": [0.9, 0.0, 1.2, 0.9] * (rows // 4), "top_p": top_p, "stop_token_ids": [], "verify": rule}
    out = generate(target, CommonDrafter(config, params), [[1, 4, 2]] * rows, NEW, **options, audit=True)
    assert out.stats.acceptance_length > 1.2 or rule == "match"
    assert 0.7 * rows * 0.75 * NEW < out.stats.audit.tokens < rows * 0.75 * NEW
    return out


@pytest.mark.parametrize("rule", ["match", "block"])
def test_an_honest_sampler_passes(target, rule):
    """Argmax drafts by `match`, drawn ones by `block`."""
    out = audited(target, rule, top_p=0.95)
    assert abs(out.stats.audit.z) < 4
    assert not out.stats.audit.alarming


def with_bonus(wrong, right=decode_module._verify_by_law):
    """The rule, but `wrong` draws the token after the accepted drafts."""

    def verify(draft_BJ, q_BJV, p_BKV, anchors_B, sampling, rule):
        out = right(draft_BJ, q_BJV, p_BKV, anchors_B, sampling, rule)
        at_B11 = out.accepted_B[:, None, None]
        p_B1V = jnp.take_along_axis(p_BKV, at_B11, axis=1)
        q_B1V = jnp.take_along_axis(jnp.pad(q_BJV, ((0, 0), (0, 1), (0, 0))), at_B11, axis=1)
        places_B1 = anchors_B[:, None] + 1 + out.accepted_B[:, None]
        bonus_B1 = wrong(p_B1V, jnp.maximum(p_B1V - q_B1V, 0), places_B1, anchors_B, sampling)
        here_BK = jnp.arange(p_BKV.shape[1], dtype=jnp.int32)[None] == out.accepted_B[:, None]
        return out._replace(tokens_BK=jnp.where(here_BK & (sampling.temperature_B > 0)[:, None], bonus_B1, out.tokens_BK))

    return verify


def draws_the_target_again(p_B1V, residual_B1V, places_B1, anchors_B, sampling):
    return sampling_module._drawn(jnp.log(p_B1V), places_B1, sampling, sampling_module.REDRAW, anchors_B)


def test_a_dishonest_sampler_is_found(target, monkeypatch):
    """Shared keys need more text than a test has; `test_lossless` finds them."""
    monkeypatch.setattr(decode_module, "_verify_by_law", with_bonus(draws_the_target_again))
    found = audited(target, "block", case=1).stats.audit
    assert abs(found.z) > 4
    assert found.alarming


def test_a_token_that_the_target_excludes_alarms_at_once():
    p_1KV = jnp.asarray([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]], jnp.float32)
    q_1JV = jnp.full((1, 1, 3), 1 / 3, jnp.float32)
    for token, alarming in ((2, True), (1, False)):
        seen = observe(begin(1, 2, 3), jnp.asarray([[token]]), q_1JV, p_1KV, jnp.asarray([[token, 0]]))
        for emitted, counts in ((1, alarming), (0, False)):
            found = result(count(seen, jnp.asarray([emitted])), jnp.asarray([1.0]))
            assert found.alarming == counts


def test_text_without_drafted_samples_has_no_z(target):
    drafter = CommonDrafter(dataclasses.replace(DRAFTER, vocab_size=MANY, block_size=3), scripted_drafter([[0]]).params)
    for audited_drafter, temperature in ((None, 1.0), (drafter, 0.0)):
        state, lengths = start(target, audited_drafter, [[1, 2]], DecodeConfig(1, temperature, audit=True))
        assert state.audit is None
        found = finish(state, lengths, audit=True).stats.audit
        assert np.isnan(found.z)
        assert (found.tokens, found.alarming) == (0, False)
    assert finish(state, lengths).stats.audit is None


def test_without_the_flag_nothing_of_it_is_in_the_program(target, monkeypatch):
    """Not traced, not carried, not returned."""

    def forbidden(*arguments):
        raise AssertionError("the audit was traced")

    drafter = CommonDrafter(dataclasses.replace(DRAFTER, vocab_size=MANY, block_size=3), scripted_drafter([[0]]).params)
    states = [start(target, drafter, [[1, 2]], DecodeConfig(5, 1.0, audit=audit))[0] for audit in (False, True)]
    assert states[0].audit is None
    assert len(jax.tree.leaves(states[1])) - len(jax.tree.leaves(states[0])) == len(states[1].audit)
    monkeypatch.setattr(decode_module, "observe", forbidden)
    monkeypatch.setattr(decode_module, "count", forbidden)
    trace = partial(decode.trace, target.params, drafter.params, max_rounds=jnp.int32(1), target=target, drafter=drafter)
    trace(state=states[0], rule="block")
    with pytest.raises(AssertionError, match="was traced"):
        trace(state=states[1], rule="block")
