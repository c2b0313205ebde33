"""A drafter's config.json in z-lab's layout, read and written.

What that layout cannot say (our own embedding and head, the learned mask, training settings) stands in
`dflash_config.dflash_jax`; a drafter that other engines would misread gets another architecture name, so that they refuse it.
"""

from typing import Any

from dflash_jax.config import DFlashConfig
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.hf_config import IGNORED_KEYS, Fields, check_rotated_dims, read_rope, rope_to_json

ARCHITECTURE = "DFlashDraftModel"
OWN_ARCHITECTURE = "DFlashJaxDraftModel"
"""for drafters with their own embedding, head or mask, which other engines would silently replace by the target's, and for those
that draft some tokens only: others would draft from all, which training did not teach"""
ARCHITECTURES = (ARCHITECTURE, OWN_ARCHITECTURE, "DFlashForCausalLM")

# Drafters of the same family with parts that we do not have: words in tensor names, config fields and architecture names.
_RELATIVES = {
    "DFlash 2": ("attention_conv", "mlp_conv", "candidate_selector", "conv_kernel_size", "selector_rank", "DFlash2"),
    "DSpark": ("markov", "DSpark"),
    "speculators": ("speculators_model_type", "DFlashSpeculator"),
}
_IGNORED = IGNORED_KEYS | {"auto_map", "tie_word_embeddings", "eos_token_id", "pad_token_id"}
# The fields of `dflash_config.dflash_jax`.
_OWN_FIELDS = (
    "loss_decay_gamma", "own_embedding", "own_head", "learned_mask_embedding", "dropout", "temperature", "draft_token_ids",
)  # fmt: skip


def refuse_relatives(names: list[str], source: str) -> None:
    """Refuse a drafter of another kind by name; `names` are tensors, config fields and architectures. Raises `CheckpointError`."""
    for relative, words in _RELATIVES.items():
        found = [name for name in names if any(word in name for word in words)]
        if found:
            raise CheckpointError(f"{source} is a {relative} drafter ({found[0]}), which is not supported: take a DFlash drafter")


def config_from_json(values: dict[str, Any], where: str) -> DFlashConfig:
    """A drafter's config.json as a `DFlashConfig` (dtype left at its default).

    block_size, mask_token_id and target_layer_ids are read from `dflash_config` or the top level. Where loss_decay_gamma is not
    stated (z-lab's files), it is the paper's value for the block size; only training reads it. Raises `CheckpointError`.
    """
    top = Fields(values, where)
    nested = Fields(top.get("dflash_config", dict, {}), f"{where}: dflash_config")
    own = Fields(nested.get("dflash_jax", dict, {}), f"{where}: dflash_config.dflash_jax")

    def either(name: str, kind: type, default: Any = None) -> Any:
        inner, outer = nested.get(name, kind, None), top.get(name, kind, None)
        if inner is not None and outer is not None and inner != outer:
            raise CheckpointError(f"{where}: {name} is {outer!r} at the top and {inner!r} in dflash_config: make them equal")
        return outer if inner is None else inner if inner is not None else default

    architectures = top.get("architectures", list, [ARCHITECTURE])
    if not any(name in ARCHITECTURES for name in architectures):
        raise CheckpointError(f"{where}: architectures {architectures} are no DFlash drafter (that is {ARCHITECTURE})")
    if top.get("model_type", str, "qwen3") != "qwen3":
        raise CheckpointError(f"{where}: model_type {values['model_type']!r} is not supported: drafters are qwen3 for every target")
    for fields in (top, nested):  # output scales of other targets: z-lab reads them from either place
        for name, only in (("output_multiplier", 1.0), ("final_logit_softcapping", 0)):
            fields.require(name, only)
    top.require("hidden_act", "silu")
    top.require("draft_vocab_size", values.get("vocab_size"))

    num_layers, num_target_layers = top.size("num_hidden_layers"), top.size("num_target_layers")
    ids = either("target_layer_ids", list)
    if not ids or not all(type(i) is int for i in ids):
        raise CheckpointError(f"{where}: target_layer_ids in dflash_config is {ids}: add the layers it was trained with, 0-based")
    block_size = either("block_size", int)
    if block_size is None:
        raise CheckpointError(f"{where} lacks block_size: add the trained one")
    embedding_scale = either("input_embedding_scale", float)
    windows, causal = _read_layers(top, either("causal", bool), num_layers)
    _check_swa(nested, windows)
    hidden = top.size("hidden_size")
    config = DFlashConfig(
        target_hidden_dim=top.get("target_hidden_size", int, hidden),
        draft_hidden_dim=hidden,
        vocab_size=top.size("vocab_size"),
        num_target_layers=num_target_layers,
        num_heads=top.size("num_attention_heads"),
        num_kv_heads=top.size("num_key_value_heads"),
        head_dim=top.size("head_dim"),
        mlp_dim=top.size("intermediate_size"),
        block_size=block_size,
        num_draft_layers=num_layers,
        target_layer_ids=tuple(ids),
        mask_token_id=either("mask_token_id", int),
        input_embedding_scale=1.0 if embedding_scale is None else embedding_scale,
        rms_norm_eps=top.positive("rms_norm_eps"),
        rope=read_rope(top),
        max_position=top.size("max_position_embeddings"),
        attention_bias=top.get("attention_bias", bool, False),
        sliding_window=windows,
        causal=causal,
        loss_decay_gamma=own.get("loss_decay_gamma", float, min(block_size / 2, 7.0)),
        own_embedding=own.get("own_embedding", bool, False),
        own_head=own.get("own_head", bool, False),
        learned_mask_embedding=own.get("learned_mask_embedding", bool, False),
        dropout=own.get("dropout", float, 0.0),
        temperature=own.get("temperature", float, 0.0),
        draft_token_ids=_read_token_ids(own),
    )
    top.finish(_IGNORED)
    nested.finish(_IGNORED)
    own.finish()
    check_rotated_dims(config.rope, config.head_dim, where)
    return config


def config_to_json(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter, with each value in every place where some engine looks for it.

    Raises `ConfigError` when layers differ in a way that the layout cannot say (it has one window and one `is_causal`).
    """
    windows = {w for w in config.sliding_window if w is not None}
    if len(windows) > 1:
        raise ConfigError(f"sliding_window {list(config.sliding_window)}: z-lab's layout has one size for all sliding layers")
    rope = rope_to_json(config.rope)
    differs = config.own_embedding or config.own_head or config.learned_mask_embedding or config.draft_token_ids
    values: dict[str, Any] = {
        "architectures": [OWN_ARCHITECTURE if differs else ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": config.draft_hidden_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_draft_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.type == "default" else rope | {"type": config.rope.type},  # type: an older spelling
        "rope_parameters": rope | {"rope_theta": config.rope.theta},
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.sliding_window],
        "use_sliding_window": bool(windows),
        "sliding_window": next(iter(windows), None),
        "max_window_layers": config.num_draft_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "dflash_jax": {name: getattr(config, name) for name in _OWN_FIELDS} | {"draft_token_ids": list(config.draft_token_ids)},
        },
    }
    if config.input_embedding_scale != 1.0:
        values["dflash_config"]["input_embedding_scale"] = config.input_embedding_scale
    if config.rope.partial_rotary_factor != 1.0:
        values["partial_rotary_factor"] = config.rope.partial_rotary_factor
    if config.target_hidden_dim != config.draft_hidden_dim:
        values["target_hidden_size"] = config.target_hidden_dim
    if config.causal != tuple(w is not None for w in config.sliding_window):  # else it is what readers assume
        if len(set(config.causal)) > 1:
            raise ConfigError(
                f"causal {list(config.causal)}: z-lab's layout has one value, or causal sliding layers and full others"
            )
        values["is_causal"] = config.causal[0]
    return values


def _read_layers(top: Fields, causal_alias: bool | None, num_layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Each layer's window and causality, as z-lab 0.1.0 reads them (its class on top of transformers' Qwen3Config)."""
    window = top.get("sliding_window", int, None)
    if not top.get("use_sliding_window", bool, False):
        window = None
    types = top.get("layer_types", list, [])
    if not types:
        first = num_layers if window is None else top.get("max_window_layers", int)
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    if len(types) != num_layers or not all(kind in ("full_attention", "sliding_attention") for kind in types):
        raise CheckpointError(f"{top.where}: layer_types {types} is not {num_layers} of full_attention and sliding_attention")
    if "sliding_attention" in types and window is None:
        raise CheckpointError(f"{top.where}: layer_types has sliding layers: add sliding_window, and use_sliding_window true")
    sliding = [kind == "sliding_attention" for kind in types]
    is_causal = top.get("is_causal", bool, None)
    if is_causal is not None and causal_alias is not None and is_causal != causal_alias:
        raise CheckpointError(f"{top.where}: is_causal is {is_causal} and causal is {causal_alias}: make them equal")
    stated = causal_alias if is_causal is None else is_causal
    causal = tuple(sliding) if stated is None else (stated,) * num_layers
    return tuple(window if s else None for s in sliding), causal


def _read_token_ids(own: Fields) -> tuple[int, ...]:
    ids = own.get("draft_token_ids", list, [])
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"{own.where}: draft_token_ids must be whole numbers: take the file that training wrote")
    return tuple(ids)


def _check_swa(nested: Fields, windows: tuple[int | None, ...]) -> None:
    """A second way to state the window, in `dflash_config`; it must agree with layer_types."""
    used, size = nested.get("use_swa", bool, False), nested.get("swa_window_size", int, None)
    if used and set(windows) - {None} != {size}:
        raise CheckpointError(f"{nested.where}: swa_window_size is {size}, but the layers have {list(windows)}: make them equal")
