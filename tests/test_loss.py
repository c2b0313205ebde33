"""Losses against numpy and against plain automatic differentiation of whole logits."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from dflash_jax.loss import dflash_loss, draft_vocabulary, head_loss, loss_sums, sample_vocabulary
from dflash_jax.objectives import Objective, SlotTerms

pytestmark = pytest.mark.one_cell

B, A, K, T, D, V, GAMMA = 2, 3, 5, 12, 8, 19, 2.5
DECAY, DPACE = Objective(GAMMA), Objective(GAMMA, "dpace")


def case(seed=0):
    """Hidden states, a head, labels (some of them hit), and supervision with holes: inside a block, a whole block, slot 0."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((B, A, K, D))
    head = random.standard_normal((V, D))
    labels = (hidden @ head.T).argmax(-1)
    missed = random.random(labels.shape) < 0.3
    labels = np.where(missed, random.integers(0, V, labels.shape), labels)
    supervised = np.ones((B, A, K), bool)
    supervised[0, 1, 2] = supervised[1, 0, 1:] = supervised[1, 2, 4] = supervised[0, 2, 0] = False
    return hidden.astype(np.float32), head.astype(np.float32), labels.astype(np.int32), supervised


ANCHORS = np.asarray([[0, 3, 7], [1, 2, 5]], np.int32)


def of_target(near=None):
    """A target's logits after each position of rows [B, T, V], and the same at the slots of blocks, by loops (slot 0 has none).

    `near`: a drafter's logits that the target mostly agrees with."""
    logits_BTV = 2 * np.random.default_rng(9).standard_normal((B, T, V))
    for b, a, k in np.ndindex(B, A, K) if near is not None else ():
        if k and (b + a + k) % 7:  # the last block to write wins
            logits_BTV[b, int(ANCHORS[b, a]) + k - 1] = near[b, a, k] + 0.3 * logits_BTV[b, int(ANCHORS[b, a]) + k - 1]
    at_slots = np.zeros((B, A, K, V))
    for b, a, k in np.ndindex(B, A, K):
        if k:
            at_slots[b, a, k] = logits_BTV[b, int(ANCHORS[b, a]) + k - 1]
    return logits_BTV.astype(np.float32), at_slots


def assert_sums(sums, logits, labels, supervised, objective=DECAY, **of_slots):
    wanted, correct_K, count_K = reference.loss(logits, labels, supervised, *objective, **of_slots)
    assert wanted.accepted > 3
    assert wanted.blocks == B * A - 1
    for name, value in dataclasses.asdict(wanted).items():
        np.testing.assert_allclose(getattr(sums, name), value, rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(sums.correct_K, correct_K)
    np.testing.assert_array_equal(sums.count_K, count_K)
    np.testing.assert_allclose(sums.loss, wanted.weighted / wanted.weight, rtol=1e-5)
    np.testing.assert_allclose(sums.unweighted_loss, wanted.unweighted / wanted.slots, rtol=1e-5)
    np.testing.assert_allclose(sums.acceptance_length, 1 + wanted.accepted / wanted.blocks, rtol=1e-6)


STATIC = ("objective", "frozen", "logit_chunk", "dtype")
whole_loss = jax.jit(dflash_loss, static_argnames="gamma_decay")


@partial(jax.jit, static_argnames=STATIC)
def run_head(hidden, head, labels, supervised, objective, target_BTV=None, **options):
    def target_logits(anchors_BA):
        at_slots_BN = (anchors_BA[:, :, None] + jnp.arange(K - 1, dtype=jnp.int32)[None, None]).reshape(B, -1)
        return jnp.take_along_axis(target_BTV, at_slots_BN[:, :, None], axis=1)

    if target_BTV is not None:
        options |= {"anchors_BA": jnp.asarray(ANCHORS), "target_logits": target_logits}
    return head_loss(hidden, head, labels, supervised, objective, **options)


@partial(jax.jit, static_argnames=STATIC)
def value_and_gradient(hidden, head, labels, supervised, candidates=None, objective=DECAY, target_BTV=None, **options):
    """The sums, and gradients of the weighted sum towards hidden states and head."""

    def weighted(hidden, head):
        options_ = options | {"dtype": "float32", "candidates": candidates}
        sums = run_head(hidden, head, labels, supervised, objective, target_BTV, **options_)
        return 3.0 * sums.weighted, sums  # not 1: a custom gradient must use the cotangent

    return jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(hidden, head)


@pytest.mark.parametrize("gamma", [GAMMA, 100.0])
def test_whole_logits_equal_numpy(gamma):
    hidden, head, labels, supervised = case()
    logits = hidden @ head.T
    assert_sums(whole_loss(logits, labels, supervised, gamma), logits, labels, supervised, Objective(gamma))


def plain_sums(logits, labels, supervised, objective, target=None, ids=None):
    """The sums of whole logits, each loss written as in its paper (total variation as half the sum of differences)."""
    log_q = jax.nn.log_softmax(logits, axis=-1)
    if objective.loss != "ce":
        labels = jnp.argmax(target, axis=-1)
    if ids is not None:
        labels = jnp.full((V,), -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))[labels]
    known = labels >= 0
    correct = jnp.argmax(logits, axis=-1) == labels
    if objective.loss in ("ce", "ce_argmax"):
        picked = jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return loss_sums(
            SlotTerms(*(jnp.where(known, x, 0.0) for x in (-picked, jnp.exp(picked))), correct, known), supervised, objective
        )
    p, q = jax.nn.softmax(target, axis=-1), jnp.exp(log_q)
    outside = 0.0
    if ids is not None:
        p, outside = p[..., ids], 1 - p[..., ids].sum(-1)
    kl, tv = (p * (jnp.log(p) - log_q)).sum(-1) + outside, 0.5 * (jnp.abs(p - q).sum(-1) + outside)
    share = jax.lax.stop_gradient({"kl": 1.0, "tv": 0.0, "lk": jnp.exp(-3 * (1 - tv))}[objective.loss])
    terms = SlotTerms(share * kl + (1 - share) * tv, jax.lax.stop_gradient(1 - tv), correct, jnp.ones_like(known))
    return loss_sums(terms, supervised, objective)


# Each loss with each kind of head; every chunk with each way to weigh, whole and drafting a part (chunks of 17, but for ce).
CASES = [(DECAY, True, 1), (DPACE, True, 17), (DECAY, False, 17), (DPACE, False, 1000), (DECAY, True, 1000), (DPACE, False, 1)]
CASES += [
    (Objective(GAMMA, weights, loss), frozen, chunk)
    for losses, cases in (
        (("ce_argmax", "tv"), (("decay", True, 1), ("dpace", False, 17))),
        (("kl", "lk"), (("dpace", True, 17), ("decay", False, 1000))),
    )
    for loss in losses
    for weights, frozen, chunk in cases
]


@functools.cache
def plain_gradients(objective, ids):
    """Towards hidden states and head, by automatic differentiation of whole logits."""
    hidden, head, labels, supervised = case()
    drafted = np.arange(V) if ids is None else np.asarray(ids)
    target = None if objective.loss == "ce" else of_target(hidden @ head.T)[1].astype(np.float32)

    def weighted(hidden, head, labels, supervised, drafted, target):
        logits = hidden @ head[drafted].T
        return 3.0 * plain_sums(logits, labels, supervised, objective, target, None if ids is None else drafted).weighted

    return jax.jit(jax.grad(weighted, argnums=(0, 1)))(hidden, head, labels, supervised, drafted, target)


@pytest.mark.parametrize(("objective", "frozen", "chunk"), CASES)
def test_chunked_head_equals_whole_logits(objective, frozen, chunk):
    """3 blocks a row in chunks of one, of two (padded) and in one: values, and gradients equal to plain differentiation. Losses of
    the target's law with chunks of 17 are of a drafter that drafts every second token and one more."""
    hidden, head, labels, supervised = case()
    target_BTV, at_slots = of_target(hidden @ head.T) if objective.loss != "ce" else (None, None)
    ids = (*range(0, V, 2), 5) if objective.loss != "ce" and chunk == 17 else None
    drafted = np.arange(V) if ids is None else np.asarray(ids)
    wanted_hidden, wanted_head = plain_gradients(objective, ids)
    options = {"frozen": frozen, "logit_chunk": chunk, "objective": objective, "target_BTV": target_BTV}
    candidates = None if ids is None else draft_vocabulary(ids, V)
    (_, sums), (got_hidden, got_head) = value_and_gradient(hidden, head, labels, supervised, candidates, **options)
    assert_sums(sums, hidden @ head[drafted].T, labels, supervised, objective, target_BAKV=at_slots, ids=ids)
    np.testing.assert_allclose(got_hidden, wanted_hidden, rtol=1e-4, atol=1e-5)
    assert (got_hidden[:, :, 0] == 0).all(), "slot 0 has no label"
    if frozen:
        assert (got_head == 0).all()
    else:
        np.testing.assert_allclose(got_head, wanted_head, rtol=1e-4, atol=1e-5)


def test_what_the_losses_over_a_law_measure():
    """A drafter that has the target's law loses nothing, an ever worse one ever more; total variation is one less the overlap; the
    blend is the divergence where nothing overlaps and mostly total variation where all does."""
    law = np.asarray([[0.5, 0.3, 0.2, 1e-9]])
    worse = np.asarray([[0.5, 0.3, 0.2, 1e-9], [0.4, 0.4, 0.2, 1e-9], [0.1, 0.1, 0.1, 0.7], [1e-9, 1e-9, 1e-9, 1.0]])
    log_law, logits = (jnp.asarray(np.log(x), jnp.float32) for x in (np.repeat(law, 4, 0), worse))
    overlap = np.minimum(law, worse).sum(1)
    terms = {loss: Objective(GAMMA, "decay", loss).terms(logits, jnp.zeros(4, jnp.int32), log_law) for loss in ("kl", "tv", "lk")}
    for term in terms.values():
        np.testing.assert_allclose(term.confidence, overlap, rtol=1e-5, atol=1e-6)
        assert float(term.loss[0]) == pytest.approx(0, abs=1e-6)
        assert (np.diff(term.loss) > 1e-3).all()
    np.testing.assert_allclose(terms["tv"].loss, 1 - overlap, atol=1e-6)
    assert float(terms["lk"].loss[3]) == pytest.approx(float(terms["kl"].loss[3]), rel=1e-3)
    assert float(terms["lk"].loss[1]) == pytest.approx(1 - overlap[1], rel=0.1)


@pytest.mark.parametrize(("frozen", "size"), [(True, None), (False, 6)])
def test_nothing_supervised_is_zero_loss_and_zero_gradient(frozen, size):
    hidden, head, labels, _ = case()
    nothing = np.zeros((B, A, K), bool)
    candidates = None if size is None else sample(jax.random.key(0), labels, nothing, V, size)
    (value, sums), grads = value_and_gradient(hidden, head, labels, nothing, candidates, frozen=frozen, logit_chunk=17)
    assert value == 0
    assert (float(sums.loss), float(sums.unweighted_loss), float(sums.acceptance_length)) == (0, 0, 1)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(sums))
    assert all(not np.asarray(grad).any() for grad in grads)


def test_dpace_weights_by_hand():
    """Confidences 1, 1/2, 1/4: prefixes of likelihood 1, 3/4, 15/32. A slot counts for the prefixes that hold it."""
    chance_AJ = jnp.asarray([[1.0, 1 / 2, 1 / 4]] * 3, jnp.float32)
    supervised_AJ = jnp.asarray([[True, True, True], [True, False, True], [True, True, True]])
    learned_AJ = jnp.asarray([[True, True, True], [True, True, True], [True, False, True]])
    weights_AJ = DPACE.weights(chance_AJ, supervised_AJ, learned_AJ)
    np.testing.assert_allclose(weights_AJ[0], [1 + 3 / 4 + 15 / 32, 3 / 4 + 15 / 32, 15 / 32], rtol=1e-6)
    np.testing.assert_allclose(weights_AJ[1], [1 + 5 / 8, 0, 5 / 8], rtol=1e-6)
    np.testing.assert_allclose(weights_AJ[2], [1 + 15 / 32, 0, 15 / 32], rtol=1e-6)
    slope = jax.grad(lambda chance_AJ: DPACE.weights(chance_AJ, supervised_AJ, learned_AJ).sum())(chance_AJ)
    assert not np.asarray(slope).any(), "no gradient through weights"


def test_only_supervised_slots_matter():
    hidden, head, labels, supervised = case()
    wild = np.where(supervised[..., None] & (np.arange(K) > 0)[:, None], hidden, np.float32(1e4))
    other = np.where(supervised, labels, 0)
    options = {"frozen": True, "logit_chunk": 17, "dtype": "float32"}
    clean, spoiled = (run_head(h, head, y, supervised, DECAY, **options) for h, y in ((hidden, labels), (wild, other)))
    for name in ("weighted", "unweighted", "accepted", "correct_K"):
        np.testing.assert_allclose(getattr(clean, name), getattr(spoiled, name), rtol=1e-5, err_msg=name)


def test_sums_add_up_over_any_split():
    """Two halves of a batch, added, give what the batch gives; so do their gradients."""
    hidden, head, labels, supervised = case()
    (_, whole), (gradient, _) = value_and_gradient(hidden, head, labels, supervised, frozen=True, logit_chunk=17)
    halves = [
        value_and_gradient(hidden[i : i + 1], head, labels[i : i + 1], supervised[i : i + 1], frozen=True, logit_chunk=17)
        for i in (0, 1)
    ]
    added = jax.tree.map(np.add, halves[0][0][1], halves[1][0][1])
    for got, want in zip(jax.tree.leaves((added, added.loss)), jax.tree.leaves((whole, whole.loss)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([h[1][0] for h in halves]), gradient, rtol=1e-5, atol=1e-6)


def test_accept_length_does_not_depend_on_gamma():
    hidden, head, labels, supervised = case()
    sums = [whole_loss(hidden @ head.T, labels, supervised, gamma) for gamma in (GAMMA, 100.0)]
    assert float(sums[0].acceptance_length) == float(sums[1].acceptance_length)
    assert float(sums[0].loss) != float(sums[1].loss)


def test_bfloat16_head_is_close():
    hidden, head, labels, supervised = case()
    options = {"frozen": True, "logit_chunk": 17}
    ours = run_head(hidden, jnp.asarray(head, jnp.bfloat16), labels, supervised, DECAY, dtype="bfloat16", **options)
    exact = run_head(hidden, head, labels, supervised, DECAY, dtype="float32", **options)
    assert 0 < abs(float(ours.loss) - float(exact.loss)) < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Sampled vocabulary

sample = jax.jit(sample_vocabulary, static_argnames=("vocab_size", "size"))


@pytest.mark.parametrize("size", [13, V])
def test_candidates_hold_every_label_and_nothing_twice(size):
    _, _, labels, supervised = case()
    labels = labels % 7  # at most 7 distinct ones
    used = set(np.asarray(labels)[np.asarray(supervised)].tolist())
    candidates = sample(jax.random.key(3), labels, supervised, V, size)
    ids = np.asarray(candidates.ids_S).tolist()
    assert len(set(ids)) == size
    assert used <= set(ids)
    for token in ids:
        assert ids[int(candidates.place_V[token])] == token
    stands_for = (V - len(used)) / (size - len(used))
    wanted = [0.0 if token in used else np.log(stands_for) for token in ids]
    np.testing.assert_allclose(candidates.correction_S, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [True, False])
def test_all_tokens_as_candidates_is_exact(frozen):
    hidden, head, labels, supervised = case()
    candidates = sample(jax.random.key(0), labels, supervised, V, V)
    options = {"frozen": frozen, "logit_chunk": 17}
    (_, got), got_grads = value_and_gradient(hidden, head, labels, supervised, candidates, **options)
    (_, want), want_grads = value_and_gradient(hidden, head, labels, supervised, **options)
    for g, w in zip(jax.tree.leaves((got, got_grads)), jax.tree.leaves((want, want_grads)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_sampled_normaliser_is_unbiased_and_labels_cost_what_they_should():
    """Over many keys the mean of exp(cross-entropy) x p(label), the sampled normaliser over the exact one, is 1."""
    hidden, head, labels, supervised = case()
    labels = labels % 4
    logits = hidden @ head.T

    def normalisers(key):
        candidates = sample_vocabulary(key, jnp.asarray(labels), jnp.asarray(supervised), V, 9)
        among = jnp.asarray(logits)[..., candidates.ids_S] + candidates.correction_S[None, None, None]
        return jnp.exp(jax.nn.logsumexp(among, axis=-1) - jax.nn.logsumexp(logits, axis=-1))

    ratios = np.asarray(jax.jit(jax.vmap(normalisers))(jax.random.split(jax.random.key(0), 4000)))
    deviation = ratios.std(0) / np.sqrt(len(ratios))
    assert ratios.std() > 0.1
    assert (np.abs(ratios.mean(0) - 1) < 5 * deviation + 1e-5).all()
    candidates = sample(jax.random.key(5), labels, supervised, V, 9)
    sums = run_head(hidden, head, labels, supervised, DECAY, frozen=True, logit_chunk=17, dtype="float32", candidates=candidates)
    ids_S, correction_S, place_V = (np.asarray(x) for x in candidates)
    wanted = whole_loss(logits[..., ids_S] + correction_S, place_V[labels], supervised, GAMMA)
    for got, want in zip(jax.tree.leaves(sums), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(("frozen", "objective"), [(True, DPACE), (False, DECAY)], ids=["frozen dpace", "decay"])
def test_a_label_that_is_never_drafted_is_a_miss_that_teaches_nothing(frozen, objective):
    hidden, head, labels, supervised = case()
    ids = tuple(range(0, V, 2))
    options = {"frozen": frozen, "logit_chunk": 17, "objective": objective}
    (_, sums), (grad, _) = value_and_gradient(hidden, head, labels, supervised, draft_vocabulary(ids, V), **options)
    wanted, correct_K, count_K = reference.loss(hidden @ head[list(ids)].T, labels, supervised, *objective, ids=ids)
    for name, value in dataclasses.asdict(wanted).items():
        np.testing.assert_allclose(getattr(sums, name), value, rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(sums.correct_K, correct_K)
    np.testing.assert_array_equal(sums.count_K, count_K)
    assert 0 < wanted.slots < np.asarray(supervised)[..., 1:].sum()
    np.testing.assert_allclose(grad, plain_gradients(objective, ids)[0], rtol=1e-4, atol=1e-5)
    unknown = np.asarray(labels % 2 == 1)
    assert not np.asarray(grad)[unknown].any()


def test_other_keys_draw_other_candidates():
    _, _, labels, supervised = case()
    draw = partial(sample, labels=labels % 4, supervised=supervised, vocab_size=V, size=9)
    seen = {tuple(sorted(np.asarray(draw(jax.random.key(i)).ids_S).tolist())) for i in range(10)}
    assert len(seen) > 8


# ---------------------------------------------------------------------------------------------------------------------
# On several devices


def test_every_device_works_on_its_own_rows():
    """Chunks hold a part of every row: with rows split over devices the compiled gradient gathers nothing."""
    mesh = jax.make_mesh((B,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:B])
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))

    def weighted(hidden, head, labels, supervised):
        return head_loss(hidden, head, labels, supervised, DECAY, frozen=True, logit_chunk=8, dtype="float32").weighted

    gradient = jax.jit(jax.grad(weighted), in_shardings=(rows, whole, rows, rows))
    text = gradient.lower(*case()).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))
