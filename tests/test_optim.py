"""The learning rate's shape, clipping, decay, and refused settings."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import OptimConfig
from dflash_jax.errors import ConfigError
from dflash_jax.optim import optimizer, schedule

pytestmark = pytest.mark.one_cell


def test_schedule_warms_up_and_falls_to_its_end():
    config = OptimConfig(learning_rate=1.0, final_learning_rate=0.1, warmup_ratio=0.1)
    rate = schedule(config, 100)
    rates = np.asarray([float(rate(step)) for step in range(101)])
    np.testing.assert_allclose(rates[:11], 0.1 + 0.9 * np.arange(11) / 10, rtol=1e-6)
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 90)) for step in range(10, 101)]
    np.testing.assert_allclose(rates[10:], cosine, rtol=1e-5)
    assert float(rate(1000)) == pytest.approx(0.1), "it stays there"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_a_schedule(steps):
    """The first step already learns: the rate is never 0 while there are steps left."""
    rate = schedule(OptimConfig(learning_rate=1.0), steps)
    assert all(0 < float(rate(step)) <= 1 for step in range(steps))


def updates_of(config, grads, params):
    tx = optimizer(config, 10)
    updates, _ = tx.update(grads, tx.init(params), params)
    return {name: np.asarray(update) for name, update in updates.items()}


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
def test_first_step_is_adamws():
    """With a whole first step of warm-up: rate x (sign of the gradient + decay x parameter)."""
    config = OptimConfig(learning_rate=0.5, warmup_ratio=0.1, weight_decay=0.2)
    params = {"w": jnp.asarray([1.0, -2.0, 4.0])}
    updates = updates_of(config, {"w": jnp.asarray([3.0, -1e-3, 0.0])}, params)
    np.testing.assert_allclose(updates["w"], [-0.5 * (1 + 0.2), -0.5 * (-1 - 0.4), -0.5 * 0.8], rtol=1e-3)


@pytest.mark.usefixtures("standard_promotion")
def test_gradients_are_clipped_by_their_global_norm():
    """Adam's second step shows the size of the first gradient: one of norm 50 must weigh as much as one of norm 1."""
    config = OptimConfig(learning_rate=0.1, clip_norm=1.0)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}

    def second_update(size):
        tx = optimizer(config, 10)
        _, state = tx.update({"a": jnp.asarray([3.0 * size]), "b": jnp.asarray([4.0 * size])}, tx.init(params), params)
        updates, _ = tx.update({"a": jnp.asarray([0.3]), "b": jnp.asarray([0.0])}, state, params)
        return np.concatenate([updates["a"], updates["b"]])

    np.testing.assert_allclose(second_update(10.0), second_update(0.2), rtol=1e-5)
    assert np.abs(second_update(0.2) - second_update(0.1)).max() > 1e-3, "below the limit the size counts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, r"optim\.learning_rate is 0\.0: it must be positive"),
        ({"learning_rate": float("nan")}, r"optim\.learning_rate is nan"),
        ({"warmup_ratio": 1.0}, r"optim\.warmup_ratio is 1\.0: it must lie in \[0, 1\)"),
        ({"warmup_ratio": -0.1}, r"optim\.warmup_ratio is -0\.1"),
        ({"clip_norm": 0.0}, r"optim\.clip_norm is 0\.0: it must be positive"),
        ({"beta2": 1.0}, r"optim\.beta2 is 1\.0: it must lie in \[0, 1\)"),
        ({"ema": 1.0}, r"optim\.ema is 1\.0: it must lie in \[0, 1\)"),
        ({"skip_above": -1.0}, r"optim\.skip_above is -1\.0: it must not be negative"),
        ({"skip_above": 0.5}, r"optim\.skip_above is 0\.5: give 0 \(off\) or more than 1"),
        ({"weight_decay": -1.0}, r"optim\.weight_decay is -1\.0: it must not be negative"),
        ({"final_learning_rate": -1.0}, r"optim\.final_learning_rate is -1\.0"),
    ],
)
def test_refused_settings(change, message):
    with pytest.raises(ConfigError, match=message):
        optimizer(OptimConfig(**change), 10)


@pytest.mark.usefixtures("standard_promotion")
def test_the_fusers_rows_learn_by_the_size_of_their_tap():
    """Only the fuser's projection is changed, row by row."""
    params = {"fuser": {"fc": {"kernel": jnp.ones((2, 3))}, "hidden_norm": {"scale": jnp.ones(3)}}, "norm": {"scale": jnp.ones(3)}}
    grads = jax.tree.map(lambda x: x * jnp.float32(0.1), params)

    def first(**options):
        tx = optimizer(OptimConfig(learning_rate=0.5), 10, **options)
        return tx.update(grads, tx.init(params), params)[0]

    plain, sized = first(), first(tap_sizes_M=jnp.asarray([4.0, 0.5]))
    np.testing.assert_allclose(
        sized["fuser"]["fc"]["kernel"], plain["fuser"]["fc"]["kernel"] / np.asarray([[4.0], [0.5]]), rtol=1e-6
    )
    for part in (lambda tree: tree["norm"]["scale"], lambda tree: tree["fuser"]["hidden_norm"]["scale"]):
        np.testing.assert_array_equal(part(sized), part(plain))


@pytest.mark.usefixtures("standard_promotion")
def test_muon_orthogonalises_the_matrices_of_layers_and_leaves_the_rest_to_adamw():
    """Singular values of such an update are nearly equal (Newton-Schulz stops at 0.7 to 1.2), its size is that of AdamW's."""
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.standard_normal(shape) * np.geomspace(1, 30, shape[-1]), jnp.float32)

    params = {
        "layers": [{"q_proj": {"kernel": draw(6, 10)}, "down_proj": {"kernel": draw(12, 4)}, "norm": {"scale": draw(6)}}],
        "fuser": {"fc": {"kernel": draw(8, 6)}},
        "lm_head": draw(9, 6),
    }
    grads = jax.tree.map(lambda x: x * jnp.float32(0.01), params)
    config = OptimConfig(learning_rate=0.5, weight_decay=0.0, clip_norm=1.0)

    def first(kind, decay=0.0):
        tx = optimizer(dataclasses.replace(config, optimizer=kind, weight_decay=decay), 10, tap_sizes_M=jnp.full(8, 2.0))
        return jax.jit(lambda grads: tx.update(grads, tx.init(params), params)[0])(grads)

    muon, adamw, decaying = first("muon"), first("adamw"), first("muon", decay=0.1)
    for name in ("q_proj", "down_proj"):
        ours, theirs = (np.asarray(tree["layers"][0][name]["kernel"]) for tree in (muon, adamw))
        values = np.linalg.svd(ours, compute_uv=False) / (0.5 * 0.2 * math.sqrt(max(ours.shape)))
        assert values.min() > 0.6
        assert values.max() < 1.3
        other = np.linalg.svd(theirs, compute_uv=False)
        assert other.max() > 2 * other.min()
        assert (np.sign(ours) == np.sign(theirs)).mean() > 0.6, "downhill"
        decayed = decaying["layers"][0][name]["kernel"]
        np.testing.assert_allclose(decayed, ours - 0.5 * 0.1 * params["layers"][0][name]["kernel"], rtol=1e-5, atol=1e-6)
    for part in (lambda tree: tree["layers"][0]["norm"], lambda tree: tree["fuser"], lambda tree: tree["lm_head"]):
        for ours, theirs in zip(jax.tree.leaves(part(muon)), jax.tree.leaves(part(adamw)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
