"""Weights between safetensors or GGUF files and our parameter trees.

Our parameter names follow Hugging Face checkpoints, so one rule maps them: the path layers.3.self_attn.q_proj.kernel is the tensor
layers.3.self_attn.q_proj.weight. Linear kernels are [in, out] here and [out, in] in the files.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from dflash_jax.config import read_json
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.model_config import Dtype

# Last part of our parameter path -> (suffix of the tensor's name, whether the file holds it transposed). Embeddings and heads are
# plain attributes: their tensor is NAME.weight, not transposed.
LEAF_RULES = {"kernel": (".weight", True), "scale": (".weight", False), "bias": (".bias", False)}

# Tables of a reduced draft vocabulary, which hold no parameters: place -> token id - place, and whether a token is drafted.
VOCABULARY_TENSORS = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MASK_FILE = "mask_embedding.pt"
"""a pickled row that vLLM and SGLang put over the mask token's embedding; fetched so that it can be refused"""
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", MASK_FILE)

Index = tuple[slice, ...]
"""a part of an array, one slice a dimension; () is all of it"""
Place = Callable[[tuple[int, ...], tuple[str | None, ...], Callable[[Index], np.ndarray]], Array]
"""`place(shape, logical_axes, part)`: puts one parameter where the model computes, of which `part(index)` reads a part from the
file. The only place where loading meets devices."""


class Tensor(NamedTuple):
    """A tensor of a file: its name and shape are known, its values, or a part of them, are read when asked for."""

    name: str
    shape: tuple[int, ...]
    read: Callable[..., np.ndarray]
    """`read()` or `read(index)`"""


class Slot(NamedTuple):
    """Where a tensor goes: a parameter of ours."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    """as the file has it"""
    transposed: bool
    axes: tuple[str | None, ...]
    """logical axes of our parameter, for sharding"""


def place_default(shape: tuple[int, ...], logical_axes: tuple[str | None, ...], part: Callable[[Index], np.ndarray]) -> Array:
    """Put an array on JAX's default device."""
    return jnp.asarray(part(()))


def tensor_name(path: tuple[Any, ...]) -> str:
    """The checkpoint's name of one of our parameters (without a model prefix)."""
    *module, leaf = path
    if leaf in LEAF_RULES:
        return ".".join(map(str, module)) + LEAF_RULES[leaf][0]
    return ".".join(map(str, path)) + ".weight"


def slots(abstract: Any, rename: Callable[[str], str] = str) -> dict[str, Slot]:
    """The table from tensor names to parameters, made from the abstract state; `rename` maps plain names to the file's."""
    table = {}
    for path, variable in nnx.to_flat_state(abstract):
        transposed = LEAF_RULES.get(str(path[-1]), ("", False))[1]
        shape = tuple(variable.get_value().shape)
        slot = Slot(path, shape[::-1] if transposed else shape, transposed, variable.get_metadata()["logical"])
        table[rename(tensor_name(path))] = slot
    return table


def fill_state(
    abstract: Any,
    tensors: Iterable[Tensor],
    source: str,
    dtype: str,
    place: Place = place_default,
    rename: Callable[[str], str] = str,
    skip: Callable[[str], bool] = lambda name: False,
) -> Any:
    """The abstract state with its arrays read from `tensors`, one at a time and only the parts that are placed, cast to `dtype`.

    Args:
        source: what to call the checkpoint in errors.
        skip: whether a tensor without a parameter may be left out.
    Raises:
        CheckpointError: once, listing every missing, unknown and misshapen tensor.
    """
    table = slots(abstract, rename)
    leaves = dict(nnx.to_flat_state(abstract))
    missing, unknown, misshapen = set(table), [], []
    for tensor in tensors:
        slot = table.get(tensor.name)
        if slot is None:
            if not skip(tensor.name):
                unknown.append(tensor.name)
            continue
        missing.discard(tensor.name)
        if tensor.shape != slot.shape:
            misshapen.append(f"{tensor.name} is {list(tensor.shape)}, not {list(slot.shape)}")
        elif not unknown and not misshapen:
            shape = slot.shape[::-1] if slot.transposed else slot.shape
            leaves[slot.path] = leaves[slot.path].replace(place(shape, slot.axes, partial(_part, tensor, slot.transposed, dtype)))
    problems = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", sorted(missing)), ("unknown", unknown), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the tensors of {source} do not fit its config ({'; '.join(problems)}): fetch the checkpoint again, "
            "or correct config.json if it describes another model"
        )
    return nnx.from_flat_state(list(leaves.items()))


def split_fused(tensors: Iterable[Tensor], rows: Mapping[str, int]) -> list[Tensor]:
    """The tensors with each fused projection as its parts: Phi-3 files hold q, k, v and gate, up as one tensor each.

    `rows` gives each part's output size; the last part takes what is left, so a misfit shows in its shape. Raises `CheckpointError`
    when a part is there by itself too.
    """
    split: list[Tensor] = []
    for tensor in tensors:
        module, _, fused = tensor.name.removesuffix(".weight").rpartition(".")
        start = 0
        for part in _FUSED.get(fused, ()):
            end = tensor.shape[0] if part == _FUSED[fused][-1] else start + rows[part]
            shape = (max(end - start, 0), *tensor.shape[1:])
            split.append(Tensor(f"{module}.{part}.weight", shape, partial(_rows, tensor.read, start, end)))
            start = end
        if fused not in _FUSED:
            split.append(tensor)
    names = [tensor.name for tensor in split]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"the file has {twice} by itself and as part of a fused tensor: remove one of them")
    return split


def _rows(read: Callable[..., np.ndarray], start: int, end: int, index: Index = ()) -> np.ndarray:
    """A part of the rows start..end."""
    rows = range(start, end)[index[0] if index else slice(None)]
    return read((slice(rows.start, rows.stop), *index[1:]))


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _part(tensor: Tensor, transposed: bool, dtype: str, index: Index) -> np.ndarray:
    """A part of a parameter of ours, read from its tensor."""
    array = tensor.read(index[::-1] if transposed else index).astype(to_numpy_dtype(dtype), copy=False)
    return np.ascontiguousarray(array.T) if transposed else array


def check_dtype(dtype: str) -> Dtype:
    """The dtype when we know it. Raises `ConfigError`."""
    if dtype not in get_args(Dtype):
        raise ConfigError(f"dtype {dtype!r} is not supported: use one of {', '.join(get_args(Dtype))}")
    return cast(Dtype, dtype)


def to_numpy_dtype(dtype: str) -> np.dtype:
    """numpy's dtype of a config dtype; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder: model.safetensors, or the shards of model.safetensors.index.json.

    Raises `CheckpointError` when there are none, or a shard is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        hint = " (it has PyTorch .bin files: convert them to safetensors)" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json{hint}: fetch the weights")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files: fetch the file again")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{folder} lacks {len(absent)} of {len(files)} weight files ({_some(absent)}): fetch them")
    return files


def safetensors_tensors(folder: Path) -> list[Tensor]:
    """Every tensor of a folder, read lazily. Raises `CheckpointError` for a truncated file, an unknown dtype or a repeated name."""
    found: dict[str, Tensor] = {}
    for file in safetensors_files(folder):
        try:
            handle = safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a usable safetensors file, or is cut short ({error}): fetch it again") from None
        for name in handle.keys():  # noqa: SIM118  (not a mapping)
            view = handle.get_slice(name)
            kinds = VOCABULARY_TENSORS.get(name.removeprefix("model."), ("F32", "F16", "BF16"))
            if view.get_dtype() not in kinds:
                raise CheckpointError(
                    f"{file}: {name} is stored as {view.get_dtype()}; only {', '.join(kinds)} are read: take an unquantised one"
                )
            if name in found:
                raise CheckpointError(f"{file}: {name} is also in another weight file: remove one of them")
            found[name] = Tensor(name, tuple(view.get_shape()), partial(_read_safetensors, handle, name))
    return list(found.values())


def _read_safetensors(handle: Any, name: str, index: Index = ()) -> np.ndarray:
    return handle.get_slice(name)[index] if index else handle.get_tensor(name)


def model_folder(path: str | Path, files: Sequence[str] | None = None) -> Path:
    """The local folder of a model: the path itself, or the hub's files (all or `files`) in the local cache, downloaded when needed.

    Raises `CheckpointError` when it is neither a folder nor reachable on the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{path} is a file: give a Hugging Face folder, a .gguf file, or a hub id such as Qwen/Qwen3-4B")
    if not _HUB_ID.fullmatch(str(path)):
        raise CheckpointError(f"{path} does not exist: give a Hugging Face folder, a .gguf file, or a hub id such as Qwen/Qwen3-4B")
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    try:
        return Path(snapshot_download(str(path), allow_patterns=list(files or _HUB_FILES)))
    except Exception as error:  # many kinds: no network, no such model, gated, disk full
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{path} is no local folder (check its spelling), and the hub did not give it ({reason}): download the model elsewhere "
            "and give its folder"
        ) from None
