"""The verify rules leave the target's law exactly as it is: enumerated in float64, through nothing but what the rules return.

The oracle knows no formula of the rules. Each is a step function of its uniforms, so the oracle finds every threshold by bisection,
which gives the exact probability of every outcome; put together over all drafts and rounds, the first tokens of the text must have
the target's joint law. Wrong rules must not pass.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny_models import CommonDrafter, dense_drafter, scripted_drafter, table_target

import dflash_jax.decode as decode_module
import dflash_jax.sampling as sampling_module
from dflash_jax.drafter import Drafter
from dflash_jax.generate import generate
from dflash_jax.verify import Verified, verify_block, verify_jointly, verify_rejection

pytestmark = pytest.mark.one_cell

V, J, TEXT = 3, 3, 4
TEXTS = [text for n in range(TEXT) for text in itertools.product(range(V), repeat=n)]
DRAFTS = list(itertools.product(range(V), repeat=J))
ALMOST_1 = np.nextafter(1, 0)


class Laws:
    """A random target, and a random parallel drafter (its slots do not depend on each other), for every text and block of drafts.

    Arrays have one row for every pair of a text and a block of drafts, N = texts x V^J.
    """

    def __init__(self, seed, argmax=False):
        random = np.random.default_rng(seed)
        self.p = {
            text: random.dirichlet(np.full(V, 0.7)) for n in range(TEXT + J) for text in itertools.product(range(V), repeat=n)
        }
        rows = [(text, draft) for text in TEXTS for draft in DRAFTS]
        by_text = {text: random.dirichlet(np.full(V, 0.7), J) for text in TEXTS}
        self.q_NJV = np.stack([by_text[text] for text, _ in rows])
        self.drawn_NJV = np.eye(V)[self.q_NJV.argmax(-1)] if argmax else self.q_NJV  # the law that drafts come from
        self.p_NKV = np.stack([[self.p[text + draft[:k]] for k in range(J + 1)] for text, draft in rows])
        self.draft_NJ = np.array([draft for _, draft in rows], np.int32)
        self.drawn_N = np.prod(np.take_along_axis(self.drawn_NJV, self.draft_NJ[..., None], axis=2)[..., 0], axis=1)

    def target_law(self):
        """Joint law of the first TEXT tokens."""
        law = np.ones((V,) * TEXT)
        for text in np.ndindex(*law.shape):
            law[text] = np.prod([self.p[text[:i]][text[i]] for i in range(TEXT)])
        return law


def bisected(shape, is_below):
    """The largest uniform at which `is_below` still holds (it holds at 0 if anywhere), for every row."""
    low, high = np.zeros(shape), np.ones(shape)
    if not np.all(held := is_below(low)):
        high = np.where(held, high, 0.0)
    for _ in range(54):
        middle = (low + high) / 2
        held = is_below(middle)
        low, high = np.where(held, middle, low), np.where(held, high, middle)
    return low


def outcomes(rule, laws):
    """Probability of every (accepted, bonus) in every row, [N, K, V]."""
    rows = len(laws.draft_NJ)
    impossible = laws.drawn_N == 0
    q_NJV = np.where(impossible[:, None, None], 1 / V, laws.drawn_NJV if rule not in TAKE_Q else laws.q_NJV)
    arguments = [jnp.asarray(x) for x in (laws.draft_NJ, q_NJV, laws.p_NKV)]
    jitted = jax.jit(rule)

    def run(accept_NJ, residual_N):
        out = jitted(*arguments, jnp.asarray(accept_NJ), jnp.asarray(residual_N))
        accepted_N = np.asarray(out.accepted_B)
        return accepted_N, np.take_along_axis(np.asarray(out.tokens_BK), accepted_N[:, None], axis=1)[:, 0]

    thresholds_NJ = np.zeros((rows, J))
    for j in range(J):
        # Earlier slots pass, later ones pass only if they are certain to: then slot j alone decides whether more than j stand.
        others_J, here_J = np.where(np.arange(J) < j, 0.0, ALMOST_1), np.arange(J) == j

        def stands(u_N, j=j, others_J=others_J, here_J=here_J):
            return run(np.where(here_J, u_N[:, None], others_J), np.zeros(rows))[0] > j

        thresholds_NJ[:, j] = bisected(rows, stands)
    found_NKV = np.zeros((rows, J + 1, V))
    for passes in itertools.product((True, False), repeat=J):
        chance_N = np.prod(np.where(passes, thresholds_NJ, 1 - thresholds_NJ), axis=1)
        accept_NJ = np.where(passes, thresholds_NJ / 2, (1 + thresholds_NJ) / 2)
        accepted_N = run(accept_NJ, np.zeros(rows))[0]
        cuts = [bisected(rows, lambda u, t=token, a=accept_NJ: run(a, u)[1] <= t) for token in range(V - 1)]
        for token, share_N in enumerate(np.diff([np.zeros(rows), *cuts, np.ones(rows)], axis=0)):
            found_NKV[np.arange(rows), accepted_N, token] += chance_N * share_N
    return found_NKV


def matched(laws):
    """The same for `match`, whose only random numbers are the target's own draws: every one of them in turn."""
    found_NKV = np.zeros((len(laws.draft_NJ), J + 1, V))
    jitted = jax.jit(verify_block)
    for own in itertools.product(range(V), repeat=J + 1):
        chance_N = np.prod([laws.p_NKV[:, k, own[k]] for k in range(J + 1)], axis=0)
        accepted_N = np.asarray(jitted(laws.draft_NJ, np.tile(np.asarray(own, np.int32), (len(chance_N), 1))).accepted_B)
        np.add.at(found_NKV, (np.arange(len(chance_N)), accepted_N, np.asarray(own)[accepted_N]), chance_N)
    return found_NKV


def text_law(laws, found_NKV):
    """Joint law of the first TEXT tokens over as many rounds as they take, and the mean of tokens in the first round."""
    rounds = dict(zip(TEXTS, (found_NKV * laws.drawn_N[:, None, None]).reshape(len(TEXTS), len(DRAFTS), J + 1, V), strict=True))
    law, reached = np.zeros((V,) * TEXT), {text: 0.0 for text in TEXTS} | {(): 1.0}
    for text in TEXTS:  # shorter texts first: all that leads to a text is known when its round starts
        for (n, accepted, bonus), chance in np.ndenumerate(rounds[text]):
            longer = (*text, *DRAFTS[n][:accepted], bonus)[:TEXT]
            if len(longer) == TEXT:
                law[longer] += reached[text] * chance
            else:
                reached[longer] += reached[text] * chance
    return law, (rounds[()].sum((0, 2)) * np.arange(1, J + 2)).sum()


def distance(rule, laws):
    """Total variation between the text's law and the target's, and tokens in the first round."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict" if rule not in WRONG else "standard"):
        found_NKV = matched(laws) if rule is verify_block else outcomes(rule, laws)
    np.testing.assert_allclose(found_NKV.sum((1, 2)), 1, atol=1e-12)
    law, tokens = text_law(laws, found_NKV)
    return 0.5 * np.abs(law - laws.target_law()).sum(), tokens


# ---------------------------------------------------------------------------------------------------------------------
# Rules that are right


@pytest.mark.parametrize("argmax", [False, True], ids=["sampled drafts", "argmax drafts"])
@pytest.mark.parametrize("rule", [verify_block, verify_rejection, verify_jointly])
def test_the_law_is_the_targets(rule, argmax):
    variation, tokens = distance(rule, Laws(0, argmax))
    assert variation < 1e-12
    assert 1.3 < tokens < J, "so few or many drafts stand that the test says little"


def test_the_block_rule_accepts_most():
    laws = Laws(0)
    match, rejection, block = (distance(rule, laws)[1] for rule in (verify_block, verify_rejection, verify_jointly))
    assert match + 0.05 < rejection < block - 0.01


@pytest.mark.parametrize("rule", [verify_rejection, verify_jointly])
def test_a_drafter_that_is_the_target_is_always_accepted(rule):
    p_BKV = jnp.asarray(np.random.default_rng(3).dirichlet(np.ones(V), (1, J + 1)).repeat(len(DRAFTS), 0), jnp.float32)
    uniforms = jnp.full((len(DRAFTS), J), np.float32(1 - 2**-24)), jnp.full((len(DRAFTS),), 0.5, jnp.float32)
    out = jax.jit(rule)(jnp.asarray(DRAFTS, jnp.int32), p_BKV[:, :J], p_BKV, *uniforms)
    np.testing.assert_array_equal(out.tau_B, J + 1)
    np.testing.assert_array_equal(out.tokens_BK[:, :J], DRAFTS)


@pytest.mark.parametrize("rule", [verify_rejection, verify_jointly])
def test_tokens_without_probability_are_never_written(rule):
    """Whatever the uniforms: a token that the target's law excludes (top-p and others) is neither accepted nor drawn."""
    random = np.random.default_rng(4)
    rows = 4096
    p_BKV = random.dirichlet(np.ones(8), (rows, J + 1)) * (random.random((rows, J + 1, 8)) < 0.5)
    p_BKV[..., 7] += 1e-3
    p_BKV /= p_BKV.sum(-1, keepdims=True)
    q_BJV = random.dirichlet(np.ones(8), (rows, J))
    draft_BJ = np.array([[random.choice(8, p=q) for q in row] for row in q_BJV], np.int32)
    edge = random.choice([0, 0.3, np.float32(1 - 2**-24)], (rows, J + 1))
    arguments = (jnp.asarray(x, jnp.float32) for x in (q_BJV, p_BKV, edge[:, :J], edge[:, J]))
    out = jax.jit(rule)(jnp.asarray(draft_BJ), *arguments)
    tokens_BK, tau_B = np.asarray(out.tokens_BK), np.asarray(out.tau_B)
    assert set(tau_B) == {1, 2, 3, 4}
    for k in range(J + 1):
        written = tau_B > k
        assert (p_BKV[written, k, tokens_BK[written, k]] > 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Rules that are wrong: each is a mistake that some engine made (facts in beyond.md, section 2.3)


def stops_at_the_first_failure(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B):
    """The block rule's chances with the slot-by-slot rule's stop: a later pass no longer helps."""
    whole = verify_jointly(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B)
    alone = [jnp.where(jnp.arange(J) == j, accept_BJ, ALMOST_1) for j in range(J)]
    prefixes = [verify_jointly(draft_BJ, q_BJV, p_BKV, accept, residual_B) for accept in alone]
    passes_BJ = jnp.stack([one.accepted_B == j + 1 for j, one in enumerate(prefixes)], axis=1)
    accepted_B = jnp.minimum(jnp.cumprod(passes_BJ, axis=1).sum(1), whole.accepted_B).astype(jnp.int32)
    chosen = jnp.stack([one.tokens_BK for one in prefixes], axis=1)
    fallen = verify_jointly(draft_BJ, q_BJV, p_BKV, jnp.full_like(accept_BJ, ALMOST_1), residual_B)
    tokens_BK = jnp.take_along_axis(chosen, jnp.maximum(accepted_B - 1, 0)[:, None, None], axis=1)[:, 0]
    tokens_BK = jnp.where((accepted_B == 0)[:, None], fallen.tokens_BK, tokens_BK)
    return Verified(tokens_BK, accepted_B, accepted_B + 1, whole.acceptance_rate)


def argmax_draft_scored_with_its_probability(*arguments):
    """p / q with the drafter's softmax although the draft was its argmax."""
    return verify_rejection(*arguments)


def draws_the_target_again(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B):
    """After a rejection the token comes from p and not from (p - q)+."""
    return verify_rejection(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B)._replace(
        tokens_BK=_with_bonus(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B)
    )


def _with_bonus(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B):
    out = verify_rejection(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B)
    p_BV = jnp.take_along_axis(p_BKV, out.accepted_B[:, None, None], axis=1)[:, 0]
    bonus_B = jnp.argmax(jnp.cumsum(p_BV, axis=1) > residual_B[:, None], axis=1)
    return jnp.where(jnp.arange(J + 1)[None] == out.accepted_B[:, None], bonus_B[:, None], out.tokens_BK)


def cut_where_the_draft_is_unlikely(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B):
    """A block is shortened before a draft that its own drafter finds unlikely: the cut knows the token that it cuts."""
    q_drafts_BJ = jnp.take_along_axis(q_BJV, draft_BJ[..., None], axis=2)[..., 0]
    kept_B = jnp.cumprod(q_drafts_BJ > 0.3, axis=1).sum(1)
    out = verify_rejection(draft_BJ, q_BJV, p_BKV, accept_BJ, residual_B)
    cut_B = out.accepted_B >= kept_B
    p_BV = jnp.take_along_axis(p_BKV, kept_B[:, None, None], axis=1)[:, 0]
    bonus_B = jnp.argmax(jnp.cumsum(p_BV, axis=1) > residual_B[:, None], axis=1)
    accepted_B = jnp.where(cut_B, kept_B, out.accepted_B).astype(jnp.int32)
    tokens_BK = jnp.where((jnp.arange(J + 1)[None] == kept_B[:, None]) & cut_B[:, None], bonus_B[:, None], out.tokens_BK)
    return Verified(tokens_BK, accepted_B, accepted_B + 1, out.acceptance_rate)


TAKE_Q = {argmax_draft_scored_with_its_probability}
WRONG = {
    stops_at_the_first_failure: False,
    argmax_draft_scored_with_its_probability: True,
    draws_the_target_again: False,
    cut_where_the_draft_is_unlikely: False,
}


@pytest.mark.parametrize(("rule", "argmax"), WRONG.items(), ids=[rule.__name__ for rule in WRONG])
def test_a_wrong_rule_is_found(rule, argmax):
    assert distance(rule, Laws(0, argmax))[0] > 0.02


# ---------------------------------------------------------------------------------------------------------------------
# The jitted loop on a small vocabulary: goodness of fit of the joint law of three tokens, fixed seeds

SMALL, ROWS, RUNS = 5, 4096, 4
PROMPT = [1, 4, 2]
SETTINGS = {"temperature": 1.3, "top_p": 0.9, "top_k": 4}


@pytest.fixture(scope="module")
def pair():
    target = table_target(vocab_size=SMALL)
    target.params["logits_VV"] = target.params["logits_VV"][:SMALL, :SMALL]
    return target, dense_drafter(vocab_size=SMALL, mask_token_id=4, block_size=4, temperature=1.6)


@pytest.fixture(scope="module")
def cheap_pair(pair):
    """A drafter that computes nothing: what is wrong in these tests is what is done with its law."""
    target = dataclasses.replace(pair[0], params=pair[0].params | {"common_V": pair[0].params["logits_VV"][0]})
    return target, CommonDrafter(pair[1].config, scripted_drafter([[0]] * ROWS).params)


def surprise(pair, runs=RUNS, **options):
    """How far the counts of the tokens after the first are from their law: chi-square, in standard deviations of a right sampler.

    The first token comes from the prefill; rounds write the others, so they are counted together with it.
    """
    target, drafter = pair
    law = np.zeros((SMALL,) * 3)
    for text in np.ndindex(*law.shape):
        shares = (reference_law(target.logits(PROMPT + list(text[:i])))[text[i]] for i in range(3))
        law[text] = np.prod(list(shares))
    counts, accepted = np.zeros_like(law), 0
    for run in range(runs):
        out = generate(target, drafter, [PROMPT] * ROWS, 3, seed=run * ROWS, stop_token_ids=[], **options)
        np.add.at(counts, tuple(np.array(out.tokens).T), 1)
        accepted += out.stats.pooled.accepted
    assert accepted > ROWS, "so few drafts stand that the test says little"
    expected = law * ROWS * runs
    if counts[expected == 0].any():
        return np.inf
    often = expected >= 5
    return (((counts - expected)[often] ** 2 / expected[often]).sum() - often.sum()) / np.sqrt(2 * often.sum())


def reference_law(logits):
    kept = reference.process_logits(np.asarray(logits, np.float64), **SETTINGS)
    return np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum()


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_the_loop_follows_the_law(pair, rule):
    assert abs(surprise(pair, verify=rule, **SETTINGS)) < 4


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_loop_of_the_mutants_does_so_without_them(cheap_pair, rule):
    assert abs(surprise(cheap_pair, verify=rule, **SETTINGS)) < 4


def test_a_drafter_of_few_tokens_follows_the_law(pair):
    """Drafts have probability 0 of the tokens that it cannot draft, which the target writes all the same."""
    target, drafter = pair
    few = Drafter(dataclasses.replace(drafter.config, draft_token_ids=(0, 1, 3)), drafter.params)
    assert abs(surprise((target, few), verify="block", **SETTINGS)) < 4


def top_p_before_temperature(logits_BKV, sampling, right=sampling_module.process_logits):
    cut_BKV = right(logits_BKV, sampling._replace(temperature_B=jnp.ones_like(sampling.temperature_B)))
    return cut_BKV / sampling.temperature_B[:, None, None]


def another_law(x_BJV, positions_BJ, sampling, purpose, round_B):
    colder = sampling._replace(temperature_B=0.7 * sampling.temperature_B)
    tokens_BJ, _ = sampling_module.draw_with_law(x_BJV, positions_BJ, sampling, purpose, round_B)
    return tokens_BJ, sampling_module.law(x_BJV, colder)


def redraws_with_the_drafts_key(draft_BJ, q_BJV, p_BKV, anchors_B, sampling, rule, right=decode_module._verify_by_law):
    """The noise that chose the draft chooses again, from the right residual."""
    out = right(draft_BJ, q_BJV, p_BKV, anchors_B, sampling, rule)
    at_B11 = out.accepted_B[:, None, None]
    q_BKV = jnp.pad(q_BJV, ((0, 0), (0, 1), (0, 0)))
    residual_B1V = jnp.take_along_axis(p_BKV, at_B11, axis=1) - jnp.take_along_axis(q_BKV, at_B11, axis=1)
    positions_B1 = (anchors_B + 1 + out.accepted_B)[:, None]
    noise_B1V = sampling_module.gumbel(p_BKV.shape[-1], positions_B1, sampling, sampling_module.DRAFT_DRAW, anchors_B)
    bonus_B1 = jnp.argmax(jnp.log(jnp.maximum(residual_B1V, 0)) + noise_B1V, axis=-1).astype(jnp.int32)
    here_BK = jnp.arange(p_BKV.shape[1], dtype=jnp.int32)[None] == out.accepted_B[:, None]
    return out._replace(tokens_BK=jnp.where(here_BK, bonus_B1, out.tokens_BK))


MUTANTS = {
    "one key for drafts and redraws": ("rejection", decode_module, "_verify_by_law", redraws_with_the_drafts_key),
    "one key for drafts and uniforms": (
        "rejection", decode_module, "uniforms", lambda p, s, purpose, r: sampling_module.uniforms(p, s, 1, r)
    ),
    "the same noise when a position is drafted again": (
        "block", decode_module, "draw_with_law",
        lambda x, p, s, purpose, r: sampling_module.draw_with_law(x, p, s, purpose, jnp.zeros_like(r)),
    ),
    "top-p before temperature": ("rejection", sampling_module, "process_logits", top_p_before_temperature),
    "drafts of another law than they are judged by": ("rejection", decode_module, "draw_with_law", another_law),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_loop_is_found(cheap_pair, monkeypatch, mutant):
    (target, drafter), (rule, module, name, wrong) = cheap_pair, MUTANTS[mutant]
    # Another config is another program: the right one is not used again, nor this one by others.
    renamed = dataclasses.replace(drafter.config, loss_decay_gamma=100.0 + list(MUTANTS).index(mutant))
    monkeypatch.setattr(module, name, wrong)
    runs = 4 * RUNS if rule == "block" else RUNS  # a small bias
    assert surprise((target, CommonDrafter(renamed, drafter.params)), runs, verify=rule, **SETTINGS) > 8


def greedy_rows_with_a_placeholder(processed_BKV, sampling):
    return jax.nn.softmax(processed_BKV, axis=-1)


def mixed(pair, rule, every, seed=0):
    """Texts of a batch in which every n-th row is greedy."""
    heat = [1.3 if row % every else 0.0 for row in range(ROWS)]
    return generate(*pair, [PROMPT] * ROWS, 9, heat, seed=seed, stop_token_ids=[], verify=rule).tokens


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_rows_among_sampled_ones(cheap_pair, rule):
    """They write plain greedy text, and nobody's text depends on who is beside it."""
    greedy = reference.plain(cheap_pair[0].next_token, PROMPT, 9).tokens
    texts, fewer = mixed(cheap_pair, rule, 2), mixed(cheap_pair, rule, 4)
    assert all(text == greedy for text in texts[::2])
    assert sum(text == greedy for text in texts[1::2]) < ROWS / 4
    assert texts[1::2] == fewer[1::2]
    assert texts[2::4] != fewer[2::4]


def test_a_placeholder_temperature_is_found(cheap_pair, monkeypatch):
    """Greedy rows judged by a softmax: another engine's fault."""
    target, drafter = cheap_pair
    monkeypatch.setattr(sampling_module, "_law", greedy_rows_with_a_placeholder)
    renamed = CommonDrafter(dataclasses.replace(drafter.config, loss_decay_gamma=99.0), drafter.params)
    greedy = reference.plain(target.next_token, PROMPT, 9).tokens
    assert any(text != greedy for text in mixed((target, renamed), "block", 2)[::2])
