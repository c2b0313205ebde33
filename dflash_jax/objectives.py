"""What a drafted slot learns, and how much it counts: the terms of a training loss, slot by slot."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.blocks import slot_weights
from dflash_jax.config import Loss, SlotWeights

OVER_THE_LAW = ("kl", "tv", "lk")
"""losses over the target's whole law at a slot; ce_argmax needs the likeliest token only, and ce the data's"""
LK_DECAY = 3.0
"""how fast the LK blend moves from KL to total variation as the overlap grows (arXiv 2602.23881)"""


class SlotTerms(NamedTuple):
    """One number a slot, whatever the shape of the slots."""

    loss: Float[Array, "*slots"]
    confidence: Float[Array, "*slots"]
    """chance that decoding accepts the slot: the label's probability, or the overlap with the target's law; without gradient"""
    correct: Bool[Array, "*slots"]
    """the drafter's likeliest token is the label"""
    learned: Bool[Array, "*slots"]
    """false where the label can never be drafted: a miss that teaches nothing"""


class Objective(NamedTuple):
    """Which loss a slot has, and how the slots of a block are weighed."""

    gamma_decay: float
    slot_weights: SlotWeights = "decay"
    """decay: w_k = exp(-(k-1)/gamma), divided by the sum of weights (paper, Eq. 4). dpace: weights from the drafter's own
    confidences, divided by the number of supervised slots (D-PACE, arXiv 2605.18810)"""
    loss: Loss = "ce"
    """ce: cross-entropy of the data's token. Against the target's law p at that slot, given the data before it: ce_argmax,
    cross-entropy of its likeliest token; kl, KL(p, q); tv, total variation 1 - sum min(p, q); lk, their blend (arXiv 2602.23881)"""

    def terms(
        self,
        logits: Float[Array, "*slots S"],
        labels: Int[Array, "*slots"],
        log_law: Float[Array, "*slots S"] | None = None,
    ) -> SlotTerms:
        """Terms from the drafter's logits over its S tokens, the labels' places among them (-1: not one of them), and for kl, tv
        and lk the log of the target's law there.

        Where the drafter has only a part of the vocabulary, the law is that part of the target's: it is not made to sum to 1, so
        the overlap stays the chance of acceptance, and slots where the target wants other tokens teach little.
        """
        top = jax.nn.logsumexp(logits, axis=-1)
        correct, learned = jnp.argmax(logits, axis=-1) == labels, labels >= 0
        if self.loss not in OVER_THE_LAW:
            # a sum, not a gather: its gradient is then no scatter, and a head split by vocabulary stays where it is
            is_label = labels[..., None] == jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
            loss = jnp.where(learned, top - jnp.where(is_label, logits, 0.0).sum(-1), 0.0)
            chance = jnp.where(learned, jnp.exp(-loss), 0.0)
            return SlotTerms(loss, jax.lax.stop_gradient(chance), correct, learned)
        assert log_law is not None, f"{self.loss} needs the target's law"
        log_draft, law = logits - top[..., None], jnp.exp(log_law)
        overlap = jnp.minimum(law, jnp.exp(log_draft)).sum(-1)
        fixed = jax.lax.stop_gradient(overlap)
        # plus 1 - sum p, which is 0 for a whole law: for a part of one it keeps KL from falling below 0
        divergence = (law * (log_law - log_draft - 1)).sum(-1) + 1
        share = jnp.exp(-LK_DECAY * fixed)
        loss = {"kl": divergence, "tv": 1 - overlap, "lk": share * divergence + (1 - share) * (1 - overlap)}[self.loss]
        return SlotTerms(loss, fixed, correct, jnp.ones_like(learned))

    def weights(
        self, confidence_AJ: Float[Array, "A J"], supervised_AJ: Bool[Array, "A J"], learned_AJ: Bool[Array, "A J"]
    ) -> Float[Array, "A J"]:
        """Weights of the drafted slots of blocks, without gradient. A slot that is not supervised or not learned weighs nothing."""
        counts_AJ = (supervised_AJ & learned_AJ).astype(jnp.float32)
        if self.slot_weights == "decay":
            return counts_AJ * slot_weights(confidence_AJ.shape[1] + 1, self.gamma_decay)[None, 1:]
        # Slot j counts as much as the prefixes that end at j or later are likely; halved towards 1, so that late slots learn too.
        likely_AJ = jnp.where(supervised_AJ, 0.5 + 0.5 * jax.lax.stop_gradient(confidence_AJ), 1.0)
        prefix_AJ = jnp.cumprod(likely_AJ, axis=1) * counts_AJ
        return counts_AJ * jnp.flip(jnp.cumsum(jnp.flip(prefix_AJ, 1), axis=1), 1)
