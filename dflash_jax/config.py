"""Every default of the project, as nested frozen dataclasses.

`TargetConfig` and `DFlashConfig` describe models (they are read from and written to checkpoint folders); `Config` describes a run
(read from YAML and dotted command-line overrides). A field that nothing reads fails a test.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
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


# ---------------------------------------------------------------------------------------------------------------------
# A run


@dataclass(frozen=True)
class TargetSource:
    """Which target, and how it is computed."""

    path: str = "smollm2-135m"
    """folder, hub id, GGUF file, or smollm2-135m (the embedded model)"""
    dtype: Dtype = "bfloat16"
    """operand dtype of matrix products: bfloat16 on accelerators and recent CPUs, float32 for exact checks"""


@dataclass(frozen=True)
class DrafterSource:
    """The drafter to train or use: using one takes all but `path` from its folder. Sizes left at 0 follow the target."""

    path: str | None = None
    """folder or hub id of a drafter: what decoding loads and --train.init loaded starts from"""
    block_size: int = 8
    """slots a block; larger pays where a wide pass is cheap (accelerators: 16)"""
    num_draft_layers: int = 3
    num_target_sampled_layers: int = 5
    target_layer_ids: list[int] = field(default_factory=list)
    """0-based target layers to read; empty spreads them evenly"""
    mask_token_id: int | None = None
    """an unused token id of the target; required unless learned_mask_embedding"""
    learned_mask_embedding: bool = False
    """learn the mask slots' embedding; only our own decoder loads such a drafter"""
    loss_decay_gamma: float | None = None
    """slot weight decay; None takes the paper's for the block size (7, 5, 4 for 16, 10, 8)"""
    draft_vocab_size: int = 0
    """learn and draft only this many tokens, the most frequent of the training text; 0: all. 4096 pay on CPUs (1 % less tau)"""
    draft_hidden_dim: int = 0
    """another width than the target's needs own_embedding and own_head"""
    mlp_dim: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    own_embedding: bool = False
    own_head: bool = False
    temperature: float = 0.0
    """of the drafts; 0 drafts the likeliest tokens, which is what greedy decoding wants"""
    dropout: float = 0.0
    dtype: Dtype = "float32"
    """operand dtype of the drafter's matrix products; its parameters stay float32 while training"""


@dataclass(frozen=True)
class DataConfig:
    """Training text: conversations as JSONL."""

    train: list[str] = field(default_factory=list)
    """JSONL files of {"messages": [...]}; write them with `python -m dflash_jax regenerate`"""
    heldout: list[str] = field(default_factory=list)
    """JSONL files of prompts ({"turns": [...]} or {"messages": [...]}) that training decodes now and then to report real tau;
    [packaged] takes the packaged evaluation prompts"""
    heldout_prompts: int = 16
    """how many held-out prompts an evaluation decodes"""
    max_length: int = 512
    """tokens a row; longer conversations are cut (and counted)"""
    buckets: list[int] = field(default_factory=lambda: [128, 256, 512])
    """padded row lengths; each costs one compilation"""
    batch_size: int = 8
    """rows a step, over all devices; many rows with few anchors each teach more than few rows with many"""
    num_epochs: int = 1
    seed: int = 0


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up, cosine decay and global-norm clipping (paper appendix: 6e-4, 4 % warm-up, clip 1)."""

    learning_rate: float = 6e-4
    final_learning_rate: float = 0.0
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    accumulation: int = 1
    """micro-batches a step, for batches that do not fit the memory: the same result, but for dropout and vocab_sample"""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    run_dir: str = "runs/drafter"
    """checkpoints, metrics.jsonl, the merged config and the exported drafter go here"""
    init: Literal["target", "random", "loaded"] = "target"
    """start from the target's last layers (fast on little data), at random, or from drafter.path"""
    steps: int = 0
    """optimizer steps; 0 runs data.num_epochs"""
    anchors_per_row: int = 32
    """blocks a row and step; anchors of one row share their labels, so raise data.batch_size first"""
    anchor_chunk: int = 16
    """blocks a row whose attention scores exist at once; lower it to save memory"""
    logit_chunk: int = 1024
    """slots whose logits exist at once; lower it to save memory"""
    objective: Literal["decay", "dpace"] = "decay"
    """how a block's slots are weighed: decay, the paper's fixed fall; dpace, by how likely decoding is to get there"""
    vocab_sample: int = 0
    """tokens that stand for the vocabulary in each step's loss (sampled softmax); 0 takes all. Where products are slow (CPUs) a
    sixth of the vocabulary halves the step's cost; accuracy and acceptance_length are then judged among them, a little high"""
    features: Literal["online", "memory"] = "online"
    """memory keeps every row's target features (bfloat16) after its first epoch: worth it for several epochs when they fit"""
    remat: bool = True
    """recompute attention scores in the backward pass instead of keeping them"""
    log_every: int = 10
    save_every: int = 200
    keep: int = 2
    """checkpoints kept"""
    eval_every: int = 200
    """steps between real decodes of held-out prompts; 0 never"""
    eval_max_new_tokens: int = 96
    resume: bool = False
    """continue from the newest checkpoint in run_dir"""
    tensorboard: bool = False
    """also write TensorBoard events (extra: tensorboard)"""
    diagnostics: bool = False
    """also log attention entropy and context feature norm; costs a little"""
    seed: int = 0


@dataclass(frozen=True)
class DecodeConfig:
    """Decoding by serve.py and regenerate; bench takes block_size from here and decodes greedily."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    block_size: int | None = None
    """slots a block while decoding, at most the trained size; None takes the trained size"""


@dataclass(frozen=True)
class BenchConfig:
    """What `python -m dflash_jax bench` measures."""

    prompts: list[str] = field(default_factory=list)
    """JSONL prompt files; empty takes the packaged evaluation prompts (HumanEval and held-out chat)"""
    limit: int = 0
    """at most this many prompts of each set; 0 takes all"""
    timed_prompts: int = 40
    """prompts decoded for the timing, spread over the sets"""
    max_new_tokens: int = 128
    batch_size: int = 8
    """rows a batch of the exactness pass (timing is one row at a time)"""


@dataclass(frozen=True)
class Config:
    """A run: read from YAML (`--config FILE`) and dotted overrides (`--optim.learning_rate 1e-3`)."""

    target: TargetSource = TargetSource()
    drafter: DrafterSource = DrafterSource()
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    bench: BenchConfig = field(default_factory=BenchConfig)


def to_json(config: Any) -> str:
    """A config dataclass as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=False) + "\n"


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ConfigError` with the path and the place when it is missing or broken."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: give a folder that holds it") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): fetch the file again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not a JSON object: fetch the file again")
    return value
