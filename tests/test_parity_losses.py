"""Our losses and slot weights equal those of speculators 0.9.0 and SpecForge 0.2.0 on the same logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_zlab import quiet

from dflash_jax.loss import loss_sums
from dflash_jax.objectives import Objective

pytestmark = pytest.mark.oracle

BLOCKS, SLOTS, V, GAMMA = 4, 5, 23, 3.0
OURS = {"ce_argmax": "ce", "kl": "kl_div", "tv": "tv", "lk": "lk_hybrid"}
"""the names that speculators has for them"""


@pytest.fixture(scope="module")
def logits():
    """A drafter's and a target's, which agree in most slots, and supervision with a hole and without slot 0."""
    random = np.random.default_rng(3)
    target = 2 * random.standard_normal((BLOCKS, SLOTS, V))
    supervised = np.ones((BLOCKS, SLOTS), bool)
    supervised[1, 2] = supervised[3, 3:] = False
    supervised[:, 0] = False
    return *((x.astype(np.float32)) for x in (target + random.standard_normal(target.shape), target)), supervised


def ours(objective, logits, target, supervised):
    """Loss of each slot, sums, and the gradient of the weighted sum towards the drafter's logits."""

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(logits):
        terms = objective.terms(logits, jnp.argmax(target, axis=-1).astype(jnp.int32)[None], jax.nn.log_softmax(target)[None])
        sums = loss_sums(terms, jnp.asarray(supervised)[None], objective)
        return sums.weighted, (terms, sums)

    grad, (terms, sums) = gradient(jnp.asarray(logits)[None])
    return terms, sums, np.asarray(grad)


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", OURS)
def test_losses_equal_speculators(logits, loss, weights):
    """Each slot's loss, the weighted sum (they divide both by the supervised slots), its gradient and the hits. Their D-PACE takes
    e^-loss for the chance of acceptance, which is right for cross-entropy only."""
    with quiet():
        import torch
        from speculators.losses.utils import _EAGER_LOSS_FN_MAP
        from speculators.models.dflash.metrics import compute_metrics

    draft, target, supervised = logits
    function = _EAGER_LOSS_FN_MAP[OURS[loss]]
    theirs = torch.tensor(draft.reshape(1, -1, V), requires_grad=True)
    of_target, mask = torch.tensor(target.reshape(1, -1, V)), torch.tensor(supervised.reshape(1, -1))
    terms, sums, grad = ours(Objective(GAMMA, weights, loss), draft, target, supervised)
    np.testing.assert_allclose(terms.loss.reshape(1, -1), function(theirs, of_target).detach(), rtol=1e-4, atol=1e-6)
    if weights == "dpace" and loss != "ce_argmax":
        return
    value, metrics = compute_metrics(
        theirs, of_target, mask, SLOTS, GAMMA, {"loss": (function, 1.0)}, "dpace" if weights == "dpace" else "fixed-exp-decay"
    )
    value.backward()
    slots = supervised.sum() + 1e-5
    assert float(sums.weighted) / slots == pytest.approx(value.item(), rel=1e-5)
    np.testing.assert_allclose(grad.reshape(1, -1, V) / slots, theirs.grad, rtol=1e-4, atol=1e-7)
    assert float(sums.correct_K.sum()) == metrics["full_acc_sum"].item() > 0


def test_the_blend_equals_specforges(logits):
    """SpecForge blends means over a batch; a batch of one slot is a slot."""
    with quiet():
        import torch
        from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss

    draft, target, supervised = logits
    terms, _, _ = ours(Objective(GAMMA, "decay", "lk"), draft, target, supervised)
    for b, k in ((0, 1), (2, 3)):
        law, one = torch.softmax(torch.tensor(target[b, k]), -1)[None, None], torch.ones(1, 1, 1, dtype=torch.bool)
        log_draft = torch.log_softmax(torch.tensor(draft[b, k]), -1)[None, None]
        rate, log_rate = compute_acceptance_rate(logits=torch.tensor(draft[b, k])[None, None], target_probs=law, position_mask=one)
        kl = (law * (law.log() - log_draft)).sum()
        lk = compute_lk_loss(
            kl_loss=kl, acceptance_rate=rate, log_acceptance_rate=log_rate, lk_loss_type="lambda", kl_scale=1.0, kl_decay=3.0
        )
        assert float(terms.loss[0, b, k]) == pytest.approx(lk.item(), rel=1e-5)
        assert float(terms.confidence[0, b, k]) == pytest.approx(rate.item(), rel=1e-5)
