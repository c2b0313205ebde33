"""What a model is: a target's and a drafter's sizes and settings, as they stand in checkpoint folders."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from dflash_jax.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions (half-split layout). Fields follow `rope_parameters` of Hugging Face configs."""

    theta: float = 10000.0
    type: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    """context extension factor of the linear, llama3 and yarn scalings"""
    original_max_position: int = 8192
    """context length before the extension (llama3, yarn)"""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_max_position / low_freq_factor are divided by factor"""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_max_position / high_freq_factor stay as they are"""
    beta_fast: float = 32.0
    """yarn: dimensions that rotate more often than this in the original context are kept"""
    beta_slow: float = 1.0
    """yarn: dimensions that rotate less often than this are interpolated"""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None computes it from factor"""
    partial_rotary_factor: float = 1.0
    """leading share of each head's dimensions that is rotated"""


@dataclass(frozen=True)
class TargetConfig:
    """A dense decoder-only target. Defaults are the plain Llama layer; `hf_config.FAMILIES` says which model has what."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: Dtype = "float32"
    """operand dtype of matrix products; they accumulate to float32 whatever it is"""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sliding_window: tuple[int | None, ...] = ()
    """per layer: the query at position p sees keys at positions > p - window; None sees all, and so does every layer when empty"""
    local_rope: RopeConfig | None = None
    """rotary positions of layers with a window; None takes `rope`"""
    layers_without_rope: tuple[int, ...] = ()
    norm_offset: float = 0.0
    """added to every norm's scale: Gemma stores scale - 1"""
    sandwich_norms: bool = False
    """norm what attention and MLP give too, before it joins the residual"""
    attention_scale: float | None = None
    """multiplies queries; None is head_dim ** -0.5"""
    attention_softcap: float | None = None
    """c bounds attention scores: c tanh(score / c)"""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """multiplies what attention and MLP add to the residual"""
    logit_scale: float = 1.0
    logit_softcap: float | None = None


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Tap ids spread from the second to the third-to-last target layer (z-lab dflash 0.1.0, `build_target_layer_ids`).

    One tap is the middle layer. Raises `ConfigError` when the target is too shallow for that many distinct taps.
    """
    if num_taps < 1:
        raise ConfigError(f"num_target_sampled_layers is {num_taps}: a drafter needs at least one tap")
    if num_taps == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if len(set(ids)) < num_taps or max(ids) >= num_target_layers:
        raise ConfigError(
            f"{num_taps} taps do not fit a target of {num_target_layers} layers (they would be {list(ids)}): "
            "lower num_target_sampled_layers or give target_layer_ids"
        )
    return ids


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter. Defaults are the published architecture (arXiv 2602.06036, section 3; z-lab's Qwen3-style layers).

    `target_layer_ids` empty means the default spread over `num_target_layers`; `sliding_window` and `causal` empty mean full
    bidirectional blocks in every layer. A drafter with its own embedding and head may have another width than the target.
    """

    target_hidden_dim: int
    draft_hidden_dim: int
    vocab_size: int
    num_target_layers: int
    loss_decay_gamma: float
    """gamma of the slot weights exp(-(k-1)/gamma), paper Eq. 4: 7, 5, 4 for blocks of 16, 10, 8"""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    block_size: int = 16
    num_target_sampled_layers: int = 5
    num_draft_layers: int = 5
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    """token id at the drafted slots; None only with learned_mask_embedding"""
    learned_mask_embedding: bool = False
    own_embedding: bool = False
    own_head: bool = False
    input_embedding_scale: float = 1.0
    """what multiplies the target's embedding rows at the drafter's input: the target's own embedding_scale"""
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position: int = 40960
    attention_bias: bool = False
    sliding_window: tuple[int | None, ...] = ()
    """per layer: a query at position p sees keys at positions > p - window (and < p + window when not causal); None sees all"""
    causal: tuple[bool, ...] = ()
    """per layer: whether a slot sees only itself and earlier slots of its block"""
    temperature: float = 0.0
    """draft temperature; 0 drafts the argmax"""
    draft_token_ids: tuple[int, ...] = ()
    """draft only these tokens, ascending; empty drafts all. The text stays the target's own whatever is drafted"""
    dropout: float = 0.0
    """dropout on attention output and MLP output while training"""
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("target_layer_ids", tuple(self.target_layer_ids))
        if not self.target_layer_ids:
            put("target_layer_ids", default_target_layer_ids(self.num_target_layers, self.num_target_sampled_layers))
        put("num_target_sampled_layers", len(self.target_layer_ids))
        put("sliding_window", tuple(self.sliding_window) or (None,) * self.num_draft_layers)
        put("causal", tuple(self.causal) or (False,) * self.num_draft_layers)
        put("draft_token_ids", tuple(self.draft_token_ids))
        self._check()

    def _check(self) -> None:
        ids, n = self.target_layer_ids, self.num_draft_layers
        for name in ("target_hidden_dim", "draft_hidden_dim", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if int(self.head_dim * self.rope.partial_rotary_factor) % 2:
            raise ConfigError(f"head_dim is {self.head_dim}: positions rotate pairs of dimensions, so give an even number")
        if n < 1:
            raise ConfigError(f"num_draft_layers is {n}: a drafter needs at least one layer")
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}: a block holds its anchor and at least one drafted slot")
        if self.block_size > self.max_position:
            raise ConfigError(f"block_size is {self.block_size}: it must not exceed max_position_embeddings, {self.max_position}")
        if len(set(ids)) != len(ids):
            raise ConfigError(f"target_layer_ids {list(ids)} name a layer twice: give distinct ids")
        if min(ids) < 0 or max(ids) >= self.num_target_layers:
            raise ConfigError(f"target_layer_ids {list(ids)} must lie in 0..{self.num_target_layers - 1} (num_target_layers)")
        if len(self.sliding_window) != n or len(self.causal) != n:
            raise ConfigError(f"sliding_window and causal need one entry for each of the {n} draft layers")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if not self.loss_decay_gamma > 0:
            raise ConfigError(f"loss_decay_gamma is {self.loss_decay_gamma}: it must be positive (7, 5, 4 for blocks 16, 10, 8)")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}: it must lie in [0, 1)")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature is {self.temperature}: it must not be negative")
        if any(low >= high for low, high in pairwise((-1, *self.draft_token_ids, self.vocab_size))):
            raise ConfigError(f"draft_token_ids must be different ids in 0..{self.vocab_size - 1}, ascending")
        if self.mask_token_id is None and not self.learned_mask_embedding:
            raise ConfigError("mask_token_id is missing: name an unused token id, or set learned_mask_embedding")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id {self.mask_token_id} is outside the {self.vocab_size} embedding rows")
        if self.draft_hidden_dim != self.target_hidden_dim and not (self.own_embedding and self.own_head):
            raise ConfigError(
                f"draft_hidden_dim {self.draft_hidden_dim} differs from target_hidden_dim {self.target_hidden_dim}, so the "
                "target's embedding and head do not fit: set own_embedding and own_head, or make the widths equal"
            )


def loss_decay_gamma(block_size: int) -> float:
    """The paper's gamma for a block size (appendix: 4, 5, 7 for blocks of 8, 10, 16), on lines through these."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3
