"""Losses against numpy and against plain automatic differentiation of whole logits."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from dflash_jax.loss import Objective, dflash_loss, draft_vocabulary, head_loss, loss_sums, sample_vocabulary

pytestmark = pytest.mark.one_cell

B, A, K, D, V, GAMMA = 2, 3, 5, 8, 19, 2.5
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
    floats = [jnp.asarray(x, jnp.float32) for x in (hidden, head)]
    return *floats, jnp.asarray(labels, jnp.int32), jnp.asarray(supervised)


def assert_sums(sums, logits, labels, supervised, objective=DECAY):
    wanted, correct_K, count_K = reference.loss(logits, labels, supervised, *objective)
    assert wanted.accepted > 3
    assert wanted.blocks == B * A - 1
    for name, value in dataclasses.asdict(wanted).items():
        np.testing.assert_allclose(getattr(sums, name), value, rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(sums.correct_K, correct_K)
    np.testing.assert_array_equal(sums.count_K, count_K)
    np.testing.assert_allclose(sums.loss, wanted.weighted / wanted.weight, rtol=1e-5)
    np.testing.assert_allclose(sums.unweighted_loss, wanted.unweighted / wanted.slots, rtol=1e-5)
    np.testing.assert_allclose(sums.acceptance_length, 1 + wanted.accepted / wanted.blocks, rtol=1e-6)


run_head = jax.jit(head_loss, static_argnames=("objective", "frozen", "logit_chunk", "dtype"))


def value_and_gradient(hidden, head, labels, supervised, candidates=None, objective=DECAY, **options):
    """The sums, and gradients of the weighted sum towards hidden states and head."""

    def weighted(hidden, head):
        sums = run_head(hidden, head, labels, supervised, objective, dtype="float32", candidates=candidates, **options)
        return 3.0 * sums.weighted, sums  # not 1: a custom gradient must use the cotangent

    return jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(hidden, head)


@pytest.mark.parametrize("gamma", [GAMMA, 100.0])
def test_whole_logits_equal_numpy(gamma):
    hidden, head, labels, supervised = case()
    logits = hidden @ head.T
    assert_sums(dflash_loss(logits, labels, supervised, gamma), logits, labels, supervised, Objective(gamma))


def plain_sums(hidden, head, labels, supervised, objective):
    """The sums of whole logits."""
    logits = hidden @ head.T
    entropy = -jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), labels[..., None], axis=-1)[..., 0]
    return loss_sums(entropy, jnp.argmax(logits, axis=-1) == labels, supervised, objective)


@pytest.mark.parametrize("objective", [DECAY, DPACE], ids=lambda objective: objective.kind)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("chunk", [1, 17, 1000])
def test_chunked_head_equals_whole_logits(frozen, chunk, objective):
    """24 rows in chunks of one block, of 4 (padded) and in one: values, and gradients equal to plain differentiation."""
    hidden, head, labels, supervised = case()

    def plain(hidden, head):
        return 3.0 * plain_sums(hidden, head, labels, supervised, objective).weighted

    wanted_hidden, wanted_head = jax.grad(plain, argnums=(0, 1))(hidden, head)
    options = {"frozen": frozen, "logit_chunk": chunk, "objective": objective}
    (_, sums), (got_hidden, got_head) = value_and_gradient(hidden, head, labels, supervised, **options)
    assert_sums(sums, hidden @ head.T, labels, supervised, objective)
    np.testing.assert_allclose(got_hidden, wanted_hidden, rtol=1e-4, atol=1e-5)
    assert (got_hidden[:, :, 0] == 0).all(), "slot 0 has no label"
    if frozen:
        assert (got_head == 0).all()
    else:
        np.testing.assert_allclose(got_head, wanted_head, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("size", [None, 6])
def test_nothing_supervised_is_zero_loss_and_zero_gradient(frozen, size):
    hidden, head, labels, _ = case()
    nothing = jnp.zeros((B, A, K), bool)
    candidates = None if size is None else sample_vocabulary(jax.random.key(0), labels, nothing, V, size)
    (value, sums), grads = value_and_gradient(hidden, head, labels, nothing, candidates, frozen=frozen, logit_chunk=7)
    assert value == 0
    assert (float(sums.loss), float(sums.unweighted_loss), float(sums.acceptance_length)) == (0, 0, 1)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(sums))
    assert all(not np.asarray(grad).any() for grad in grads)


def test_dpace_weights_by_hand():
    """Confidences 1, 1/2, 1/4: prefixes of likelihood 1, 3/4, 15/32. A slot counts for the prefixes that hold it."""
    entropy_AJ = jnp.asarray([[0.0, np.log(2), np.log(4)]] * 2, jnp.float32)
    supervised_AJ = jnp.asarray([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    weights_AJ = DPACE.weights(entropy_AJ, supervised_AJ)
    np.testing.assert_allclose(weights_AJ[0], [1 + 3 / 4 + 15 / 32, 3 / 4 + 15 / 32, 15 / 32], rtol=1e-6)
    np.testing.assert_allclose(weights_AJ[1], [1 + 5 / 8, 0, 5 / 8], rtol=1e-6)
    slope = jax.grad(lambda entropy_AJ: DPACE.weights(entropy_AJ, supervised_AJ).sum())(entropy_AJ)
    assert not np.asarray(slope).any(), "no gradient through weights"


def test_only_supervised_slots_matter():
    hidden, head, labels, supervised = case()
    wild = jnp.where(supervised[..., None] & (jnp.arange(K) > 0)[None, None, :, None], hidden, 1e4)
    other = jnp.where(supervised, labels, 0)
    for name in ("weighted", "unweighted", "accepted", "correct_K"):
        values = [
            getattr(run_head(h, head, y, supervised, DECAY, frozen=True, logit_chunk=7, dtype="float32"), name)
            for h, y in ((hidden, labels), (wild, other))
        ]
        np.testing.assert_allclose(*values, rtol=1e-5, err_msg=name)


def test_sums_add_up_over_any_split():
    """Two halves of a batch, added, give what the batch gives; so do their gradients."""
    hidden, head, labels, supervised = case()
    (_, whole), (gradient, _) = value_and_gradient(hidden, head, labels, supervised, frozen=True, logit_chunk=7)
    halves = [
        value_and_gradient(hidden[i : i + 1], head, labels[i : i + 1], supervised[i : i + 1], frozen=True, logit_chunk=7)
        for i in (0, 1)
    ]
    added = jax.tree.map(jnp.add, halves[0][0][1], halves[1][0][1])
    for got, want in zip(jax.tree.leaves((added, added.loss)), jax.tree.leaves((whole, whole.loss)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([h[1][0] for h in halves]), gradient, rtol=1e-5, atol=1e-6)


def test_accept_length_does_not_depend_on_gamma():
    hidden, head, labels, supervised = case()
    sums = [dflash_loss(hidden @ head.T, labels, supervised, gamma) for gamma in (0.5, 50.0)]
    assert float(sums[0].acceptance_length) == float(sums[1].acceptance_length)
    assert float(sums[0].loss) != float(sums[1].loss)


def test_bfloat16_head_is_close():
    hidden, head, labels, supervised = case()
    options = {"frozen": True, "logit_chunk": 7}
    ours = run_head(hidden, head.astype(jnp.bfloat16), labels, supervised, DECAY, dtype="bfloat16", **options)
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
    options = {"frozen": frozen, "logit_chunk": 7}
    (_, got), got_grads = value_and_gradient(hidden, head, labels, supervised, candidates, **options)
    (_, want), want_grads = value_and_gradient(hidden, head, labels, supervised, **options)
    for g, w in zip(jax.tree.leaves((got, got_grads)), jax.tree.leaves((want, want_grads)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_sampled_normaliser_is_unbiased_and_labels_cost_what_they_should():
    """Over many keys the mean of exp(cross-entropy) x p(label), the sampled normaliser over the exact one, is 1."""
    hidden, head, labels, supervised = case()
    labels = labels % 4
    logits = hidden @ head.T
    exact = jax.nn.logsumexp(logits, axis=-1)

    def normalisers(key):
        candidates = sample_vocabulary(key, labels, supervised, V, 9)
        return jnp.exp(jax.nn.logsumexp(logits[..., candidates.ids_S] + candidates.correction_S[None, None, None], axis=-1) - exact)

    ratios = np.asarray(jax.jit(jax.vmap(normalisers))(jax.random.split(jax.random.key(0), 4000)))
    deviation = ratios.std(0) / np.sqrt(len(ratios))
    assert ratios.std() > 0.1
    assert (np.abs(ratios.mean(0) - 1) < 5 * deviation + 1e-5).all()
    candidates = sample(jax.random.key(5), labels, supervised, V, 9)
    sums = run_head(hidden, head, labels, supervised, DECAY, frozen=True, logit_chunk=7, dtype="float32", candidates=candidates)
    among = logits[..., candidates.ids_S] + candidates.correction_S[None, None, None]
    wanted = dflash_loss(among, candidates.place_V[labels], supervised, GAMMA)
    for got, want in zip(jax.tree.leaves(sums), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("objective", [DECAY, DPACE], ids=lambda objective: objective.kind)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_label_that_is_never_drafted_is_a_miss_that_teaches_nothing(frozen, objective):
    hidden, head, labels, supervised = case()
    ids = tuple(range(0, V, 2))
    known = labels % 2 == 0
    options = {"frozen": frozen, "logit_chunk": 7, "objective": objective}
    (_, sums), (grad, _) = value_and_gradient(hidden, head, labels, supervised, draft_vocabulary(ids, V), **options)
    reduced = head[jnp.asarray(ids)]

    def entropy(hidden):
        return -jnp.take_along_axis(jax.nn.log_softmax(hidden @ reduced.T), (labels // 2)[..., None], axis=-1)[..., 0]

    weights, chances = np.zeros((B, A, K)), np.exp(-np.asarray(entropy(hidden))) * np.asarray(known)
    for b, a in np.ndindex(B, A):
        slots = [k for k in range(1, K) if supervised[b, a, k]]
        learned = [k for k in slots if known[b, a, k]]
        prefix = dict(zip(slots, np.cumprod([0.5 + 0.5 * chances[b, a, k] for k in slots]), strict=True))
        for k in learned:
            weights[b, a, k] = np.exp(-(k - 1) / GAMMA) if objective == DECAY else sum(prefix[j] for j in learned if j >= k)
    wanted, wanted_grad = jax.value_and_grad(lambda hidden: (jnp.asarray(weights, jnp.float32) * entropy(hidden)).sum())(hidden)
    np.testing.assert_allclose(sums.weighted, wanted, rtol=1e-5)
    np.testing.assert_allclose(grad, 3.0 * wanted_grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums.weight, weights.sum() if objective == DECAY else (weights > 0).sum(), rtol=1e-5)
    plain = plain_sums(hidden, reduced, labels // 2, supervised & known, objective)
    for name in ("unweighted", "slots"):
        np.testing.assert_allclose(getattr(sums, name), getattr(plain, name), rtol=1e-5, err_msg=name)
    hits = (2 * np.asarray(hidden @ reduced.T).argmax(-1) == np.asarray(labels)) & np.asarray(supervised)
    counted = np.asarray(supervised)[..., 1:]
    assert float(sums.accepted) == np.cumprod(hits[..., 1:], axis=-1).sum()
    np.testing.assert_array_equal(sums.count_K[1:], counted.sum((0, 1)))
    assert float(sums.blocks) == counted.any(-1).sum()
    assert 0 < float(sums.slots) < counted.sum()


def test_other_keys_draw_other_candidates():
    _, _, labels, supervised = case()
    draw = partial(sample, labels=labels % 4, supervised=supervised, vocab_size=V, size=9)
    seen = {tuple(sorted(np.asarray(draw(jax.random.key(i)).ids_S).tolist())) for i in range(10)}
    assert len(seen) > 8
