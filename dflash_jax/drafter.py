"""The drafter: a few layers whose keys and values also hold features read from inside the target (paper, section 3.1)."""

import itertools
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dflash_jax.attention import anchored_attention
from dflash_jax.cache import KVCache, init_cache, ring_slots, write
from dflash_jax.errors import ConfigError
from dflash_jax.layers import GatedMLP, Linear, RMSNorm, apply_rope, matmul, rope_tables
from dflash_jax.model_config import DFlashConfig, TargetConfig
from dflash_jax.sharding import Collect, shardings


class Execution(NamedTuple):
    """How a training forward pass is run; it never changes the result (but for dropout)."""

    anchor_chunk: int | None = None
    """blocks a row whose attention scores exist at once"""
    remat: bool = False
    """recompute attention scores in the backward pass"""
    dropout_key: Array | None = None
    """None: no dropout"""
    remat_layers: bool = False
    """recompute everything inside a layer in the backward pass"""
    collect: Collect | None = None
    """where parameters are in parts: brings a layer's together. Layers that differ in their parameters only are then a loop: one at
    a time is whole"""


class ContextFuser(nnx.Module):
    """Context features H = RMSNorm(W_c [tap_1; ...; tap_n]), computed once and read by every layer."""

    def __init__(self, key: Array, config: DFlashConfig) -> None:
        taps_width = config.num_target_sampled_layers * config.target_hidden_dim
        self.fc = Linear(key, (taps_width, config.draft_hidden_dim), ("taps", "embed"), bias=False, dtype=config.dtype)
        self.hidden_norm = RMSNorm(config.draft_hidden_dim, config.rms_norm_eps)

    def __call__(self, taps_BTM: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
        return self.hidden_norm(self.fc(taps_BTM))


class KVInjectionAttention(nnx.Module):
    """Queries come from the block only; keys and values are [context features ; block]."""

    def __init__(self, key: Array, config: DFlashConfig, layer: int) -> None:
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        width, dtype, bias = config.draft_hidden_dim, config.dtype, config.attention_bias
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(q_key, (width, q_width), ("embed", "heads"), bias=bias, dtype=dtype)
        self.k_proj = Linear(k_key, (width, kv_width), ("embed", "kv_heads"), bias=bias, dtype=dtype)
        self.v_proj = Linear(v_key, (width, kv_width), ("embed", "kv_heads"), bias=bias, dtype=dtype)
        self.o_proj = Linear(o_key, (q_width, width), ("heads", "embed"), bias=bias, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.head_dim, self.dtype = config.head_dim, dtype
        self.causal, self.window = config.causal[layer], config.sliding_window[layer]

    def keys_values(self, x: Float[Array, "... D"], rope: tuple[Array, Array]) -> tuple[Array, Array]:
        """Rotated keys and values, each [..., G, E], of context features or of normed block states."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return apply_rope(self.k_norm(k), rope), v

    def __call__(
        self,
        x_BAKD: Float[Array, "B A K D"],
        block_rope: tuple[Array, Array],
        context_k_BGTE: Float[Array, "B G T E"],
        context_v_BGTE: Float[Array, "B G T E"],
        anchors_BA: Int[Array, "B A"],
        execution: Execution,
        ring: bool = False,
        starts_BA: Int[Array, "B A"] | None = None,
    ) -> tuple[Float[Array, "B A K D"], Float[Array, "B A"]]:
        """Attention output and each block's mean attention entropy."""
        q_BAKHE = apply_rope(self.q_norm(self._heads(self.q_proj(x_BAKD))), block_rope)
        block_k, block_v = self.keys_values(x_BAKD, block_rope)
        out_BAKHE, entropy_BA = anchored_attention(
            q_BAKHE,
            context_k_BGTE,
            context_v_BGTE,
            block_k,
            block_v,
            anchors_BA,
            causal=self.causal,
            window=self.window,
            dtype=self.dtype,
            ring=ring,
            starts_BA=starts_BA,
            anchor_chunk=execution.anchor_chunk,
            remat=execution.remat,
        )
        return self.o_proj(out_BAKHE.reshape(*out_BAKHE.shape[:3], -1)), entropy_BA

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


class DraftLayer(nnx.Module):
    """Pre-norm KV-injection attention and MLP. The context features are not normed again here."""

    def __init__(self, key: Array, config: DFlashConfig, layer: int) -> None:
        attention_key, mlp_key = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.draft_hidden_dim, config.rms_norm_eps)
        self.self_attn = KVInjectionAttention(attention_key, config, layer)
        self.post_attention_layernorm = RMSNorm(config.draft_hidden_dim, config.rms_norm_eps)
        self.mlp = GatedMLP(mlp_key, config.draft_hidden_dim, config.mlp_dim, bias=False, dtype=config.dtype)
        self.dropout = config.dropout

    def __call__(
        self,
        index: Int[Array, ""],
        x_BAKD: Float[Array, "B A K D"],
        block_rope: tuple[Array, Array],
        context_k_BGTE: Float[Array, "B G T E"],
        context_v_BGTE: Float[Array, "B G T E"],
        anchors_BA: Int[Array, "B A"],
        execution: Execution,
        ring: bool = False,
        starts_BA: Int[Array, "B A"] | None = None,
    ) -> tuple[Float[Array, "B A K D"], Float[Array, "B A"]]:
        """`index`: which layer it is, for its dropout."""
        mixed, entropy_BA = self.self_attn(
            self.input_layernorm(x_BAKD), block_rope, context_k_BGTE, context_v_BGTE, anchors_BA, execution, ring, starts_BA
        )
        x_BAKD = x_BAKD + self._drop(mixed, execution, 2 * index)
        return x_BAKD + self._drop(self.mlp(self.post_attention_layernorm(x_BAKD)), execution, 2 * index + 1), entropy_BA

    def _drop(self, x: Array, execution: Execution, place: Array | int) -> Array:
        if self.dropout == 0 or execution.dropout_key is None:
            return x
        key = jax.random.fold_in(execution.dropout_key, place)
        return jnp.where(jax.random.bernoulli(key, 1 - self.dropout, x.shape), x / (1 - self.dropout), 0.0)


class DraftModel(nnx.Module):
    """The parameters of a drafter, named as in z-lab's checkpoints. Embedding and head exist only where the config owns them."""

    def __init__(self, key: Array, config: DFlashConfig) -> None:
        fuser_key, embed_key, head_key, mask_key, *layer_keys = jax.random.split(key, config.num_draft_layers + 4)
        self.fuser = ContextFuser(fuser_key, config)
        self.layers = nnx.List([DraftLayer(layer_key, config, i) for i, layer_key in enumerate(layer_keys)])
        self.norm = RMSNorm(config.draft_hidden_dim, config.rms_norm_eps)
        shape, axes = (config.vocab_size, config.draft_hidden_dim), ("vocab", "embed")

        def table(table_key: Array) -> nnx.Param[Array]:
            return nnx.Param(shape[1] ** -0.5 * jax.random.normal(table_key, shape, jnp.float32), logical=axes)

        self.embed_tokens = table(embed_key) if config.own_embedding else None
        self.lm_head = table(head_key) if config.own_head else None
        mask = nnx.Param(shape[1] ** -0.5 * jax.random.normal(mask_key, shape[1:], jnp.float32), logical=(None,))
        self.mask_embedding = mask if config.learned_mask_embedding else None

    def context(self, taps_BTM: Float[Array, "B T M"], rope: tuple[Array, Array]) -> list[tuple[Array, Array]]:
        """Every layer's context keys and values [B, T, G, E] from features fused once."""
        features_BTD = self.fuser(taps_BTM)
        return [layer.self_attn.keys_values(features_BTD, rope) for layer in self.layers]

    def blocks(
        self,
        x_BAKD: Float[Array, "B A K D"],
        context: list[tuple[Array, Array]],
        block_rope: tuple[Array, Array],
        anchors_BA: Int[Array, "B A"],
        execution: Execution,
        ring: bool = False,
        starts_BA: Int[Array, "B A"] | None = None,
    ) -> tuple[Float[Array, "B A K D"], list[Array]]:
        """Final hidden states of anchored blocks, and each layer's attention entropy [B, A]. Context arrays are [B, G, T, E].

        `ring`: they are caches of `Drafter.init_cache`, so that those of layers with a window are rings.
        """

        def run(part: tuple[Any, ...], x_BAKD: Array, is_ring: bool) -> tuple[Array, Array]:
            layer, index, k_BGTE, v_BGTE = part
            layer = layer if execution.collect is None else execution.collect(layer)
            return layer(index, x_BAKD, block_rope, k_BGTE, v_BGTE, anchors_BA, execution, is_ring, starts_BA)

        if execution.remat_layers:
            run = jax.checkpoint(run, static_argnums=2)
        parts = [(layer, jnp.int32(i), *context[i]) for i, layer in enumerate(self.layers)]
        entropies: list[Array] = []
        if execution.collect is None:
            for part in parts:
                x_BAKD, entropy_BA = run(part, x_BAKD, ring and part[0].self_attn.window is not None)
                entropies.append(entropy_BA)
            return self.norm(x_BAKD), entropies
        for _, same in itertools.groupby(parts, lambda part: (part[0].self_attn.causal, part[0].self_attn.window)):
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *same)
            x_BAKD, entropy_NBA = jax.lax.scan(lambda x_BAKD, part: run(part, x_BAKD, False), x_BAKD, stacked)
            entropies += list(entropy_NBA)
        return self.norm(x_BAKD), entropies


@dataclass(frozen=True, eq=False)
class Drafter:
    """A drafter: config and parameters, with pure functions of the parameters.

    As a static argument of jitted functions it stands for its config alone: new parameters do not compile again.
    """

    config: DFlashConfig
    params: Any = field(repr=False)
    graphdef: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "graphdef", nnx.split(abstract_drafter(self.config))[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Drafter) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config)

    @staticmethod
    def random(key: Array, config: DFlashConfig, mesh: Mesh | None = None) -> "Drafter":
        """Random float32 parameters. On a mesh each device makes only its part of them."""

        def build(key: Array) -> Any:
            return nnx.state(DraftModel(key, config), nnx.Param)

        if mesh is None:
            return Drafter(config, build(key))
        places = shardings(nnx.state(abstract_drafter(config), nnx.Param), mesh)
        return Drafter(config, jax.jit(build, out_shardings=places)(key))

    def model(self, params: Any) -> DraftModel:
        """The module over these parameters."""
        return nnx.merge(self.graphdef, params)

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty context cache for rows of up to `capacity` positions; a layer with a window keeps only what its blocks can see.

        Its slots are then a ring (`cache.ring_slots`), whose size does not grow with the capacity.
        """
        c = self.config
        slots = [capacity if w is None else min(capacity, ring_slots(w, c.block_size)) for w in c.sliding_window]
        return init_cache(slots, batch, c.num_kv_heads, c.head_dim, c.dtype)

    def context_reach(self) -> int | None:
        """How many positions before an anchor its block may read in rings; None: no layer has a window, so nothing is forgotten."""
        return max((window - 1 for window in self.config.sliding_window if window is not None), default=None)

    def kept_context(self, prefix: int, newest: int) -> int:
        """How many of a row's first `prefix` positions need not be written again before it goes on from there.

        `newest` is the last position ever written in that row, rejected ones included. All are kept while the rings still hold what
        the next block may read; else the last `context_reach` of them are needed again.
        """
        reach = self.context_reach()
        windows = [window for window in self.config.sliding_window if window is not None]
        if reach is None or all(newest - ring_slots(w, self.config.block_size) < max(prefix - w + 1, 0) for w in windows):
            return prefix
        return max(prefix - reach, 0)

    def extend_context(
        self, params: Any, taps_BTM: Float[Array, "B T M"], positions_BT: Int[Array, "B T"], cache: KVCache
    ) -> KVCache:
        """Append context keys and values of target positions, -1 being padding. Only those of verified tokens are seen: later ones
        are rewritten before a block can see them, or lie outside every window when they have replaced something (a ring)."""
        rope = rope_tables(self.config.rope, self.config.head_dim, positions_BT)
        context = self.model(params).context(taps_BTM, rope)
        rings = [window is not None for window in self.config.sliding_window]

        def extended(old: tuple[Array, ...], part: int) -> tuple[Array, ...]:
            return tuple(write(x, new[part], positions_BT, ring=r) for x, new, r in zip(old, context, rings, strict=True))

        return KVCache(extended(cache.keys, 0), extended(cache.values, 1))

    def propose(
        self, params: Any, block_BKD: Float[Array, "B K D"], positions_BK: Int[Array, "B K"], cache: KVCache
    ) -> Float[Array, "B K D"]:
        """Final hidden states of one block a row in one pass; positions are contiguous and start at the anchor's."""
        rope = rope_tables(self.config.rope, self.config.head_dim, positions_BK[:, None])
        context = list(zip(cache.keys, cache.values, strict=True))
        hidden, _ = self.model(params).blocks(block_BKD[:, None], context, rope, positions_BK[:, :1], Execution(), ring=True)
        return hidden[:, 0]

    def forward(
        self,
        params: Any,
        taps_BTM: Float[Array, "B T M"],
        anchors_BA: Int[Array, "B A"],
        block_BAKD: Float[Array, "B A K D"],
        execution: Execution,
        starts_BT: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B A K D"], list[Array]]:
        """The training forward: many blocks a row over one context. Hidden states, entropies [B, A].

        Without `starts_BT` a slot's position is its place in the row; with it (`document_starts`) positions count from there, and
        context before it is not seen. Each block equals what `extend_context` with its document's taps before its anchor and then
        `propose` give.
        """
        c = self.config
        positions_BT = jnp.arange(taps_BTM.shape[1], dtype=jnp.int32)[None]
        positions_BA, starts_BA = anchors_BA, None
        if starts_BT is not None:
            starts_BA = jnp.take_along_axis(starts_BT, anchors_BA, axis=1)
            positions_BT, positions_BA = positions_BT - starts_BT, anchors_BA - starts_BA
        positions_BAK = positions_BA[:, :, None] + jnp.arange(block_BAKD.shape[2], dtype=jnp.int32)[None, None]
        whole = params if execution.collect is None else execution.collect(params)
        context = self.model(whole).context(taps_BTM, rope_tables(c.rope, c.head_dim, positions_BT))
        by_head = [(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) for k, v in context]
        block_rope = rope_tables(c.rope, c.head_dim, positions_BAK)
        return self.model(params).blocks(block_BAKD, by_head, block_rope, anchors_BA, execution, starts_BA=starts_BA)

    def embed_block(
        self, params: Any, anchor_tokens: Int[Array, "*blocks"], block_size: int, embed: Any
    ) -> Float[Array, "*blocks K D"]:
        """Block inputs [anchor, mask, ..., mask]; `embed` is the target's embedding function of token ids."""
        c = self.config
        if c.own_embedding:

            def embed(tokens: Array) -> Array:
                return params["embed_tokens"][...][tokens].astype(jnp.float32)

        anchor = embed(anchor_tokens)[..., None, :]
        # One id in an array: XLA moves the row of a lone id from the device that has it, then sends it to all.
        mask_D = params["mask_embedding"][...] if c.learned_mask_embedding else embed(jnp.asarray([c.mask_token_id], jnp.int32))[0]
        masks = jnp.broadcast_to(mask_D.astype(jnp.float32), (*anchor_tokens.shape, block_size - 1, mask_D.shape[-1]))
        return jnp.concatenate([anchor, masks], axis=-2)

    def head(self, params: Any, target: Any, target_params: Any) -> Float[Array, "V D"] | None:
        """The rows of the drafter's own head or the target's that drafts are read from; None: the target only has `unembed`.

        A decode loop takes them once, before it starts: XLA copies a cut of the head in every round otherwise.
        """
        if self.config.own_head:
            return self._drafted(params["lm_head"][...], 0)
        if hasattr(target, "head_kernel"):
            return self._drafted(target.head_kernel(target_params), 0)
        return None

    def unembed(
        self, hidden: Float[Array, "*shape D"], head_VD: Float[Array, "V D"] | None, target: Any, target_params: Any
    ) -> Float[Array, "*shape V"]:
        """Logits [..., V], or of `draft_token_ids` only, through what `head` gave. `token_ids` names what was chosen among them."""
        if head_VD is None:
            return self._drafted(target.unembed(target_params, hidden), -1)
        return matmul(hidden, head_VD, self.config.dtype, transposed=True)

    def token_ids(self, chosen: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """The token ids of places in the last axis of `unembed`'s logits."""
        ids = self.config.draft_token_ids
        return jnp.asarray(ids, jnp.int32)[chosen] if ids else chosen

    def over_vocabulary(self, law_V: Float[Array, "*shape N"]) -> Float[Array, "*shape V"]:
        """A law over `unembed`'s places as one over the whole vocabulary: tokens that are never drafted have probability 0."""
        ids = self.config.draft_token_ids
        if not ids:
            return law_V
        return jnp.zeros((*law_V.shape[:-1], self.config.vocab_size), law_V.dtype).at[..., jnp.asarray(ids, jnp.int32)].set(law_V)

    def _drafted(self, x: Array, axis: int) -> Array:
        ids = self.config.draft_token_ids
        return jnp.take(x, jnp.asarray(ids, jnp.int32), axis=axis) if ids else x


def abstract_drafter(config: DFlashConfig) -> DraftModel:
    """The module with shapes in place of arrays: a new one, from what is traced once a config."""
    return nnx.merge(*_traced(config))


@lru_cache(maxsize=32)
def _traced(config: DFlashConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: DraftModel(jax.random.key(0), config)))


def check_drafter_fits(config: DFlashConfig, target: TargetConfig) -> None:
    """Refuse a drafter made for another target, or one whose mask token the target uses (stop or pad). Raises `ConfigError`."""
    for name, drafter_has, target_has in (
        ("target_hidden_dim", config.target_hidden_dim, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if drafter_has != target_has:
            raise ConfigError(
                f"the drafter's {name} is {drafter_has}, but the target has {target_has}: load the target it was trained for"
            )
    ours, theirs = config.input_embedding_scale, target.embedding_scale
    if not (config.own_embedding or math.isclose(ours, theirs, rel_tol=0.01)):  # bfloat16 may have rounded it
        raise ConfigError(
            f"the drafter multiplies embeddings by {ours} (input_embedding_scale, 1 where config.json has none), but the target by "
            f"{theirs}: add the scale it was trained with, or load the target it was trained for"
        )
    mask = config.mask_token_id
    if mask is not None and (mask in target.stop_token_ids or mask == target.pad_token_id):
        raise ConfigError(
            f"mask_token_id {mask} is a stop or pad token of the target (stop {list(target.stop_token_ids)}, "
            f"pad {target.pad_token_id}): choose an id that the target never writes"
        )
