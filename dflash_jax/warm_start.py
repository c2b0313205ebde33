"""Starting a drafter from its target's last layers: with little data it learns much faster than from random numbers."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from dflash_jax.distributed import on_host
from dflash_jax.drafter import Drafter, abstract_drafter
from dflash_jax.errors import ConfigError
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.sharding import mesh_of, shardings
from dflash_jax.targets import DenseTarget, Target
from dflash_jax.train_step import Batch, target_features

FUSER_PASS = 0.1
"""weight with which the fuser passes the deepest tap: features are normed after it, so it says how fast other taps gain on it"""


def tap_sizes(target: Target, taps: tuple[int, ...], sample: Batch, last: bool = False) -> Float[Array, " M"]:
    """Root-mean-square of every tap dimension over the real tokens of sample rows but their first ones (attention sinks), and
    with `last` those of the final hidden states after them."""
    # over the host: the train step holds it as a constant, which an array of several processes cannot be
    return jnp.asarray(on_host(_tap_sizes(target.params, sample, target=target, taps=taps, last=last)))


@partial(jax.jit, static_argnames=("target", "taps", "last"))
def _tap_sizes(params: Any, sample: Batch, *, target: Target, taps: tuple[int, ...], last: bool) -> Float[Array, " M"]:
    taps_BTM = target_features(target, params, sample, taps, last)
    real_BT = _real(sample) & (jnp.arange(taps_BTM.shape[1], dtype=jnp.int32) > 0)[None]
    return jnp.sqrt(_mean(jnp.square(taps_BTM), real_BT)) + 1e-3


def drafter_from_target(key: Array, config: DFlashConfig, target: DenseTarget, sample: Batch) -> Drafter:
    """A drafter whose layers are the target's last ones, whose fuser passes the deepest tap, and whose final norm is the target's.

    In the target each layer norms its input by a scale of its own, which holds down the few dimensions that are hundreds of times
    larger than the rest. The drafter norms its context features once for all layers, so that norm and all input norms get the
    layers' mean scale, and q, k and v the rest of their own. The target's queries and keys may have no norms: the drafter's then
    get the typical size of the layer's, measured on sample rows. Raises `ConfigError` when the
    shapes of the two differ.
    """
    check_warm_start(config, target.config)
    mesh = mesh_of(target.params)
    places = None if mesh is None else shardings(nnx.state(abstract_drafter(config), nnx.Param), mesh)
    # one program, so that each device only makes its part of every parameter
    build = jax.jit(partial(_first_params, config, target), out_shardings=places)
    return Drafter(config, build(key, target.params, sample))


def _first_params(config: DFlashConfig, target: DenseTarget, key: Array, target_params: Any, sample: Batch) -> Any:
    params = Drafter.random(key, config).params
    first = target.config.num_layers - config.num_draft_layers
    real_BT, inputs = _real(sample), _layer_inputs(target, target_params, first, sample)
    scales = [_f32(layer["input_layernorm"]["scale"]) for layer in (target_params["layers"][first + i] for i in range(len(inputs)))]
    shared_D = jnp.exp(sum(jnp.log(jnp.abs(scale_D) + 1e-6) for scale_D in scales) / len(scales))
    params["fuser"]["hidden_norm"]["scale"].set_value(shared_D)
    for i in range(config.num_draft_layers):
        theirs, ours = target_params["layers"][first + i], params["layers"][i]
        ours["input_layernorm"]["scale"].set_value(shared_D)
        for name in ("q_proj", "k_proj", "v_proj"):
            kernel = (scales[i] / shared_D)[:, None] * _f32(theirs["self_attn"][name]["kernel"])
            ours["self_attn"][name]["kernel"].set_value(kernel)
        ours["self_attn"]["o_proj"]["kernel"].set_value(_f32(theirs["self_attn"]["o_proj"]["kernel"]))
        for name in ("gate_proj", "up_proj", "down_proj"):
            ours["mlp"][name]["kernel"].set_value(_f32(theirs["mlp"][name]["kernel"]))
        ours["post_attention_layernorm"]["scale"].set_value(_f32(theirs["post_attention_layernorm"]["scale"]))
        for name, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
            if target.config.qk_norm:
                ours["self_attn"][norm]["scale"].set_value(_f32(theirs["self_attn"][norm]["scale"]))
            else:
                heads_BTX = (inputs[i] * shared_D[None, None]) @ ours["self_attn"][name]["kernel"][...]
                size = jnp.sqrt(_mean(jnp.square(heads_BTX), real_BT).mean())
                ours["self_attn"][norm]["scale"].set_value(jnp.full((config.head_dim,), size))
    width = config.target_hidden_dim
    fc_MD = jnp.zeros_like(params["fuser"]["fc"]["kernel"][...])
    deepest = config.target_layer_ids.index(max(config.target_layer_ids))
    params["fuser"]["fc"]["kernel"].set_value(fc_MD.at[deepest * width : (deepest + 1) * width].set(FUSER_PASS * jnp.eye(width)))
    params["norm"]["scale"].set_value(_f32(target_params["norm"]["scale"]))
    return params


def _layer_inputs(target: DenseTarget, params: Any, first: int, sample: Batch) -> list[Float[Array, "B T D"]]:
    """What enters layers first.. of the target, root-mean-square normed."""
    taps = tuple(range(first - 1, target.config.num_layers - 1))
    split = jnp.split(target_features(target, params, sample, taps), len(taps), axis=-1)
    return [x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + target.config.rms_norm_eps) for x in split]


def _real(sample: Batch) -> Bool[Array, "B T"]:
    """Which positions hold tokens."""
    return jnp.arange(sample.tokens_BT.shape[1], dtype=jnp.int32)[None] < sample.length_B[:, None]


def _mean(x_BTX: Float[Array, "B T X"], of_BT: Bool[Array, "B T"]) -> Float[Array, " X"]:
    """The mean over some positions."""
    return jnp.where(of_BT[..., None], x_BTX, 0.0).sum((0, 1)) / of_BT.sum().astype(jnp.float32)


def check_warm_start(config: DFlashConfig, target: TargetConfig) -> None:
    """Raises `ConfigError` for a drafter whose layers cannot be copies of the target's."""
    pairs: dict[str, tuple[Any, Any]] = {
        "draft_hidden_dim": (config.draft_hidden_dim, target.hidden_size),
        "num_heads": (config.num_heads, target.num_heads),
        "num_kv_heads": (config.num_kv_heads, target.num_kv_heads),
        "head_dim": (config.head_dim, target.head_dim),
        "mlp_dim": (config.mlp_dim, target.mlp_dim),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ConfigError(
                f"train.init target needs {name} {theirs} (the target's) but it is {ours}: change it, or use train.init random"
            )
    plain = {field.name: field.default for field in dataclasses.fields(TargetConfig)}
    for name in ("activation", "norm_offset", "sandwich_norms", "attention_scale", "attention_softcap", "residual_scale"):
        if getattr(target, name) != plain[name]:
            raise ConfigError(
                f"train.init target copies layers of the Llama kind, but those of {target.model_type} have {name} "
                f"{getattr(target, name)}: use train.init random"
            )
    if config.num_draft_layers >= target.num_layers:
        raise ConfigError(
            f"train.init target takes {config.num_draft_layers} layers but the target has {target.num_layers}: use fewer"
        )


def _f32(variable: Any) -> Array:
    return variable[...].astype(jnp.float32)
