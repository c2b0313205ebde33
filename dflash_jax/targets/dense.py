"""Dense decoder-only targets (`hf_config.FAMILIES`). Module and parameter names follow Hugging Face checkpoints."""

import dataclasses
import itertools
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.attention import cached_attention
from dflash_jax.cache import KVCache, init_cache, write
from dflash_jax.errors import ConfigError
from dflash_jax.layers import GatedMLP, Linear, RMSNorm, apply_rope, matmul, rope_tables, softcap
from dflash_jax.model_config import TargetConfig
from dflash_jax.sharding import Collect

Rope = tuple[Array, Array] | None
"""cos and sin of a layer, or None for a layer without rotary positions"""
KeysValues = tuple[Array, ...] | None
"""a layer's cached keys and values [B, G, C, E]; None: no cache, the tokens are whole rows and see each other only"""


class Attention(nnx.Module):
    """Grouped-query self-attention over a cache."""

    def __init__(self, key: Array, config: TargetConfig, layer: int) -> None:
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        width, dtype = config.hidden_size, config.dtype
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(q_key, (width, q_width), ("embed", "heads"), bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(k_key, (width, kv_width), ("embed", "kv_heads"), bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Linear(v_key, (width, kv_width), ("embed", "kv_heads"), bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(o_key, (q_width, width), ("heads", "embed"), bias=config.o_bias, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset) if config.qk_norm else None
        self.head_dim, self.dtype = config.head_dim, dtype
        self.window = config.sliding_window[layer] if config.sliding_window else None
        self.scale, self.cap = config.attention_scale, config.attention_softcap

    def __call__(
        self, x_BTD: Array, rope: Rope, slots_BT: Array, starts_BT: Array | None, kv: KeysValues
    ) -> tuple[Array, KeysValues]:
        """`slots_BT`: where in the cache each token belongs. It sees the slots from its start (None: 0) to its own."""

        def heads(x: Array) -> Array:
            return x.reshape(*x.shape[:-1], -1, self.head_dim)

        q_BTHE, k_BTGE, v_BTGE = heads(self.q_proj(x_BTD)), heads(self.k_proj(x_BTD)), heads(self.v_proj(x_BTD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTGE = self.q_norm(q_BTHE), self.k_norm(k_BTGE)
        if rope is not None:
            q_BTHE, k_BTGE = apply_rope(q_BTHE, rope), apply_rope(k_BTGE, rope)
        if kv is None:
            k_BGCE, v_BGCE = (jnp.swapaxes(x, 1, 2).astype(self.dtype) for x in (k_BTGE, v_BTGE))
        else:
            k_BGCE, v_BGCE = kv = tuple(write(old, new, slots_BT) for old, new in zip(kv, (k_BTGE, v_BTGE), strict=True))
        out_BTHE = cached_attention(
            q_BTHE,
            k_BGCE,
            v_BGCE,
            slots_BT,
            self.dtype,
            window=self.window,
            scale=self.scale,
            cap=self.cap,
            starts_BT=starts_BT,
        )
        return self.o_proj(out_BTHE.reshape(*out_BTHE.shape[:2], -1)), kv


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals; sandwich norms also norm what the two give.

    Checkpoints call the MLP's own norm post_attention_layernorm; only with sandwich norms does that name mean what it says.
    """

    def __init__(self, key: Array, config: TargetConfig, layer: int) -> None:
        attention_key, mlp_key = jax.random.split(key)

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)

        self.input_layernorm = norm()
        self.self_attn = Attention(attention_key, config, layer)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if config.sandwich_norms else None
        self.post_feedforward_layernorm = norm() if config.sandwich_norms else None
        self.mlp = GatedMLP(
            mlp_key,
            config.hidden_size,
            config.mlp_dim,
            bias=config.mlp_bias,
            dtype=config.dtype,
            activation=config.activation,
        )
        self.residual_scale = config.residual_scale

    def __call__(
        self, x_BTD: Array, rope: Rope, slots_BT: Array, starts_BT: Array | None, kv: KeysValues
    ) -> tuple[Array, KeysValues]:
        scale = jnp.float32(self.residual_scale)
        mixed_BTD, kv = self.self_attn(self.input_layernorm(x_BTD), rope, slots_BT, starts_BT, kv)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x_BTD = x_BTD + scale * mixed_BTD
            return x_BTD + scale * self.mlp(self.post_attention_layernorm(x_BTD)), kv
        x_BTD = x_BTD + scale * self.post_attention_layernorm(mixed_BTD)
        out_BTD = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_BTD)))
        return x_BTD + scale * out_BTD, kv


class DenseDecoder(nnx.Module):
    """The parameters of a dense target."""

    def __init__(self, key: Array, config: TargetConfig) -> None:
        embed_key, head_key, *layer_keys = jax.random.split(key, config.num_layers + 2)
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")
        scale = config.hidden_size**-0.5
        self.embed_tokens = nnx.Param(scale * jax.random.normal(embed_key, shape, jnp.float32), logical=axes)
        self.layers = nnx.List([DecoderLayer(layer_key, config, i) for i, layer_key in enumerate(layer_keys)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        head = None if config.tie_embeddings else nnx.Param(scale * jax.random.normal(head_key, shape, jnp.float32), logical=axes)
        self.lm_head = head


@dataclass(frozen=True, eq=False)
class DenseTarget:
    """A dense decoder as a `Target`. As a static argument of jitted functions it stands for its config alone."""

    config: TargetConfig
    params: Any = field(repr=False)
    tokenizer: Any = None
    graphdef: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "graphdef", nnx.split(abstract_decoder(self.config))[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DenseTarget) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    @staticmethod
    def random(key: Array, config: TargetConfig, tokenizer: Any = None) -> "DenseTarget":
        """Random parameters: for tests and shape studies."""
        params = nnx.state(DenseDecoder(key, config), nnx.Param)
        return DenseTarget(config, jax.tree.map(lambda x: x.astype(jnp.dtype(config.dtype)), params), tokenizer)

    def with_dtype(self, dtype: Any) -> "DenseTarget":
        """The same parameters, computed with another operand dtype (parameters are cast to it)."""
        params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), self.params)
        return DenseTarget(dataclasses.replace(self.config, dtype=dtype), params, self.tokenizer)

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        return init_cache((capacity,) * c.num_layers, batch, c.num_kv_heads, c.head_dim, c.dtype)

    def extend(
        self, params: Any, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], cache: KVCache, taps: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T M"], KVCache]:
        """See `Target.extend`. Tap i is the output of layer i before any final norm (Hugging Face `hidden_states[i + 1]`)."""
        caches: list[KeysValues] = list(zip(cache.keys, cache.values, strict=True))
        hidden_BTD, taps_BTM, caches = self._forward(params, tokens_BT, positions_BT, positions_BT, None, caches, taps)
        keys, values = zip(*(kv for kv in caches if kv is not None), strict=True)
        return hidden_BTD, taps_BTM, KVCache(keys, values)

    def read_documents(
        self,
        params: Any,
        tokens_BT: Int[Array, "B T"],
        starts_BT: Int[Array, "B T"],
        taps: tuple[int, ...],
        collect: Collect | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T M"]]:
        """See `PackableTarget.read_documents`."""
        slots_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
        if collect is not None:
            return self._looped(params, tokens_BT, slots_BT, starts_BT, taps, collect)
        no_caches: list[KeysValues] = [None] * self.config.num_layers
        return self._forward(params, tokens_BT, slots_BT - starts_BT, slots_BT, starts_BT, no_caches, taps)[:2]

    def _looped(
        self, params: Any, tokens_BT: Array, slots_BT: Array, starts_BT: Array, taps: tuple[int, ...], collect: Collect
    ) -> tuple[Array, Array]:
        """What `_forward` gives, by a loop over each run of layers that differ in their parameters only.

        XLA brings the parameters of all layers together at once when nothing orders them; a loop does so for one layer at a time,
        and compiles one. It costs a copy of a device's part of the layers, side by side, while the target runs.
        """
        c, model, ropes = self.config, nnx.merge(self.graphdef, params), self._ropes(slots_BT - starts_BT)
        self._check_taps(taps)
        windows, last = c.sliding_window or (None,) * c.num_layers, max(taps, default=-1)

        def kind(i: int) -> tuple[int | None, bool, bool]:
            return windows[i], i in c.layers_without_rope, i <= last

        x_BTD = self.embed(collect(params), tokens_BT)
        taps_BTM = jnp.zeros((*tokens_BT.shape, len(taps) * c.hidden_size), jnp.float32)
        for (_, _, tapped), run in itertools.groupby(range(c.num_layers), kind):
            ids = list(run)
            layers = jax.tree.map(lambda *x: jnp.stack(x), *(model.layers[i] for i in ids))
            # A layer writes where the next tap belongs, so that the tap's own layer is the last to write there.
            places = [min((tap, n) for n, tap in enumerate(taps) if tap >= i)[1] * c.hidden_size for i in ids] if tapped else None

            def read(carry: tuple[Array, Array], part: tuple[DecoderLayer, Any], rope: Rope = ropes[ids[0]]) -> tuple[Any, None]:
                (x_BTD, taps_BTM), (layer, place) = carry, part
                x_BTD, _ = collect(layer)(x_BTD, rope, slots_BT, starts_BT, None)
                if place is not None:
                    taps_BTM = jax.lax.dynamic_update_slice_in_dim(taps_BTM, x_BTD, place, axis=2)
                return (x_BTD, taps_BTM), None

            parts = (layers, None if places is None else jnp.asarray(places, jnp.int32))
            (x_BTD, taps_BTM), _ = jax.lax.scan(read, (x_BTD, taps_BTM), parts)
        return model.norm(x_BTD), taps_BTM

    def _check_taps(self, taps: tuple[int, ...]) -> None:
        if taps and not 0 <= min(taps) <= max(taps) < self.config.num_layers:
            raise ConfigError(f"taps {list(taps)} must lie in 0..{self.config.num_layers - 1}, the target's layers")

    def _forward(
        self,
        params: Any,
        tokens_BT: Array,
        positions_BT: Array,
        slots_BT: Array,
        starts_BT: Array | None,
        caches: list[KeysValues],
        taps: tuple[int, ...],
    ) -> tuple[Array, Array, list[KeysValues]]:
        """Hidden states, taps and grown caches of tokens at positions (for rotary tables) that lie in cache slots."""
        self._check_taps(taps)
        x_BTD = self.embed(params, tokens_BT)
        model = nnx.merge(self.graphdef, params)
        grown, outputs = [], []
        for layer, rope, kv in zip(model.layers, self._ropes(positions_BT), caches, strict=True):
            x_BTD, kv = _one_layer(layer, x_BTD, rope, slots_BT, starts_BT, kv)
            grown.append(kv)
            outputs.append(x_BTD)
        taps_BTM = jnp.concatenate([outputs[i] for i in taps], axis=-1) if taps else jnp.zeros((*tokens_BT.shape, 0), jnp.float32)
        return model.norm(x_BTD), taps_BTM, grown

    def embed(self, params: Any, tokens: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
        rows = params["embed_tokens"][...][tokens].astype(jnp.float32)
        return rows * jnp.float32(self.config.embedding_scale)

    def unembed(self, params: Any, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        logits = matmul(hidden, self.head_kernel(params), self.config.dtype, transposed=True)
        return softcap(logits * jnp.float32(self.config.logit_scale), self.config.logit_softcap)

    def head_kernel(self, params: Any) -> Float[Array, "V D"]:
        return params["embed_tokens" if self.config.tie_embeddings else "lm_head"][...]

    def _ropes(self, positions_BT: Array) -> list[Rope]:
        """Every layer's rotary tables: layers with a window may have their own, some layers have none."""
        c = self.config
        windows = c.sliding_window or (None,) * c.num_layers
        full = rope_tables(c.rope, c.head_dim, positions_BT)
        local = full if c.local_rope is None else rope_tables(c.local_rope, c.head_dim, positions_BT)
        return [None if i in c.layers_without_rope else full if window is None else local for i, window in enumerate(windows)]


@jax.jit
def _one_layer(
    layer: DecoderLayer, x_BTD: Array, rope: Rope, slots_BT: Array, starts_BT: Array | None, kv: KeysValues
) -> tuple[Array, KeysValues]:
    """Layers that differ in their parameters only are traced once, whatever their number; XLA puts them in line again."""
    return layer(x_BTD, rope, slots_BT, starts_BT, kv)


def abstract_decoder(config: TargetConfig) -> DenseDecoder:
    """The module with shapes in place of arrays: a new one, from what is traced once a config."""
    return nnx.merge(*_traced(config))


@lru_cache(maxsize=32)
def _traced(config: TargetConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: DenseDecoder(jax.random.key(0), config)))
