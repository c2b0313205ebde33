"""Loading targets (Hugging Face folders, the hub, GGUF files), loading drafters in every layout of `hf_layouts`, and saving them in
z-lab's: a folder of config.json and model.safetensors, which other engines load too.
"""

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dflash_jax.config import read_json
from dflash_jax.drafter import Drafter, abstract_drafter, check_drafter_fits
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.gguf import GGUFFile, embedded_model_path, read_gguf
from dflash_jax.hf_config import FAMILIES, target_config
from dflash_jax.hf_drafter import ARCHITECTURES, config_from_json, config_to_json, refuse_relatives
from dflash_jax.hf_parts import drafter_parts, drafter_tensors, own_tensors
from dflash_jax.hf_weights import (
    MASK_FILE,
    Index,
    Place,
    Tensor,
    check_dtype,
    fill_state,
    model_folder,
    place_default,
    safetensors_tensors,
    slots,
    split_fused,
    to_numpy_dtype,
)
from dflash_jax.model_config import Dtype, TargetConfig
from dflash_jax.sharding import mesh_of, spec
from dflash_jax.targets.base import Target
from dflash_jax.targets.dense import DenseTarget, abstract_decoder
from dflash_jax.tokenizer import Tokenizer

EMBEDDED_NAME = "smollm2-135m"
_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Weights of an earlier drafter in several files: other loaders would prefer them to the new ones.
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json")


def load_target(path: str | Path, dtype: str = "bfloat16", mesh: Mesh | None = None) -> DenseTarget:
    """A frozen target with its tokenizer (None when the folder has none).

    Args:
        path: `smollm2-135m` (the embedded model), a .gguf file, a Hugging Face folder (config.json and safetensors), or a hub id.
        dtype: what parameters are stored in and products computed in: `bfloat16`, or `float32` for exact checks.
        mesh: devices to spread the parameters over (`sharding.RULES`); None is JAX's default device.
    Raises:
        CheckpointError: the files are missing, damaged, of an unsupported model, or do not fit their config.
        ConfigError: a config file is missing or broken, or the dtype is unknown.
    """
    operand_dtype, place = check_dtype(dtype), _placement(mesh)
    if file := _gguf_file(path):
        return _load_gguf(file, operand_dtype, place)
    folder = model_folder(path)
    config, tokenizer = _described(folder, operand_dtype)
    abstract = nnx.state(abstract_decoder(config), nnx.Param)

    tensors = safetensors_tensors(folder)
    if FAMILIES[config.model_type].fused:
        kv_rows = config.num_kv_heads * config.head_dim
        rows = {"q_proj": config.num_heads * config.head_dim, "k_proj": kv_rows, "gate_proj": config.mlp_dim}
        tensors = split_fused(tensors, rows)
    _check_tied_head(config, tensors, str(folder))

    def skip(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")

    params = fill_state(abstract, tensors, str(folder), operand_dtype, place, _decoder_name, skip)
    return DenseTarget(config, params, tokenizer)


def load_text_target(path: str | Path, dtype: str = "bfloat16", mesh: Mesh | None = None) -> DenseTarget:
    """`load_target` for those who need text: raises `ConfigError` when there is no tokenizer."""
    return _of_text(load_target(path, dtype, mesh), path)


def describe_text_target(path: str | Path, dtype: str = "bfloat16") -> DenseTarget:
    """What `load_text_target` gives, with `params` None: no weight is read, nor fetched from the hub."""
    operand_dtype = check_dtype(dtype)
    file = _gguf_file(path)
    if file is not None:
        config, tokenizer = _described_gguf(read_gguf(file), operand_dtype)
    else:
        config, tokenizer = _described(model_folder(path, _SMALL_FILES), operand_dtype)
    return _of_text(DenseTarget(config, None, tokenizer), path)


def _of_text(target: DenseTarget, path: str | Path) -> DenseTarget:
    if target.tokenizer is None:
        raise ConfigError(f"target.path {path} has no tokenizer: text needs one, so add tokenizer.json to the folder")
    return target


def load_drafter(path: str | Path, target: Target, dtype: str | None = None) -> Drafter:
    """A drafter from a folder or hub id, checked against its target.

    It may be in z-lab's layout (the old schema or the new one), in speculators' or in that of the Muse assistant: docs/formats.md.

    Args:
        target: the model it drafts for; the drafter is spread over the mesh of its parameters, if they have one.
        dtype: what parameters are stored in and products computed in; None follows the target.
    Raises:
        CheckpointError: missing or damaged files, a field or tensor that is missing or unknown, or a drafter with parts that we do
            not have (DFlash 2, DSpark).
        ConfigError: config.json is missing or broken, the drafter is for another target, or the target uses its mask token.
    """
    if not hasattr(target, "config"):
        raise ConfigError(f"target is {target!r}: give the model itself, as load_target returns it")
    operand_dtype = check_dtype(target.config.dtype if dtype is None else dtype)
    folder = model_folder(path)
    where = str(folder / "config.json")
    values = read_json(where)
    nested = values.get("dflash_config")
    named = values.get("architectures")
    classes = [*(named if isinstance(named, list) else ()), values.get("model_type"), values.get("speculators_model_type")]
    refuse_relatives([*map(str, classes), *values, *(nested if isinstance(nested, dict) else ())], where)
    if (folder / MASK_FILE).exists():
        raise CheckpointError(
            f"{folder / MASK_FILE} replaces the mask's embedding, which is not supported: take a drafter without it"
        )
    tensors = drafter_tensors(safetensors_tensors(folder), str(folder))
    refuse_relatives(list(tensors), str(folder))
    parts = drafter_parts(tensors, target, str(folder))
    try:
        config = dataclasses.replace(config_from_json(values, where, target.config, parts), dtype=operand_dtype)
        check_drafter_fits(config, target.config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    abstract = nnx.state(abstract_drafter(config), nnx.Param)
    files = own_tensors(tensors, config)
    return Drafter(config, fill_state(abstract, files, str(folder), operand_dtype, _placement(mesh_of(target.params)), _file_name))


def save_drafter(drafter: Drafter, folder: str | Path, dtype: str = "bfloat16") -> None:
    """Write a drafter in z-lab's layout: all or nothing, replacing an earlier drafter of that folder.

    Args:
        folder: a new or empty folder, or one with an earlier drafter; other files of it are kept.
        dtype: what the parameters are stored in. Other engines expect bfloat16.
    Raises:
        CheckpointError: the folder holds something else than a drafter, or cannot be written (an earlier drafter stays intact).
        ConfigError: per-layer settings that the layout cannot express.
    """
    write_drafter(folder, config_to_json(drafter.config, check_dtype(dtype)), drafter_arrays(drafter, dtype))


def write_drafter(
    folder: str | Path, config: dict[str, Any], arrays: dict[str, np.ndarray], texts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write config.json, model.safetensors and `texts` (by file name): all or nothing, as `save_drafter` does.

    Raises `CheckpointError` when the folder holds something else than a drafter, or cannot be written.
    """
    folder = Path(folder).expanduser().resolve()  # a link stays, and what it names is replaced
    _check_replaceable(folder)
    try:
        text = re.sub(
            r"\[[\d\s,]+\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(config, indent=2)
        )  # lists on one line
        _write_folder(folder, {"config.json": text + "\n"} | dict(texts), arrays)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written ({error}): free some space there, or give another folder") from None


def _described(folder: Path, dtype: Dtype) -> tuple[TargetConfig, Tokenizer | None]:
    config, tokenizer = target_config(folder, dtype), Tokenizer.from_folder(folder)
    if tokenizer is not None:
        config = _with_tokenizer_ids(config, tokenizer)
    _check_special_ids(config, str(folder))
    return config, tokenizer


def _described_gguf(file: GGUFFile, dtype: Dtype) -> tuple[TargetConfig, Tokenizer | None]:
    tokenizer = Tokenizer.from_gguf(file.metadata)
    config = _with_tokenizer_ids(dataclasses.replace(file.target_config, dtype=dtype), tokenizer)
    _check_special_ids(config, str(file.path))
    return config, tokenizer


def _gguf_file(path: str | Path) -> Path | None:
    if str(path) == EMBEDDED_NAME:
        return embedded_model_path()
    return Path(path) if str(path).endswith(".gguf") else None


def _load_gguf(path: Path, dtype: Dtype, place: Place) -> DenseTarget:
    file = read_gguf(path)
    config, tokenizer = _described_gguf(file, dtype)
    abstract = nnx.state(abstract_decoder(config), nnx.Param)
    tensors = (Tensor(name, array.shape, partial(_part_of, array)) for name, array in file.tensors())
    return DenseTarget(config, fill_state(abstract, tensors, str(path), dtype, place, _decoder_name), tokenizer)


def _placement(mesh: Mesh | None) -> Place:
    if mesh is None:
        return place_default

    def place(shape: tuple[int, ...], logical_axes: tuple[str | None, ...], part: Callable[[Index], np.ndarray]) -> jax.Array:
        # From a callback and not with device_put: every process reads only the shards of its own devices, each of them once.
        read: dict[tuple[range, ...], np.ndarray] = {}

        def once(index: Any) -> np.ndarray:
            key = tuple(range(size)[one] for size, one in zip(shape, index, strict=True))
            if key not in read:
                read[key] = part(index)
            return read[key]

        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec(shape, logical_axes, mesh)), once)

    return place


def _part_of(array: np.ndarray, index: Index = ()) -> np.ndarray:
    return array[index]


def _decoder_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _check_tied_head(config: TargetConfig, tensors: list[Tensor], source: str) -> None:
    """Some tied checkpoints carry a copy of the embedding as lm_head.weight. It is left out, if it is a copy."""
    read = {tensor.name: tensor.read for tensor in tensors}
    head, embedding = read.get("lm_head.weight"), read.get("model.embed_tokens.weight")
    if config.tie_embeddings and head and embedding and not np.array_equal(head(), embedding()):
        raise CheckpointError(
            f"{source}: config.json says tie_word_embeddings, but lm_head.weight is not the embedding: "
            "set tie_word_embeddings to false, or remove the tensor, whichever the model was trained with"
        )


def _with_tokenizer_ids(config: TargetConfig, tokenizer: Tokenizer) -> TargetConfig:
    """The tokenizer's end-of-text ids join the stop set; its pad token counts where the config names none."""

    def ids(name: str) -> list[int]:
        token = tokenizer.token_id(tokenizer.special_tokens[name]) if name in tokenizer.special_tokens else None
        return [] if token is None else [token]

    stops = tuple(dict.fromkeys([*config.stop_token_ids, *tokenizer.stop_token_ids, *ids("eos_token")]))
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(ids("pad_token")), None)
    return dataclasses.replace(config, stop_token_ids=stops, pad_token_id=pad)


def _check_special_ids(config: TargetConfig, source: str) -> None:
    bad = [i for i in config.stop_token_ids if not 0 <= i < config.vocab_size]
    if bad:
        raise CheckpointError(
            f"{source}: stop token ids {bad} are outside the {config.vocab_size} embedding rows: correct eos_token_id"
        )


def _file_name(name: str) -> str:
    """z-lab keeps fc and hidden_norm at the top; a learned mask is a bare tensor."""
    return "mask_embedding" if name == "mask_embedding.weight" else name.removeprefix("fuser.")


def _write_folder(folder: Path, texts: dict[str, str], arrays: dict[str, np.ndarray]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder and so in the same file system: once the files are complete, only renames are left to do.
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        save_file(arrays, new / "model.safetensors", metadata={"format": "pt"})
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        shutil.copymode(new / "config.json", new / "model.safetensors")  # safetensors makes files that only their owner reads
        if folder.exists():
            for item in folder.iterdir():
                if item.name in {"model.safetensors", *texts} or _SHARD.fullmatch(item.name):
                    continue
                if item.is_dir() and not item.is_symlink():
                    shutil.copytree(item, new / item.name, symlinks=True)
                else:
                    shutil.copy2(item, new / item.name, follow_symlinks=False)
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:  # Ctrl-C too
            if old.exists():
                old.rename(folder)
            raise
    finally:
        if folder.exists() or not old.exists():  # else the only copy of the earlier drafter is in there
            shutil.rmtree(scratch, ignore_errors=True)


def drafter_arrays(drafter: Drafter, dtype: str) -> dict[str, np.ndarray]:
    """Every parameter under its file name, in the file's layout. Raises `CheckpointError` when they do not fit the config."""
    leaves = {path: variable.get_value() for path, variable in nnx.to_flat_state(drafter.params)}
    table = slots(nnx.state(abstract_drafter(drafter.config), nnx.Param), _file_name)
    if {slot.path for slot in table.values()} != set(leaves):
        raise CheckpointError("the drafter's parameters are not those of its config: build it with that config")
    arrays = {}
    for name, slot in table.items():
        array = np.asarray(jax.device_get(leaves[slot.path])).astype(to_numpy_dtype(dtype))
        arrays[name] = np.ascontiguousarray(array.T if slot.transposed else array)
        if arrays[name].shape != slot.shape:
            have, want = list(arrays[name].shape), list(slot.shape)
            raise CheckpointError(
                f"the drafter's parameter {name} is {have}, not {want} as its config says: build it with that config"
            )
    return arrays


def _check_replaceable(folder: Path) -> None:
    """Never replace a folder that is not a drafter's."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    file = folder / "config.json"
    named = read_json(file).get("architectures") if file.is_file() else None
    if isinstance(named, list) and any(name in ARCHITECTURES for name in named):
        return
    raise CheckpointError(f"{folder} holds something else than a drafter: give a new folder")
