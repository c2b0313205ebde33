"""A drafter that starts from its target's last layers computes what they compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.targets import DenseTarget
from dflash_jax.train_step import Batch
from dflash_jax.warm_start import drafter_from_target, tap_sizes

pytestmark = pytest.mark.one_cell

TARGET = TargetConfig("qwen3", 64, 32, 4, 4, 2, 8, 48, 1e-6, 64, qk_norm=True)
DRAFTER = DFlashConfig(32, 32, 64, 4, 2.0, 4, 2, 8, 48, block_size=4, num_draft_layers=2, target_layer_ids=(1, 0), mask_token_id=3)
LENGTHS = jnp.asarray([9, 12])
TOKENS = jax.random.randint(jax.random.key(3), (2, 12), 4, 64)
SAMPLE = Batch(TOKENS, jnp.ones_like(TOKENS, bool), LENGTHS)
POSITIONS = jnp.where(jnp.arange(12)[None] < LENGTHS[:, None], jnp.arange(12)[None], -1)


def random_target(config):
    """Norm scales are random too, each layer's its own: else nothing would show where they went."""
    target = DenseTarget.random(jax.random.key(0), config)
    random = np.random.default_rng(2)

    def uneven(x):
        return x if x.ndim > 1 else jnp.asarray(random.uniform(0.3, 3.0, x.shape), jnp.float32)

    return DenseTarget(config, jax.tree.map(uneven, target.params))


def caches(target, config=DRAFTER):
    """Keys and values of every target layer, and of the drafter's context, over the same tokens."""
    drafter = drafter_from_target(jax.random.key(1), config, target, SAMPLE)
    _, taps, theirs = target.extend(target.params, TOKENS, POSITIONS, target.init_cache(2, 12), config.target_layer_ids)
    return drafter, drafter.extend_context(drafter.params, taps, POSITIONS, drafter.init_cache(2, 12)), theirs


def test_context_keys_and_values_are_the_targets():
    """The deepest tap is what enters target layer 2, so the first draft layer's context is layer 2's cache."""
    target = random_target(TARGET)
    drafter, ours, theirs = caches(target)
    np.testing.assert_allclose(ours.keys[0], theirs.keys[2], atol=2e-3)
    np.testing.assert_allclose(ours.values[0], theirs.values[2], atol=2e-3)
    assert np.abs(np.asarray(theirs.keys[2])).max() > 0.5
    # the second layer reads the same features with layer 3's projections
    for name in ("gate_proj", "up_proj", "down_proj"):
        for i in range(2):
            np.testing.assert_array_equal(
                drafter.params["layers"][i]["mlp"][name]["kernel"][...], target.params["layers"][2 + i]["mlp"][name]["kernel"][...]
            )
    np.testing.assert_array_equal(drafter.params["norm"]["scale"][...], target.params["norm"]["scale"][...])
    assert {str(x.dtype) for x in jax.tree.leaves(drafter.params)} == {"float32"}


def test_targets_without_norms_on_keys():
    """Values agree; keys point the same way and have the layer's typical size."""
    target = random_target(dataclasses.replace(TARGET, qk_norm=False))
    _, ours, theirs = caches(target)
    np.testing.assert_allclose(ours.values[0], theirs.values[2], atol=2e-3)
    real = np.asarray(POSITIONS >= 0)
    a, b = (np.moveaxis(np.asarray(cache.keys[i]), 1, 2)[real] for cache, i in ((ours, 0), (theirs, 2)))
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(cosine, 1, atol=1e-3)
    np.testing.assert_allclose(np.sqrt((a**2).mean()), np.sqrt((b**2).mean()), rtol=1e-2)


def test_the_target_is_left_alone():
    target = random_target(TARGET)
    before = jax.tree.map(np.asarray, target.params)
    drafter_from_target(jax.random.key(1), DRAFTER, target, SAMPLE)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(target.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 16}, r"train\.init target needs head_dim 8 \(the target's\) but it is 16: .* train\.init random"),
        ({"num_heads": 8}, r"needs num_heads 4"),
        ({"num_kv_heads": 4}, r"needs num_kv_heads 2"),
        ({"mlp_dim": 40}, r"needs mlp_dim 48"),
        ({"draft_hidden_dim": 16, "own_embedding": True, "own_head": True}, r"needs draft_hidden_dim 32"),
        ({"num_draft_layers": 4, "causal": (), "sliding_window": ()}, r"takes 4 layers but the target has 4: use fewer"),
    ],
)
def test_refused_shapes(changes, message):
    with pytest.raises(ConfigError, match=message):
        drafter_from_target(
            jax.random.key(1), dataclasses.replace(DRAFTER, **changes), DenseTarget.random(jax.random.key(0), TARGET), SAMPLE
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "gelu_tanh"},
        {"norm_offset": 1.0},
        {"sandwich_norms": True},
        {"attention_scale": 0.1},
        {"attention_softcap": 50.0},
        {"residual_scale": 0.22},
    ],
    ids=str,
)
def test_layers_of_another_kind_are_not_copied(changes):
    """Gemma's and Granite's layers compute what a drafter's cannot, so a copy would start it wrong."""
    target = DenseTarget(dataclasses.replace(TARGET, **changes), None)
    with pytest.raises(ConfigError, match=rf"of qwen3 have {next(iter(changes))} .*: use train\.init random"):
        drafter_from_target(jax.random.key(1), DRAFTER, target, SAMPLE)


def test_tap_sizes_are_root_mean_squares_of_real_tokens():
    """Every row's first token and the padding left out."""
    target = random_target(TARGET)
    _, taps, _ = target.extend(target.params, TOKENS, POSITIONS, target.init_cache(2, 12), (0, 2))
    rows = np.concatenate([np.asarray(taps[0, 1:9]), np.asarray(taps[1, 1:12])])
    np.testing.assert_allclose(tap_sizes(target, (0, 2), SAMPLE), np.sqrt((rows**2).mean(0)), rtol=1e-4, atol=1.1e-3)
