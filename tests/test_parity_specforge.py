"""Our training forward and losses equal SpecForge's (specforge 0.2.0) on the same weights, features, anchors and labels."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import dense_target
from tiny_zlab import MASK, SLIDING, TARGET_LAYERS, VOCAB, equal_gradients, quiet, randomise, save, zlab

from dflash_jax.blocks import make_blocks, sample_anchors
from dflash_jax.config import Config, TrainConfig
from dflash_jax.drafter import Drafter
from dflash_jax.hf import load_drafter
from dflash_jax.train_step import block_loss

pytestmark = pytest.mark.oracle

WIDTH, LENGTH, SLOTS, TAPS = 24, 14, 5, [4, 1, 7]
MASKS = np.array(  # every eligible position is an anchor, so that both sides take the same ones
    [
        [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],  # blocks that overlap, and blocks over the end
        [1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0],  # labels that do not count inside blocks; fewer anchors
    ],
    bool,
)


@pytest.fixture(scope="module")
def specforge(tmp_path_factory):
    """A drafter that SpecForge's class wrote and we loaded, and a target of ours that lends both its embedding and head."""
    with quiet():
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        config = zlab().Config(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_target_layers=TARGET_LAYERS, block_size=SLOTS, attn_implementation="eager",
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            dflash_config={"mask_token_id": MASK, "target_layer_ids": TAPS},
            **SLIDING | {"layer_types": SLIDING["layer_types"][:2]},
        )  # fmt: skip
        drafter = randomise(DFlashDraftModel(config), 0)
    target = dense_target(hidden_size=WIDTH, num_layers=TARGET_LAYERS)
    ours = load_drafter(save(drafter, tmp_path_factory.mktemp("specforge") / "d"), target)
    return SimpleNamespace(Train=OnlineDFlashModel, drafter=drafter, target=target, ours=ours)


@pytest.mark.parametrize("slot_weights", ["decay", "dpace"])
def test_training_equals_specforge(specforge, tmp_path, slot_weights):
    """Loss sums, hits and the gradient of every parameter. (SpecForge divides D-PACE by the batch size, we by the slots.)"""
    torch, target, ours = zlab().torch, specforge.target, specforge.ours
    random = np.random.default_rng(1)
    tokens_BT = random.integers(0, VOCAB, MASKS.shape).astype(np.int32)
    taps_BTM = random.standard_normal((*MASKS.shape, len(TAPS) * WIDTH)).astype(np.float32)
    head, embedding = (torch.tensor(np.asarray(x[...])) for x in (target.head_kernel(target.params), target.params["embed_tokens"]))
    train = specforge.Train(
        specforge.drafter, lambda hidden: hidden @ head.T, lambda ids: embedding[ids], MASK, SLOTS, "eager",
        num_anchors=LENGTH, loss_decay_gamma=3.0, loss_type="dflash" if slot_weights == "decay" else slot_weights,
    )  # fmt: skip
    specforge.drafter.zero_grad()
    _, _, metrics = train(torch.tensor(tokens_BT).long(), torch.tensor(taps_BTM), torch.tensor(MASKS).float())
    weighted, weight = metrics["loss_terms"]
    weighted.backward()

    drafter = Drafter(dataclasses.replace(ours.config, loss_decay_gamma=3.0), ours.params)
    config = Config(train=TrainConfig(anchor_chunk=4, logit_chunk=20, slot_weights=slot_weights))
    anchors_BA, valid_BA = sample_anchors(jax.random.key(0), jnp.asarray(MASKS), LENGTH)
    blocks = make_blocks(jnp.asarray(tokens_BT), jnp.asarray(MASKS), anchors_BA, valid_BA, SLOTS)

    @jax.jit
    def gradient(params):
        def loss(params):
            sums, _ = block_loss(drafter, params, target, target.params, jnp.asarray(taps_BTM), blocks, jax.random.key(0), config)
            return sums.weighted, sums

        return jax.grad(loss, has_aux=True)(params)

    grads, sums = gradient(drafter.params)
    assert float(sums.weighted) == pytest.approx(weighted.item(), rel=1e-5)
    if slot_weights == "decay":
        assert float(sums.weight) == pytest.approx(weight.item(), rel=1e-6)
    hits, slots = (x.item() for x in metrics["ratio_metrics"]["acc"])
    assert (float(sums.correct_K.sum()), float(sums.slots)) == (hits, slots)
    equal_gradients(drafter.config, grads, specforge.drafter, tmp_path / "grads")
