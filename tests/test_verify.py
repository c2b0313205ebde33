"""Verification against a Python loop, over every case there is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.verify import verify_block

pytestmark = pytest.mark.one_cell


def accepted_by_loop(draft, target):
    count = 0
    while count < len(draft) and draft[count] == target[count]:
        count += 1
    return count


@pytest.mark.parametrize("drafted", [0, 1, 3])
def test_every_draft_and_every_target(drafted):
    """All pairs over three tokens, at once: batched, jitted, no loop."""
    pairs = list(itertools.product(itertools.product(range(3), repeat=drafted), itertools.product(range(3), repeat=drafted + 1)))
    draft_BJ = np.array([draft for draft, _ in pairs], np.int32).reshape(len(pairs), drafted)
    target_BK = np.array([target for _, target in pairs], np.int32)
    out = jax.jit(verify_block)(jnp.asarray(draft_BJ), jnp.asarray(target_BK))
    wanted = np.array([accepted_by_loop(draft, target) for draft, target in pairs])
    assert set(wanted.tolist()) == set(range(drafted + 1))
    np.testing.assert_array_equal(out.accepted_B, wanted)
    np.testing.assert_array_equal(out.tau_B, wanted + 1)
    np.testing.assert_array_equal(out.tokens_BK, target_BK)
    np.testing.assert_allclose(out.acceptance_rate, wanted.sum() / max(draft_BJ.size, 1), rtol=1e-5)


def test_committed_tokens_are_the_drafts_and_then_the_bonus():
    out = verify_block(jnp.asarray([[5, 6, 7], [5, 9, 7]]), jnp.asarray([[5, 6, 8, 1], [5, 6, 7, 1]]))
    committed = [tokens[:tau].tolist() for tokens, tau in zip(np.asarray(out.tokens_BK), np.asarray(out.tau_B), strict=True)]
    assert committed == [[5, 6, 8], [5, 6]], "agreement after the first miss does not count"
