"""The paper's properties hold, and each check can fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax.drafter as drafter
import dflash_jax.invariants as invariants

pytestmark = pytest.mark.one_cell


def test_all_hold(capsys):
    assert invariants.check_invariants() == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == len(invariants.CHECKS) == 6
    assert all(line.startswith("ok: ") for line in lines)


def test_a_drafter_without_positions_fails(monkeypatch, capsys):
    """All angles zero: the mask slots cannot be told apart, and only the slots check sees it."""

    def no_angles(rope, head_dim, positions):
        shape = (*positions.shape, head_dim // 2)
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)

    monkeypatch.setattr(drafter, "rope_tables", no_angles)
    assert "slots differ by" in invariants.slots_differ()
    monkeypatch.setattr(invariants, "CHECKS", (invariants.weights_decrease, invariants.slots_differ))
    assert invariants.check_invariants() == 1
    first, second = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("ok: ")
    assert second.startswith("FAILED: different slots of a block can draft different tokens")


def test_a_drafter_of_one_slot_a_pass_fails(monkeypatch):
    propose = drafter.Drafter.propose

    def slot_by_slot(self, params, block_BKD, positions_BK, cache):
        whole = [propose(self, params, block_BKD, positions_BK, cache) for _ in range(block_BKD.shape[1] - 1)]
        return whole[0]

    monkeypatch.setattr(drafter.Drafter, "propose", slot_by_slot)
    assert invariants.one_pass_drafts_all() == "7 passes drafted (1, 7), not (1, 7)"


def test_features_fused_twice_fail(monkeypatch):
    context = drafter.DraftModel.context

    def twice(self, taps, rope):
        self.fuser(taps)
        return context(self, taps, rope)

    monkeypatch.setattr(drafter.DraftModel, "context", twice)
    assert invariants.features_fused_once() == "the fuser ran 2 times"


def test_a_layer_without_context_fails(monkeypatch):
    """Its queries see the block alone, although its keys and values of the features are made."""
    attention = drafter.anchored_attention
    layers = iter(range(100))

    def deaf(q, context_k, context_v, *rest, **options):
        if next(layers) % invariants.DRAFTER.num_draft_layers == 1:
            context_k, context_v = context_k[:, :, :1] * 0 - 1e4, context_v[:, :, :1] * 0
        return attention(q, context_k, context_v, *rest, **options)

    monkeypatch.setattr(drafter, "anchored_attention", deaf)
    assert invariants.features_fused_once() == "layer 1 does not read the features"


def test_a_wrong_bonus_token_fails(monkeypatch):
    verify = invariants.verify_block
    monkeypatch.setattr(invariants, "verify_block", lambda draft, own: verify(draft, own)._replace(tokens_BK=jnp.asarray(own) * 0))
    assert "not the accepted prefix and the target's next token" in invariants.prefix_and_bonus()


def test_weights_that_do_not_fall_fail(monkeypatch):
    monkeypatch.setattr(invariants, "slot_weights", lambda size, gamma: jnp.ones(size).at[0].set(0.0))
    assert invariants.weights_decrease() is not None


def test_a_cut_gradient_fails(monkeypatch):
    matmul = drafter.GatedMLP.__call__
    monkeypatch.setattr(drafter.GatedMLP, "__call__", lambda self, x: jax.lax.stop_gradient(matmul(self, x)))
    assert "mlp" in invariants.gradients_reach_everything()


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_count_of_accepted_tokens_fails(monkeypatch, shift):
    verify = invariants.verify_block

    def wrong(draft, own):
        out = verify(draft, own)
        accepted = np.clip(np.asarray(out.accepted_B) + shift, 0, draft.shape[1])
        return out._replace(accepted_B=jnp.asarray(accepted))

    monkeypatch.setattr(invariants, "verify_block", wrong)
    assert "accepted" in invariants.prefix_and_bonus()
