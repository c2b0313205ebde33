"""A tiny drafter with random parameters, and the kinds of drafter that z-lab's layout can and cannot say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny_folder import HIDDEN, LAYERS, VOCAB

from dflash_jax.drafter import Drafter, abstract_drafter
from dflash_jax.model_config import DFlashConfig, RopeConfig, TargetConfig

TARGET = TargetConfig("qwen3", VOCAB, HIDDEN, LAYERS, 4, 2, 16, 48, 1e-6, 128, qk_norm=True, stop_token_ids=(2,), pad_token_id=0)
DRAFTER = DFlashConfig(
    target_hidden_dim=HIDDEN,
    draft_hidden_dim=HIDDEN,
    vocab_size=VOCAB,
    num_target_layers=LAYERS,
    loss_decay_gamma=3.5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    mlp_dim=40,
    block_size=6,
    num_draft_layers=2,
    target_layer_ids=(1, 3, 4),
    mask_token_id=60,
    rope=RopeConfig(theta=5e4),
    max_position=256,
)
# Two layers each: what the layout can say without our own fields.
SHARED = {
    "plain": {},
    "yarn": {"rope": RopeConfig(100.0, "yarn", 4.0, 64, beta_fast=24.0, attention_factor=1.1)},
    "linear": {"rope": RopeConfig(1e4, "linear", 2.0)},
    "llama3": {"rope": RopeConfig(1e4, "llama3", 8.0, 128, 1.0, 4.0)},
    "biases": {"attention_bias": True},
    "sliding, causal": {"sliding_window": (4, None), "causal": (True, False)},
    "sliding, bidirectional": {"sliding_window": (4, 4), "causal": (False, False)},
    "full, causal": {"causal": (True, True)},
}
OWN = {
    "few tokens": {"draft_token_ids": (0, 3, 7)},
    "partial rotary": {"rope": RopeConfig(1e4, partial_rotary_factor=0.25)},
    "training settings": {"dropout": 0.1, "temperature": 0.7, "loss_decay_gamma": 1.25},
    "own embedding, another width": {"draft_hidden_dim": 16, "own_embedding": True, "own_head": True},
    "own head": {"own_head": True},
    "learned mask": {"learned_mask_embedding": True, "mask_token_id": None},
}


def random_drafter(**changes):
    """Every parameter random, norms and biases too. Made with numpy: nothing to compile."""
    config = dataclasses.replace(DRAFTER, **changes)
    random = np.random.default_rng(1)

    def fill(x):
        noise = random.standard_normal(x.shape)
        return jnp.asarray(noise * x.shape[0] ** -0.5 if x.ndim == 2 else 1 + 0.1 * noise, jnp.float32)

    return Drafter(config, jax.tree.map(fill, nnx.state(abstract_drafter(config), nnx.Param)))


def equal_params(a, b):
    flat_a, flat_b = (dict(nnx.to_flat_state(d.params)) for d in (a, b))
    assert flat_a.keys() == flat_b.keys()
    for path, variable in flat_a.items():
        x, y = variable.get_value(), flat_b[path].get_value()
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))
