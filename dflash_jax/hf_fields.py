"""Typed reading of the fields of a config.json, so that each is read, known to be harmless, or refused; and rotary settings."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_jax.errors import CheckpointError
from dflash_jax.model_config import RopeConfig

# Fields of a config.json that do not change what a model computes.
IGNORED_KEYS = frozenset(
    {
        "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "attn_implementation",
        "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype", "finetuning_task", "gradient_checkpointing",
        "id2label", "initializer_range", "is_llama_config", "label2id", "max_window_layers", "model_type", "output_attentions",
        "output_hidden_states", "pretraining_tp", "problem_type", "return_dict", "task_specific_params", "tokenizer_class",
        "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
        "use_bfloat16", "use_cache",
    }
)  # fmt: skip
MISSING: Any = object()
"""the default of a field that must be there"""


class Fields:
    """A JSON object that notes which of its fields were read, so that the rest can be refused."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.read: set[str] = set()

    def get(self, name: str, kind: type, default: Any = MISSING) -> Any:
        """A field of a given type. Raises `CheckpointError` when it has another type, or is absent or null without a default."""
        self.read.add(name)
        value = self.values.get(name)
        if value is None:
            if default is MISSING:
                raise CheckpointError(f"{self.where} lacks {name!r}: add it, or fetch the file again")
            return default
        if kind is float and type(value) is int and abs(value) < 1e30:
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise CheckpointError(
                f"{self.where}: {name!r} is {repr(value)[:60]}, not of type {kind.__name__}: correct it, or fetch the file again"
            )
        return value

    def size(self, name: str, default: Any = MISSING) -> int:
        """A field that counts something: a positive integer. Raises `CheckpointError`."""
        value: int = self.get(name, int, default)
        if not 0 < value < 2**31:
            shown = str(value)[:20]
            raise CheckpointError(
                f"{self.where}: {name!r} is {shown}, not a positive number below 2**31: correct it, or fetch the file again"
            )
        return value

    def positive(self, name: str, default: Any = MISSING) -> Any:
        """A positive number, or the default as it is. Raises `CheckpointError`."""
        value = self.get(name, float, default)
        if value is not None and value <= 0:
            raise CheckpointError(f"{self.where}: {name!r} is {value}, not a positive number: correct it, or fetch the file again")
        return value

    def require(self, name: str, *only: Any) -> None:
        """Refuse a field that is present with another value than those we compute."""
        self.read.add(name)
        value = self.values.get(name)
        if value is not None and value not in only:
            known = ", ".join(map(repr, only))
            raise CheckpointError(f"{self.where}: {name} {value!r} is not supported (only {known}): take another model")

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Refuse what was not read. Empty values (null, empty lists and objects) mean nothing and pass."""
        known = self.read | set(ignored)
        rest = sorted(k for k, v in self.values.items() if k not in known and v is not None and v != [] and v != {})
        if rest:
            raise CheckpointError(
                f"{self.where} has fields that are not known here: {', '.join(f'{k} = {self.values[k]!r}'[:80] for k in rest)}. "
                "Take another model; or, if a field does not change what the model computes, remove it from the file"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Rotary positions

_ROPE_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_rope(fields: Fields) -> RopeConfig:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Where both name a theta, `rope_parameters` wins. Raises `CheckpointError` when theta is missing, the type is unknown, or the two
    places describe different scalings.
    """
    nested, scaling = fields.get("rope_parameters", dict, {}), fields.get("rope_scaling", dict, {})
    top = {
        "rope_theta": fields.get("rope_theta", float, None),
        "partial_rotary_factor": fields.positive("partial_rotary_factor", None),
    }
    found = [
        rope_of(Fields(top | {k: v for k, v in values.items() if v is not None}, f"{fields.where}: {name}"))
        for name, values in (("rope_parameters", nested), ("rope_scaling", scaling))
        if values
    ]
    if len(found) == 2 and dataclasses.replace(found[1], theta=found[0].theta) != found[0]:
        raise CheckpointError(f"{fields.where}: rope_parameters and rope_scaling disagree: make them equal or remove one")
    return found[0] if found else rope_of(Fields(top, fields.where))


def check_rotated_dims(rope: RopeConfig, head_dim: int, where: str) -> None:
    """Refuse a share of each head that is no whole number of pairs. Raises `CheckpointError`."""
    rotated = int(head_dim * min(rope.partial_rotary_factor, 2.0))
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise CheckpointError(
            f"{where}: partial_rotary_factor {rope.partial_rotary_factor} rotates {rotated} of {head_dim} dimensions a head: "
            "it must be an even number of them; correct it, or fetch the file again"
        )


def rope_of(fields: Fields) -> RopeConfig:
    kind = fields.get("rope_type", str, None) or fields.get("type", str, "default")
    fields.read |= set(_ROPE_COMMON)
    theta = fields.positive("rope_theta")
    if theta <= 1:
        raise CheckpointError(f"{fields.where}: 'rope_theta' is {theta}, but it must exceed 1: correct it, or fetch the file again")
    rope = RopeConfig(theta=theta, partial_rotary_factor=fields.positive("partial_rotary_factor", 1.0))
    if kind == "linear":
        rope = dataclasses.replace(rope, type="linear", factor=fields.positive("factor"))
    elif kind == "llama3":
        rope = dataclasses.replace(
            rope,
            type="llama3",
            factor=fields.positive("factor"),
            original_max_position=fields.size("original_max_position_embeddings"),
            low_freq_factor=fields.positive("low_freq_factor"),
            high_freq_factor=fields.positive("high_freq_factor"),
        )
        if rope.low_freq_factor >= rope.high_freq_factor:
            raise CheckpointError(f"{fields.where}: low_freq_factor must be below high_freq_factor: correct them")
    elif kind == "yarn":
        fields.require("truncate", True)
        rope = dataclasses.replace(
            rope,
            type="yarn",
            factor=fields.positive("factor"),
            original_max_position=fields.size("original_max_position_embeddings"),
            beta_fast=fields.positive("beta_fast", 32.0),  # the paper's values, and transformers'
            beta_slow=fields.positive("beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(fields),
        )
    elif kind != "default":
        raise CheckpointError(f"{fields.where}: rope type {kind!r} is not supported; supported are default, linear, llama3, yarn")
    fields.finish()
    return rope


def _yarn_attention_factor(fields: Fields) -> float | None:
    """The given factor, or DeepSeek's ratio of two mscale terms; None leaves the paper's formula."""
    given = fields.positive("attention_factor", None)
    mscale, mscale_all = (fields.get(name, float, None) for name in ("mscale", "mscale_all_dim"))
    if given is not None or not (mscale and mscale_all):
        return given
    if min(mscale, mscale_all) < 0:
        raise CheckpointError(f"{fields.where}: mscale and mscale_all_dim must not be negative: correct them")
    log = math.log(max(fields.get("factor", float), 1.0))
    return (0.1 * mscale * log + 1.0) / (0.1 * mscale_all * log + 1.0)


def rope_to_json(rope: RopeConfig) -> dict[str, Any]:
    """What `read_rope` reads back from `rope_scaling` (theta stands beside it)."""
    values: dict[str, Any] = {"rope_type": rope.type}
    if rope.type != "default":
        values["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_max_position
    if rope.type == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            values["attention_factor"] = rope.attention_factor
    if rope.partial_rotary_factor != 1.0:
        values["partial_rotary_factor"] = rope.partial_rotary_factor
    return values
