"""Where two texts part: the place, and the margin in float32 against a pass of its own."""

import dataclasses

import numpy as np
import pytest
import reference
from tiny_models import dense_target, position_weights, random_prompt, table_target

from dflash_jax.divergence import NEAR_TIE, first_divergence

pytestmark = pytest.mark.one_cell

PROMPT = random_prompt(3, 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_place_and_margin(dtype):
    """The margin is float32's also for a bfloat16 target."""
    target, text = dense_target().with_dtype(dtype), random_prompt(4, 9)
    assert first_divergence(target, PROMPT, text, text) is None
    other = [*text[:5], (text[5] + 1) % 61, *text[6:]]
    found = first_divergence(target, PROMPT, text, other)
    assert found == first_divergence(target, PROMPT, other, text)
    logits = reference.from_scratch(target.with_dtype("float32"))[2](PROMPT + text[:5])
    assert found.token == 5
    np.testing.assert_allclose(found.margin, abs(logits[text[5]] - logits[other[5]]), rtol=1e-4)
    np.testing.assert_allclose(found.bound, NEAR_TIE * (logits.max() - logits.mean()), rtol=1e-4)
    assert found.margin > 0.05
    assert found.near_tie == (found.margin <= found.bound)


def test_sampled_texts_are_compared_with_their_noise():
    target, shared = table_target(), [7, 8, 9]
    scores = np.asarray(target.logits(PROMPT + shared)) / 0.8 + reference.keyed_noise(61, 4, len(PROMPT) + 3)
    best, second = np.argsort(scores)[:-3:-1].tolist()
    found = first_divergence(target, PROMPT, [*shared, best, 1], [*shared, second, 1], 0.8, 4)
    np.testing.assert_allclose(found.margin, 0.8 * (scores[best] - scores[second]), rtol=1e-4)


def test_a_text_that_only_goes_on_is_no_near_tie():
    found = first_divergence(table_target(), PROMPT, [5, 6], [5, 6, 7])
    assert (found.token, found.margin, found.near_tie) == (2, float("inf"), False)


def test_a_near_tie_is_within_the_bound():
    """A target of any kind: two tokens whose logits differ by a little and by much."""
    target = table_target()
    logits = np.array(target.params["logits_VV"])
    state = int((np.asarray(PROMPT) * position_weights(len(PROMPT))).sum() % 61)
    logits[state, :] = -1.0
    logits[state, [10, 11, 12]] = 9.0, 9.0 - 0.1, 9.0 - 1.0
    target = dataclasses.replace(target, params=target.params | {"logits_VV": logits})
    near, far = (first_divergence(target, PROMPT, [10], [token]) for token in (11, 12))
    assert (near.near_tie, far.near_tie) == (True, False)
    np.testing.assert_allclose([near.margin, far.margin], [0.1, 1.0], rtol=1e-4)
