"""A drafter's config.json, read and written in the layouts of `hf_layouts`.

What z-lab's layout cannot say (our own embedding and head, the learned mask, training settings) stands in
`dflash_config.dflash_jax`; a drafter that other engines would misread gets another architecture name, so that they refuse it.
"""

from typing import Any, NamedTuple

from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.hf_fields import IGNORED_KEYS, check_rotated_dims, read_rope, rope_to_json
from dflash_jax.hf_layouts import COMPOUNDS, FIELDS, LAYOUTS, RELATIVES, REQUIRED, Derived, Sections
from dflash_jax.model_config import DFlashConfig, TargetConfig

ARCHITECTURE = "DFlashDraftModel"
OWN_ARCHITECTURE = "DFlashJaxDraftModel"
"""for drafters with their own embedding, head or mask, which other engines would silently replace by the target's, for those that
draft some tokens only: others would draft from all, which training did not teach, and for those that tap the last layer"""
SPECULATORS_ARCHITECTURE = "DFlashSpeculator"
ARCHITECTURES = (ARCHITECTURE, OWN_ARCHITECTURE, "DFlashForCausalLM", "Qwen3DFlashDraftModel", SPECULATORS_ARCHITECTURE)
LAST_TAP = (
    "is the target's last layer: Hugging Face's hidden_states hold it after the final norm and engines read it before, "
    "so the two would disagree"
)

_IGNORED = IGNORED_KEYS | {
    "auto_map", "tie_word_embeddings", "eos_token_id", "pad_token_id", "speculators_model_type", "speculators_version",
    "proposal_methods", "default_proposal_method", "verifier", "max_anchors",
}  # fmt: skip
# What every drafter's layers are, written for readers that ask.
_CONSTANTS = {
    "model_type": "qwen3", "hidden_act": "silu", "attention_dropout": 0.0, "tie_word_embeddings": False, "use_cache": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


class Parts(NamedTuple):
    """What the tensors of a drafter's files say beside its config.json."""

    draft_token_ids: tuple[int, ...] = ()
    own_embedding: bool = False
    own_head: bool = False


NO_PARTS = Parts()


def refuse_relatives(names: list[str], source: str) -> None:
    """Refuse a drafter of another kind by name; `names` are tensors, config fields and architectures. Raises `CheckpointError`."""
    for relative, words in RELATIVES.items():
        found = [name for name in names if any(word in name.lower() for word in words)]
        if found:
            raise CheckpointError(f"{source} is a {relative} drafter ({found[0]}), which is not supported: take a DFlash drafter")


def layout_of(values: dict[str, Any], where: str) -> str:
    """The name in `LAYOUTS` of a config.json's layout. Raises `CheckpointError` when it is no DFlash drafter."""
    kind = values.get("speculators_model_type")
    if kind is not None:
        if kind != "dflash":
            raise CheckpointError(f"{where} is a speculators drafter of type {kind!r}, not dflash: take a DFlash drafter")
        return "speculators"
    if values.get("model_type") == LAYOUTS["assistant"].model_type:
        return "assistant"
    architectures = [ARCHITECTURE] if values.get("architectures") is None else values["architectures"]
    if not isinstance(architectures, list) or not any(name in ARCHITECTURES for name in architectures):
        raise CheckpointError(f"{where}: architectures {architectures} are no DFlash drafter (that is {ARCHITECTURE})")
    return "zlab"


def config_from_json(
    values: dict[str, Any], where: str, target: TargetConfig | None = None, parts: Parts = NO_PARTS
) -> DFlashConfig:
    """A drafter's config.json as a `DFlashConfig` (dtype left at its default), in any layout.

    Args:
        target: what speculators' and the assistant's layout leave out (depth, vocabulary) is the target's.
        parts: what the drafter's tensors say.
    Raises:
        CheckpointError: a field is missing, malformed or unknown, two places disagree, or it taps the target's last layer.
        ConfigError: the fields do not make a drafter.
    """
    layout = layout_of(values, where)
    sections = Sections(values, where, layout)
    found: dict[str, Any] = {}
    for field in FIELDS:
        if field.kind in COMPOUNDS:
            continue
        value = sections.read(field)
        if value is None and layout != "zlab" and target is not None and field.target:
            value = getattr(target, field.target)
        if value is None and field.absent is REQUIRED:
            raise sections.lacks(field)
        if value is None:
            value = field.absent.value(found) if isinstance(field.absent, Derived) else field.absent
        found[field.name] = value
    found |= {"rope": read_rope(sections.body)} | read_attention(sections, found["num_draft_layers"])
    found |= _read_parts(sections, found, parts)
    sections.finish(_IGNORED)
    check_rotated_dims(found["rope"], found["head_dim"], where)
    own = layout == "zlab" and OWN_ARCHITECTURE in (values.get("architectures") or ())
    last = found["num_target_layers"] - 1
    if last in found["target_layer_ids"] and not own:
        raise CheckpointError(f"{where}: tap {last} {LAST_TAP}. Take a drafter with other taps")
    return DFlashConfig(**found)


def config_to_json(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter in z-lab's layout, with each value in every place where some engine looks for it.

    Raises `ConfigError` when layers differ in a way that the layout cannot say (it has one window and one `is_causal`).
    """
    causal: bool | None = None
    if len(set(config.causal)) == 1:
        causal = config.causal[0]
    elif config.causal != tuple(w is not None for w in config.sliding_window):  # else it is what readers assume
        raise ConfigError(f"causal {list(config.causal)}: z-lab's layout has one value, or causal sliding layers and full others")
    architecture = OWN_ARCHITECTURE if differences(config) else ARCHITECTURE
    return _write("zlab", {"architectures": [architecture]}, config, dtype, {"is_causal": causal, "causal": causal})


def config_to_speculators(config: DFlashConfig, dtype: str, verifier: str, verifier_class: str) -> dict[str, Any]:
    """The config.json of a drafter in speculators' layout (package `speculators` 0.9.0), for the target `verifier`.

    Raises `ConfigError` when the layout cannot say the drafter's attention: full layers are bidirectional there.
    """
    sliding = [causal for causal, window in zip(config.causal, config.sliding_window, strict=True) if window is not None]
    full = [causal for causal, window in zip(config.causal, config.sliding_window, strict=True) if window is None]
    if any(full) or len(set(sliding)) > 1:
        raise ConfigError(
            f"causal {list(config.causal)}: speculators' layout has bidirectional full layers and one value for sliding ones"
        )
    head = {
        "architectures": [SPECULATORS_ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {
                    "proposal_type": "greedy", "speculative_tokens": config.block_size - 1, "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": [verifier_class]},
        },
        "sample_from_anchor": False,
    }  # fmt: skip
    if config.input_embedding_scale != 1.0:
        raise ConfigError(
            f"input_embedding_scale is {config.input_embedding_scale}, but speculators' class reads embeddings as they are stored: "
            "export --to zlab"
        )
    drafted = len(config.draft_token_ids) or config.vocab_size
    attention = {"sliding_window_non_causal": bool(sliding) and not sliding[0], "draft_vocab_size": drafted}
    return _write("speculators", head, config, dtype, attention)


def differences(config: DFlashConfig) -> list[str]:
    """What z-lab's layout cannot tell other engines about a drafter; they would silently do without it."""
    last = config.num_target_layers - 1
    told = {
        "own_embedding, which they replace by the target's": config.own_embedding,
        "own_head, which they replace by the target's": config.own_head,
        "learned_mask_embedding, which they do not read": config.learned_mask_embedding,
        "draft_token_ids, because they draft from all tokens": config.draft_token_ids,
        f"tap {last}, which {LAST_TAP}": last in config.target_layer_ids,
    }
    return [text for text, present in told.items() if present]


def read_attention(sections: Sections, num_layers: int) -> dict[str, Any]:
    """Each layer's window and causality, as z-lab 0.1.0 reads them (its class on top of transformers' Qwen3Config)."""
    body, assistant = sections.body, sections.layout == "assistant"
    window = body.get("sliding_window", int, None)
    stated = assistant or body.get("use_sliding_window", bool, False)
    if stated and window is not None:
        body.size("sliding_window")
    if assistant:
        window = None if window is None else window + 1  # its mask keeps keys at a distance of the window itself
    elif not stated:
        window = None
    types = body.get("layer_types", list, [])
    if not types:
        full = 0 if assistant else num_layers if window is None else body.get("max_window_layers", int)
        types = ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
    if len(types) != num_layers or not all(kind in ("full_attention", "sliding_attention") for kind in types):
        raise CheckpointError(f"{body.where}: layer_types {types} is not {num_layers} of full_attention and sliding_attention")
    if "sliding_attention" in types and window is None:
        raise CheckpointError(f"{body.where}: layer_types has sliding layers: add sliding_window, and use_sliding_window true")
    sliding = [kind == "sliding_attention" for kind in types]
    windows = tuple(window if s else None for s in sliding)
    _check_second_window(sections, windows)
    return {"sliding_window": windows, "causal": _read_causal(sections, sliding)}


def _read_causal(sections: Sections, sliding: list[bool]) -> tuple[bool, ...]:
    homes = next(field for field in FIELDS if field.name == "causal").homes(sections.layout)
    said = {home: flag for home in homes if (flag := sections.read_flag(home)) is not None}
    if sections.layout == "assistant":
        return (False,) * len(sliding)
    if sections.layout == "speculators":
        non_causal = said.pop("sliding_window_non_causal", False)
        implied = tuple(s and not non_causal for s in sliding)
        for home, value in said.items():
            if set(implied) != {value}:
                raise CheckpointError(
                    f"{sections.where}: {home} is {value}, but by sliding_window_non_causal the layers are {list(implied)}: "
                    "make them agree, or export the drafter again"
                )
        return implied
    if len(set(said.values())) > 1:
        raise CheckpointError(f"{sections.where}: {' and '.join(f'{home} is {v}' for home, v in said.items())}: make them agree")
    return (next(iter(said.values())),) * len(sliding) if said else tuple(sliding)


def _check_second_window(sections: Sections, windows: tuple[int | None, ...]) -> None:
    """A second way to state the window, in `dflash_config`; it must agree with layer_types."""
    nested = sections.parts.get("dflash_config")
    if nested is None:
        return
    used, size = nested.get("use_swa", bool, False), nested.get("swa_window_size", int, None)
    if used and set(windows) - {None} != {size}:
        raise CheckpointError(f"{nested.where}: swa_window_size is {size}, but the layers have {list(windows)}: make them equal")


def _read_parts(sections: Sections, found: dict[str, Any], parts: Parts) -> dict[str, Any]:
    """Embedding, head and draft vocabulary: what config.json says, and what the tensors say."""
    where, ids = sections.where, found["draft_token_ids"] or parts.draft_token_ids
    if parts.draft_token_ids and ids != parts.draft_token_ids:
        raise CheckpointError(f"{where}: draft_token_ids is not what the tensor d2t says: remove one of them")
    size = None if sections.layout == "assistant" else sections.parts[""].get("draft_vocab_size", int, None)
    if size is not None and size != (len(ids) or found["vocab_size"]):
        raise CheckpointError(
            f"{where}: draft_vocab_size is {size}, but the weights draft {len(ids) or 'all'} tokens (tensor d2t): "
            "fetch the files again"
        )
    if parts.own_embedding and not found["own_embedding"] and found["input_embedding_scale"] != 1.0:
        raise CheckpointError(
            f"{where}: input_embedding_scale is for the target's embedding, but the weights have their own embed_tokens.weight: "
            "remove the tensor if it is a copy of the target's, or the field"
        )
    return {
        "draft_token_ids": ids,
        "own_embedding": found["own_embedding"] or parts.own_embedding,
        "own_head": found["own_head"] or parts.own_head,
    }


def _write(layout: str, head: dict[str, Any], config: DFlashConfig, dtype: str, attention: dict[str, Any]) -> dict[str, Any]:
    """`head`, and every field in all its homes. A value of None in `attention` is not written."""
    windows = {w for w in config.sliding_window if w is not None}
    if len(windows) > 1:
        raise ConfigError(f"sliding_window {list(config.sliding_window)}: the layout has one size for all sliding layers")
    rope, rotated = rope_to_json(config.rope), config.rope.partial_rotary_factor
    compound = attention | {
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.type == "default" else rope | {"type": config.rope.type},  # type: an older spelling
        "rope_parameters": rope | {"rope_theta": config.rope.theta},
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.sliding_window],
        "use_sliding_window": bool(windows),
        "sliding_window": next(iter(windows), None),
        "max_window_layers": config.num_draft_layers,
    }
    absent = {name for name, value in attention.items() if value is None}
    absent |= {"partial_rotary_factor"} if rotated == 1.0 else set()
    absent |= {"input_embedding_scale"} if config.input_embedding_scale == 1.0 else set()
    absent |= {"target_hidden_size"} if config.target_hidden_dim == config.draft_hidden_dim else set()
    compound["partial_rotary_factor"] = rotated
    body = LAYOUTS[layout].body
    values = dict(head)
    _put(values, body, _CONSTANTS | {"dtype": dtype})
    for field in FIELDS:
        for home in field.homes(layout, written=True):
            section, _, key = home.rpartition(".")
            if key in absent:
                continue
            value = compound[key] if field.kind in COMPOUNDS else getattr(config, field.name)
            if key == "aux_hidden_state_layer_ids":
                value = tuple(i + 1 for i in value)
            _put(values, section, {key: list(value) if isinstance(value, tuple) else value})
    return values


def _put(values: dict[str, Any], section: str, new: dict[str, Any]) -> None:
    """Add fields to a nested object, made on the way."""
    for name in section.split(".") if section else ():
        values = values.setdefault(name, {})
    values |= new
