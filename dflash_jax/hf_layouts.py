"""The layouts that drafters are published in, as one table: which field of a config.json stands where, and what its absence means.

`hf_drafter` reads and writes by this table, and the tables of `docs/formats.md` are made from it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dflash_jax.errors import CheckpointError
from dflash_jax.hf_fields import Fields
from dflash_jax.model_config import loss_decay_gamma


class Layout(NamedTuple):
    """A way to arrange a drafter's config.json."""

    title: str
    objects: tuple[str, ...]
    """the nested objects whose fields are read, outer ones first"""
    body: str
    """the object that describes the layers; empty: the top level"""
    model_type: str
    """the only model_type of the body"""


LAYOUTS = {
    "zlab": Layout("z-lab", ("dflash_config", "dflash_config.dflash_jax"), "", "qwen3"),
    "speculators": Layout(
        "speculators", ("transformer_layer_config", "speculators_config", "dflash_jax"), "transformer_layer_config", "qwen3"
    ),
    "assistant": Layout("Muse assistant", (), "", "muse_glimmer_assistant"),
}


class Derived(NamedTuple):
    """What a field is when it is absent, computed from fields before it."""

    text: str
    value: Callable[[Mapping[str, Any]], Any]


REQUIRED = Derived("refused", lambda found: None)
ANY: Any = object()
"""a compound field: `hf_drafter` reads its homes together"""


class Field(NamedTuple):
    """A field of `DFlashConfig` and its homes in each layout.

    Homes are separated by spaces; a dot enters a nested object. A home with a star is read, but not written.
    """

    name: str
    kind: str
    """size, positive and number, flag, ids, token, or the name of a compound"""
    zlab: str
    speculators: str
    assistant: str
    absent: Any
    meaning: str
    target: str = ""
    """the field of `TargetConfig` that stands in, in layouts other than z-lab's"""

    def homes(self, layout: str, written: bool = False) -> list[str]:
        """Where the field stands in a layout; `written` leaves out what is only read."""
        found: list[str] = getattr(self, layout).split()
        return [home.removesuffix("*") for home in found if not (written and home.endswith("*"))]


def _layer_field(name: str, kind: str, keys: str, absent: Any, meaning: str) -> Field:
    """A field of the layers, which all layouts call the same."""
    inside = " ".join(f"transformer_layer_config.{key}" for key in keys.split())
    return Field(name, kind, keys, inside, keys, absent, meaning)


def _our_field(name: str, kind: str, absent: Any, meaning: str) -> Field:
    """A training setting, which only we write."""
    return Field(name, kind, f"dflash_config.dflash_jax.{name}", f"dflash_jax.{name}", "", absent, meaning)


FIELDS = (
    _layer_field("draft_hidden_dim", "size", "hidden_size", REQUIRED, "the drafter's width"),
    Field(
        "target_hidden_dim", "size", "target_hidden_size", "target_hidden_size transformer_layer_config.target_hidden_size*", "",
        Derived("`hidden_size`", lambda found: found["draft_hidden_dim"]), "the target's width; written where it differs",
    ),
    Field(
        "vocab_size", "size", "vocab_size", "transformer_layer_config.vocab_size", "vocab_size", REQUIRED,
        "rows of the target's embedding", "vocab_size",
    ),
    Field(
        "num_target_layers", "size", "num_target_layers", "dflash_jax.num_target_layers", "num_target_layers", REQUIRED,
        "the target's decoder layers", "num_layers",
    ),
    _layer_field("num_draft_layers", "size", "num_hidden_layers", REQUIRED, "the drafter's layers"),
    _layer_field("num_heads", "size", "num_attention_heads", REQUIRED, "query heads"),
    _layer_field("num_kv_heads", "size", "num_key_value_heads", REQUIRED, "key and value heads"),
    _layer_field("head_dim", "size", "head_dim", REQUIRED, "width of a head"),
    _layer_field("mlp_dim", "size", "intermediate_size", REQUIRED, "width inside the MLP"),
    _layer_field("rms_norm_eps", "positive", "rms_norm_eps", REQUIRED, "epsilon of every norm"),
    _layer_field("max_position", "size", "max_position_embeddings", REQUIRED, "positions it was made for"),
    _layer_field("attention_bias", "flag", "attention_bias", False, "biases of the q, k, v and o projections together"),
    Field(
        "block_size", "size", "block_size dflash_config.block_size", "block_size", "block_size", REQUIRED,
        "slots a block, the anchor included",
    ),
    Field(
        "mask_token_id", "token", "mask_token_id dflash_config.mask_token_id",
        "mask_token_id transformer_layer_config.mask_token_id*", "mask_token_id", None,
        "token at the drafted slots; absent only with a learned mask",
    ),
    Field(
        "target_layer_ids", "ids", "target_layer_ids dflash_config.target_layer_ids",
        "aux_hidden_state_layer_ids transformer_layer_config.target_layer_ids*", "target_layer_ids", REQUIRED,
        "taps: outputs of these target layers, 0-based; `aux_hidden_state_layer_ids` counts from 1",
    ),
    Field(
        "input_embedding_scale", "positive", "dflash_config.input_embedding_scale input_embedding_scale*", "", "", 1.0,
        "what multiplies the target's embedding rows; written where it is not 1",
    ),
    _layer_field(
        "rope", "rope", "rope_parameters rope_theta rope_scaling partial_rotary_factor", ANY,
        "rotary positions: default, linear, llama3, yarn; theta must stand somewhere",
    ),
    Field(
        "sliding_window", "attention",
        "layer_types sliding_window use_sliding_window max_window_layers dflash_config.use_swa* dflash_config.swa_window_size*",
        "transformer_layer_config.layer_types transformer_layer_config.sliding_window transformer_layer_config.use_sliding_window "
        "transformer_layer_config.max_window_layers",
        "layer_types sliding_window", ANY,
        "each layer's window; without `layer_types` the layers from `max_window_layers` on slide. The assistant's window "
        "counts one more position",
    ),
    Field(
        "causal", "attention", "is_causal dflash_config.causal causal*",
        "sliding_window_non_causal transformer_layer_config.is_causal*", "", ANY,
        "whether slots see only earlier slots of their block. Absent: sliding layers are causal, full ones not; the assistant's "
        "never are",
    ),
    Field(
        "draft_vocab_size", "vocabulary", "draft_vocab_size*", "draft_vocab_size", "", ANY,
        "tokens that are drafted; fewer than `vocab_size` need the tensor `d2t`",
    ),
    Field(
        "draft_token_ids", "ids", "dflash_config.dflash_jax.draft_token_ids", "", "", (),
        "the drafted tokens, or the tensor `d2t`; none: all",
    ),
    Field(
        "own_embedding", "flag", "dflash_config.dflash_jax.own_embedding", "", "", False,
        "its own embedding; also where `embed_tokens.weight` is not the target's",
    ),
    Field(
        "own_head", "flag", "dflash_config.dflash_jax.own_head", "", "", False,
        "its own head; also where `lm_head.weight` is not the target's",
    ),
    Field(
        "learned_mask_embedding", "flag", "dflash_config.dflash_jax.learned_mask_embedding", "", "", False,
        "a learned input at the drafted slots, `mask_embedding`",
    ),
    _our_field(
        "loss_decay_gamma", "positive",
        Derived("the paper's for the block size", lambda found: loss_decay_gamma(found["block_size"])), "decay of the slot weights",
    ),
    _our_field("dropout", "number", 0.0, "dropout while training"),
    _our_field("temperature", "number", 0.0, "temperature of the drafts"),
)  # fmt: skip
COMPOUNDS = ("rope", "attention", "vocabulary")

# Fields that change what is computed, with the only value that we compute. They may stand in any object.
ONLY_VALUES = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0,
    "sample_from_anchor": False,
    "algorithm": "dflash",
    "projector_type": "dflash",
    "is_neox_style": True,
}

# Drafters of the same family with parts that we do not have: words in tensor names, config fields and class names.
RELATIVES = {
    "DFlash 2": ("attention_conv", "mlp_conv", "candidate_selector", "conv_kernel_size", "selector_rank", "dflash2"),
    "DSpark": ("markov", "dspark"),
    "Laguna": ("g_proj", "aux_hidden_norms"),
    "MiMo": ("attention_sink",),
}

# Names of tensors in some layouts -> the name in z-lab's, after a prefix `model.` is taken off.
RENAMED_TENSORS = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
UNUSED_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight")
"""copies of the target's, which only training by speculators reads"""


class Sections:
    """A config.json with its nested objects. Each notes which of its fields were read, so that the rest can be refused."""

    def __init__(self, values: Mapping[str, Any], where: str, layout: str) -> None:
        self.where, self.layout = where, layout
        self.parts = {"": Fields(values, where)}
        for path in LAYOUTS[layout].objects:
            parent, _, name = path.rpartition(".")
            self.parts[path] = Fields(self.parts[parent].get(name, dict, {}), f"{where}: {path}")
        self.body = self.parts[LAYOUTS[layout].body]

    def read(self, field: Field) -> Any:
        """A field that is no compound; None when it stands nowhere. Raises `CheckpointError` where two homes disagree."""
        stated = [(home, self._at(home, field.kind)) for home in field.homes(self.layout)]
        stated = [(home, value) for home, value in stated if value is not None]
        for home, value in stated[1:]:
            if value != stated[0][1]:
                raise CheckpointError(
                    f"{self.where}: {stated[0][0]} is {stated[0][1]!r} and {home} is {value!r}: make them agree, or remove one"
                )
        return stated[0][1] if stated else None

    def read_flag(self, home: str) -> bool | None:
        """One home of a true or false; None when it is absent."""
        flag: bool | None = self._at(home, "flag")
        return flag

    def lacks(self, field: Field) -> CheckpointError:
        """The error for a field that stands nowhere."""
        return CheckpointError(f"{self.where} lacks {field.homes(self.layout)[0]!r}: add the trained one, or fetch the file again")

    def finish(self, ignored: frozenset[str]) -> None:
        """Refuse fields with another value than the only one that we compute, and every field that nothing read."""
        self.body.require("model_type", LAYOUTS[self.layout].model_type)
        for part in self.parts.values():
            for name, only in ONLY_VALUES.items():
                part.require(name, only)
            part.finish(ignored)

    def _at(self, home: str, kind: str) -> Any:
        section, _, key = home.rpartition(".")
        fields = self.parts[section]
        types = {"size": int, "token": int, "positive": float, "number": float, "flag": bool, "ids": list}
        value = fields.get(key, types[kind], None)
        if value is None or (kind == "ids" and not value):
            return None
        if kind == "size":
            return fields.size(key)
        if kind == "positive":
            return fields.positive(key)
        if kind == "ids":
            if not all(type(i) is int for i in value):
                raise CheckpointError(f"{fields.where}: {key} must be whole numbers: correct it, or fetch the file again")
            return tuple(i - 1 for i in value) if key == "aux_hidden_state_layer_ids" else tuple(value)
        return value
