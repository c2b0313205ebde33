"""What a run is: every default of the project's commands, as nested frozen dataclasses (`model_config` has those of models).

`Config` is read from YAML and dotted command-line overrides. A field that nothing reads fails a test.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_jax.errors import ConfigError
from dflash_jax.model_config import Dtype


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
    """layers; more draft better and cost more a pass"""
    num_target_sampled_layers: int = 5
    """taps: how many target layers are read"""
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
    """width inside the MLP"""
    num_heads: int = 0
    """query heads"""
    num_kv_heads: int = 0
    """key and value heads"""
    head_dim: int = 0
    """width of a head"""
    own_embedding: bool = False
    """learn an embedding instead of the target's; only our own decoder loads such a drafter"""
    own_head: bool = False
    """learn a head instead of the target's; only our own decoder loads such a drafter"""
    temperature: float = 0.0
    """of the drafts; 0 drafts the likeliest tokens (rules rejection and block: as the row samples), which greedy decoding wants"""
    dropout: float = 0.0
    """while training; 0.1 helps when rows are seen several times"""
    dtype: Dtype = "float32"
    """operand dtype of the drafter's matrix products; its parameters stay float32 while training"""


@dataclass(frozen=True)
class DataConfig:
    """Training text: conversations as JSONL."""

    train: list[str] = field(default_factory=list)
    """JSONL files of {"messages": [...]}, plain, .gz or .zst, also as globs ("answers/*.jsonl.gz"); write them with
    `python -m dflash_jax regenerate`"""
    records: str = "runs/records"
    """folder that keeps the text as tokens, for the next run too; processes of one run must share it"""
    heldout: list[str] = field(default_factory=list)
    """JSONL files of prompts ({"turns": [...]} or {"messages": [...]}) that training decodes now and then to report real tau;
    [packaged] takes the packaged evaluation prompts"""
    heldout_prompts: int = 16
    """how many held-out prompts an evaluation decodes"""
    max_length: int = 512
    """tokens a row; longer conversations are cut (and counted)"""
    packing: bool = True
    """fill rows of the widest bucket with several conversations that do not see each other, so that little padding is computed;
    false: one conversation a row, as a target without `read_documents` needs"""
    buckets: list[int] = field(default_factory=lambda: [128, 256, 512])
    """padded row lengths; each costs one compilation. Packed rows have the longest"""
    batch_size: int = 8
    """rows a step, over all devices; many rows with few anchors each teach more than few rows with many"""
    num_epochs: int = 1
    """passes over the text; used when train.steps is 0"""
    seed: int = 0
    """of the order of rows"""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up, cosine decay and global-norm clipping (paper appendix: 6e-4, 4 % warm-up, clip 1)."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: the paper's. muon: orthogonalised momentum for the matrices inside the layers, scaled to AdamW's size so that the same
    learning rate does, and AdamW for the rest"""
    learning_rate: float = 6e-4
    """after warm-up"""
    final_learning_rate: float = 0.0
    """at the end of the cosine"""
    warmup_ratio: float = 0.04
    """share of the steps that warm up"""
    weight_decay: float = 0.0
    """decoupled, of all parameters"""
    clip_norm: float = 1.0
    """largest global gradient norm; larger ones are scaled down"""
    beta1: float = 0.9
    """Adam's mean; muon's momentum is 0.95"""
    beta2: float = 0.95
    """Adam's variance"""
    ema: float = 0.0
    """decay of a running mean of the parameters, which is then evaluated and exported; 0: off. 0.999 for thousands of steps"""
    skip_above: float = 0.0
    """also skip steps whose gradient norm is beyond this many times the usual; 0: only those that are not finite. Try 10"""
    accumulation: int = 1
    """micro-batches a step, for batches that do not fit the memory: the same result, but for dropout and vocab_sample"""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 takes what is left."""

    data: int = -1
    """copies of the model that share the batch"""
    fsdp: int = 1
    """devices that each hold a part of every parameter"""
    tensor: int = 1
    """devices that split heads and MLP"""
    replica: int = 1
    """copies of the whole mesh, for devices of several slices: one or more a slice, so that only gradients cross between them"""


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes that train as one, one a host. TPU pods need nothing here: the hosts find each other."""

    coordinator: str | None = None
    """host:port of process 0, which all others reach; None takes the variable JAX_COORDINATOR_ADDRESS. Not set: one process"""
    num_processes: int | None = None
    """how many there are; None takes JAX_NUM_PROCESSES"""
    process_index: int | None = None
    """which one this is, from 0; None takes JAX_PROCESS_ID"""
    detect: bool = False
    """ask the cluster instead (Slurm, Open MPI, Kubernetes), as jax.distributed.initialize does"""


FeatureDtype = Literal["bfloat16", "int8"]


@dataclass(frozen=True)
class FeaturesConfig:
    """The cache of target features that `python -m dflash_jax cache` writes and `train.features: cache` reads."""

    folder: str = "runs/features"
    """folder that keeps them; all processes must share it"""
    dtype: FeatureDtype = "bfloat16"
    """bfloat16: 2 bytes a number, what a bfloat16 drafter reads anyway. int8: half of that, each number off by a percent of
    its usual size"""


Loss = Literal["ce", "ce_argmax", "kl", "tv", "lk"]
SlotWeights = Literal["decay", "dpace"]


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
    anchors_per_document: int = 0
    """most blocks a document and step, so that a long one does not take all anchors of a packed row; 0: no limit"""
    anchor_chunk: int = 16
    """blocks a row whose attention scores exist at once; lower it to save memory"""
    logit_chunk: int = 1024
    """slots a device whose logits exist at once (at least a block of each of its rows); lower it to save memory"""
    loss: Loss = "ce"
    """what a slot learns. ce: the data's token, right for answers that the target wrote. For other text, the target's law at that
    slot given the data before it: ce_argmax, its likeliest token (for greedy decoding); kl, all of it, steady from a cold start;
    tv, the chance of acceptance itself, only for a drafter that is good already; lk, from kl to tv as it gets good (for sampling).
    Then accuracies and acceptance_length count agreement with the target's likeliest token, and logit_chunk holds both logits"""
    slot_weights: SlotWeights = "decay"
    """how a block's slots are weighed: decay, the paper's fixed fall; dpace, by how likely decoding is to get there"""
    max_skipped: int = 10
    """stop after this many steps in a row were skipped because their loss or gradient was not finite (or see optim.skip_above)"""
    vocab_sample: int = 0
    """tokens that stand for the vocabulary in each step's loss (sampled softmax); 0 takes all. Where products are slow (CPUs) a
    sixth of the vocabulary halves the step's cost; accuracy and acceptance_length are then judged among them, a little high"""
    features: Literal["online", "memory", "cache"] = "online"
    """online: each step computes the target's features of its rows. memory keeps every row's (bfloat16) after its first epoch: it
    pays for several epochs when they fit. cache reads those that `python -m dflash_jax cache` has written to features.folder: for
    many epochs or many runs over one text, where the disk is faster than the target"""
    remat: bool = True
    """recompute attention scores in the backward pass instead of keeping them"""
    remat_layers: bool = False
    """recompute whole layers of the drafter in the backward pass: a fifth of the memory, a third more of the drafter's work"""
    log_every: int = 10
    """steps between lines of metrics.jsonl"""
    save_every: int = 200
    """steps between checkpoints"""
    keep: int = 2
    """newest checkpoints kept; the one with the best acceptance length on held-out prompts is kept beside them"""
    eval_every: int = 200
    """steps between real decodes of held-out prompts; 0 never"""
    eval_max_new_tokens: int = 96
    """answer tokens of an evaluated prompt"""
    profile_steps: list[int] = field(default_factory=list)
    """[first, last]: steps to record with jax.profiler, into run_dir/profile; read it with XProf or Perfetto"""
    peak_tflops: float = 0.0
    """of one device, for the share of it that is used (mfu in metrics.jsonl); 0 takes the maker's figure where it is known"""
    resume: bool = False
    """continue from the newest checkpoint in run_dir"""
    tensorboard: bool = False
    """also write TensorBoard events (extra: tensorboard)"""
    diagnostics: bool = False
    """also log attention entropy and context feature norm; costs a little"""
    seed: int = 0
    """of first parameters, anchors and dropout"""


Rule = Literal["match", "rejection", "block"]
"""which drafts stand where a row is sampled; see `decode.verify`"""


@dataclass(frozen=True)
class DecodeConfig:
    """Decoding by serve.py, regenerate and bench."""

    max_new_tokens: int = 256
    """longest answer"""
    temperature: float = 0.0
    """0 takes the likeliest tokens, 1 samples the model as it is"""
    top_k: int = 0
    """keep only the k likeliest tokens; 0: all"""
    top_p: float = 1.0
    """keep the likeliest tokens that make up this share; 1: all"""
    min_p: float = 0.0
    """keep tokens with at least this share of the likeliest one's probability; 0: all"""
    seed: int = 0
    """of the samples; row r of a batch draws with seed + r"""
    block_size: int | None = None
    """slots a block while decoding, at most the trained size; None takes the trained size. Without a drafter: the width of every
    pass, for the very text of speculative decoding in bfloat16; None is 1, the fastest"""
    verify: Rule | None = None
    """with a temperature: match gives plain decoding's very text for a seed; rejection and block give another text of the same law
    in fewer passes. None: block, the fewest"""
    audit: bool = False
    """check while sampling that the text follows the target's law: a z statistic, beyond 4 it does not"""
    widths: str | None = None
    """JSON file of what rounds cost on this machine, measured (a minute or so) where it lacks a case: then each few rounds take the
    width up to block_size that pays for the acceptance seen, and decode plainly when none does. Use it where drafts may not pay"""


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
    """answer tokens a prompt"""
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
    distributed: DistributedConfig = DistributedConfig()
    features: FeaturesConfig = FeaturesConfig()
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = DecodeConfig()
    bench: BenchConfig = field(default_factory=BenchConfig)


def check_counts(config: Config) -> None:
    """Raises `ConfigError` for numbers of training that are too small or too large."""
    least = {
        "train.steps": 0,
        "train.anchors_per_document": 0,
        "train.eval_every": 0,
        "train.eval_max_new_tokens": 2,
        "train.vocab_sample": 0,
        "train.peak_tflops": 0,
    }
    least |= {"data.num_epochs": 1, "data.heldout_prompts": 1, "data.max_length": 2, "data.seed": 0, "train.seed": 0}
    counts = ("anchors_per_row", "anchor_chunk", "logit_chunk", "max_skipped", "log_every", "save_every", "keep")
    for name, low in (least | {f"train.{count}": 1 for count in counts}).items():
        section, field = name.split(".")
        value = getattr(getattr(config, section), field)
        if value < low:
            raise ConfigError(f"{name} is {value}: it must be at least {low}")
        if field == "seed" and value >= 2**32:
            raise ConfigError(f"{name} is {value}: it must be below 2**32")


def check_folders(config: Config) -> None:
    """Raises `ConfigError` for a folder that has no name or is none of this machine."""
    folders = {
        "train.run_dir": config.train.run_dir,
        "data.records": config.data.records,
        "features.folder": config.features.folder,
    }
    for name, path in folders.items():
        if not path.strip():
            raise ConfigError(f"{name} is empty: give a folder")
        if "://" in path:
            raise ConfigError(f"{name} is {path}: give a folder that is mounted on every host")


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
