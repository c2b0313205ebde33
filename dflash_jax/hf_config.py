"""Hugging Face config.json as our configs: every field is read, known to be harmless, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dflash_jax.config import read_json
from dflash_jax.errors import CheckpointError
from dflash_jax.hf_fields import IGNORED_KEYS, MISSING, Fields, check_rotated_dims, read_rope, rope_of
from dflash_jax.model_config import Dtype, TargetConfig

# Fields that do change it, with the only value that we compute.
_ONLY_VALUES = {"is_encoder_decoder": False, "rope_interleaved": False, "use_mrope": False}


def _plain(fields: Fields) -> dict[str, Any]:
    return {}


def _phi3(fields: Fields) -> dict[str, Any]:
    fields.require("attention_bias", False)
    # dropout; what longrope needs; and the file that held the class before transformers had it
    fields.read |= {"embd_pdrop", "resid_pdrop", "original_max_position_embeddings", "auto_map"}
    return {}


def _smollm3(fields: Fields) -> dict[str, Any]:
    layers, interval = fields.size("num_hidden_layers"), fields.size("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers", list, None)  # 1 where there are positions, whatever the name says
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    if len(rotated) != layers or not set(map(str, rotated)) <= {"0", "1"}:
        raise CheckpointError(f"{fields.where}: no_rope_layers {str(rotated)[:60]} is not {layers} of 0 and 1: correct it")
    return {"layers_without_rope": tuple(i for i, rope in enumerate(rotated) if not rope)}


def _seed_oss(fields: Fields) -> dict[str, Any]:
    fields.get("attention_bias", bool)  # the class's default is another than Llama's
    fields.read.add("residual_dropout")
    return {}


def _granite(fields: Fields) -> dict[str, Any]:
    return {
        "attention_scale": fields.positive("attention_multiplier", 1.0),
        "embedding_scale": fields.positive("embedding_multiplier", 1.0),
        "residual_scale": fields.positive("residual_multiplier", 1.0),
        "logit_scale": 1 / fields.positive("logits_scaling", 1.0),
    }


def _gemma(fields: Fields) -> dict[str, Any]:
    fields.require("use_bidirectional_attention", False)
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("hidden_act", "gelu_pytorch_tanh", "gelu")  # the older spelling means the tanh form here, or nothing
    return {"activation": "gelu_tanh", "norm_offset": 1.0, "embedding_scale": float(fields.size("hidden_size")) ** 0.5}


def _gemma2(fields: Fields) -> dict[str, Any]:
    return _gemma(fields) | {
        "sandwich_norms": True,
        "attention_scale": fields.positive("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": fields.positive("attn_logit_softcapping", None),
        "logit_softcap": fields.positive("final_logit_softcapping", None),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    fields.require("attn_logit_softcapping")  # the class does not apply it
    fields.require("sliding_window_pattern", 6)
    fields.require("_sliding_window_pattern", 6)
    nested = fields.values.get("rope_parameters")
    if isinstance(nested, dict) and "sliding_attention" in nested:
        fields.read.add("rope_parameters")
        kinds = Fields(nested, f"{fields.where}: rope_parameters")
        full, local = (
            rope_of(Fields(kinds.get(kind, dict), f"{kinds.where}: {kind}")) for kind in ("full_attention", "sliding_attention")
        )
        kinds.finish()
    else:
        full = read_rope(fields)
        local = rope_of(Fields({"rope_theta": fields.positive("rope_local_base_freq")}, f"{fields.where}: rope_local_base_freq"))
    return _gemma2(fields) | {"qk_norm": True, "rope": full, "local_rope": local}


class Family(NamedTuple):
    """How a model_type differs from the plain Llama layer. Each entry was compared with the transformers class of that name."""

    architecture: str
    qkv_bias: bool | str = False
    """fixed, or the name of the field that says it"""
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim_default: bool = True
    """whether an absent head_dim means hidden_size // num_attention_heads"""
    kv_heads_default: bool = False
    """whether an absent num_key_value_heads means num_attention_heads"""
    tied_default: bool = False
    """what an absent tie_word_embeddings means"""
    windows: Literal["none", "all", "switched"] | int = "none"
    """see `read_windows`"""
    fused: bool = False
    """whether the file holds q, k, v and gate, up as one tensor each"""
    more: Callable[[Fields], dict[str, Any]] = _plain
    """reads the fields that only this family has, as further fields of `TargetConfig`"""


_BIAS = ("attention_bias", "attention_bias")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", *_BIAS, "mlp_bias", kv_heads_default=True),
    "mistral": Family("MistralForCausalLM", windows="all"),
    "ministral": Family("MinistralForCausalLM", head_dim_default=False, windows=0),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="switched"),
    "qwen3": Family("Qwen3ForCausalLM", *_BIAS, qk_norm=True, head_dim_default=False, windows="switched"),
    "phi3": Family("Phi3ForCausalLM", kv_heads_default=True, windows="all", fused=True, more=_phi3),
    "smollm3": Family("SmolLM3ForCausalLM", *_BIAS, "mlp_bias", tied_default=True, more=_smollm3),
    "seed_oss": Family(
        "SeedOssForCausalLM", "attention_bias", "attention_out_bias", "mlp_bias", head_dim_default=False, more=_seed_oss
    ),
    "granite": Family("GraniteForCausalLM", *_BIAS, "mlp_bias", kv_heads_default=True, more=_granite),
    "gemma": Family("GemmaForCausalLM", *_BIAS, head_dim_default=False, tied_default=True, more=_gemma),
    "gemma2": Family("Gemma2ForCausalLM", *_BIAS, head_dim_default=False, tied_default=True, windows=2, more=_gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", *_BIAS, head_dim_default=False, tied_default=True, windows=6, more=_gemma3),
}


def target_config(folder: Path, dtype: Dtype) -> TargetConfig:
    """The `TargetConfig` of a Hugging Face folder; stop and pad ids are those of config.json and generation_config.json.

    Raises `CheckpointError` for an unsupported model_type, and for a field that is missing, malformed or unknown.
    """
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    model_type = fields.get("model_type", str)
    if "dflash_config" in fields.values or "DFlashDraftModel" in fields.get("architectures", list, []):
        raise CheckpointError(f"{fields.where} is that of a drafter, not of a target: give it to load_drafter (or as drafter.path)")
    family = FAMILIES.get(model_type)
    if family is None:
        raise CheckpointError(f"{fields.where}: model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    architectures = fields.get("architectures", list, [family.architecture])
    if family.architecture not in architectures:
        raise CheckpointError(f"{fields.where}: architectures {architectures} are not supported (only {family.architecture})")
    if fields.values.get("quantization_config"):
        raise CheckpointError(f"{fields.where}: the weights are quantised (quantization_config): take the unquantised checkpoint")
    for name, only in _ONLY_VALUES.items():
        fields.require(name, only)
    more = family.more(fields)
    if more.get("activation") is None:
        fields.require("hidden_act", "silu")

    def bias(rule: bool | str) -> bool:
        return bool(fields.get(rule, bool, False)) if isinstance(rule, str) else rule

    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    stops, pad = special_ids(folder)
    fields.read |= {"eos_token_id", "pad_token_id"}
    layers = fields.size("num_hidden_layers")
    given: dict[str, Any] = {"rope": more.get("rope") or read_rope(fields), "qk_norm": family.qk_norm}
    config = TargetConfig(
        model_type=model_type,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads if family.kv_heads_default else MISSING),
        head_dim=fields.size("head_dim", hidden // heads if family.head_dim_default else MISSING),
        mlp_dim=fields.size("intermediate_size"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        max_position=fields.size("max_position_embeddings"),
        qkv_bias=bias(family.qkv_bias),
        o_bias=bias(family.o_bias),
        mlp_bias=bias(family.mlp_bias),
        tie_embeddings=fields.get("tie_word_embeddings", bool, family.tied_default),
        stop_token_ids=stops,
        pad_token_id=pad,
        dtype=dtype,
        sliding_window=read_windows(fields, family.windows, layers),
        **given | more,
    )
    fields.finish(IGNORED_KEYS)
    for rope in (config.rope, config.local_rope):
        if rope is not None:
            check_rotated_dims(rope, config.head_dim, fields.where)
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {config.num_kv_heads}"
        )
    return config


def read_windows(fields: Fields, rule: Literal["none", "all", "switched"] | int, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window (None: it sees the whole context), or () when no layer has one. Raises `CheckpointError`.

    `rule` is what the family's transformers class does. "none": it has no windows. "all": the file's window holds for every layer.
    Else `layer_types` says whose it is; where that is absent, "switched" (Qwen: only with `use_sliding_window`) leaves the first
    `max_window_layers` layers whole, and a number n every n-th layer (0: none).
    """
    if rule not in ("none", "switched") and "sliding_window" not in fields.values:  # most of these classes then take 4096
        raise CheckpointError(f"{fields.where} lacks 'sliding_window': add it (null: no window), or fetch the file again")
    window, types = fields.get("sliding_window", int, None), [str(kind) for kind in fields.get("layer_types", list, [])]
    if rule in ("none", "switched") and not fields.get("use_sliding_window", bool, rule == "none"):
        window = None
    first = fields.get("max_window_layers", int) if rule == "switched" and window is not None and not types else 0
    every = rule if isinstance(rule, int) and rule else num_layers + 1
    whole = [window is None or i < first or (i + 1) % every == 0 for i in range(num_layers)]
    default = ["full_attention" if sees_all else "sliding_attention" for sees_all in whole]
    types = types or default
    fits = types == default if rule == "all" or window is None else set(types) <= {"full_attention", "sliding_attention"}
    if not fits or len(types) != num_layers or (window is not None and (rule == "none" or not 0 < window < 2**31)):
        raise CheckpointError(
            f"{fields.where}: a sliding window of {window} with layer_types {sorted(set(types))} in {len(types)} layers is not "
            f"what {fields.values['model_type']} computes: correct sliding_window and layer_types, or take another model"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types) if "sliding_attention" in types else ()


def special_ids(folder: Path) -> tuple[tuple[int, ...], int | None]:
    """Stop ids (of generation_config.json and config.json together) and the pad id; each file may give one id or a list."""
    stops: list[int] = []
    pad: int | None = None
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        values = read_json(folder / name)
        eos = values.get("eos_token_id")
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(type(i) is int for i in ids):
            raise CheckpointError(f"{folder / name}: 'eos_token_id' is {eos!r}, not an id or a list of ids: correct it")
        stops += ids
        found = values.get("pad_token_id")
        if type(found) is int and found >= 0:  # -1 is an old way to say none
            pad = found  # config.json, read last, wins
    return tuple(dict.fromkeys(stops)), pad
