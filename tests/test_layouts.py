"""Every published layout of a drafter: what is read, what is refused, and the page that says so."""

import copy
import dataclasses
import json
import warnings

import format_tables
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_drafter import DRAFTER, OWN, SHARED, TARGET, equal_params, random_drafter
from tiny_folder import HIDDEN, LAYERS, VOCAB

import dflash_jax.hf_drafter as hf_drafter
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.hf import load_drafter, save_drafter
from dflash_jax.hf_drafter import config_from_json, config_to_json, config_to_speculators
from dflash_jax.hf_layouts import FIELDS, LAYOUTS, ONLY_VALUES
from dflash_jax.model_config import RopeConfig
from dflash_jax.targets import DenseTarget

pytestmark = pytest.mark.one_cell

# As speculators 0.9.0 writes a drafter like DRAFTER.
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 4, 5],
    "block_size": 6,
    "draft_vocab_size": VOCAB,
    "dtype": "bfloat16",
    "mask_token_id": 60,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 24,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 256,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    },
    "transformers_version": "5.24.0",
}
ASSISTANT = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "block_size": 6,
    "mask_token_id": 60,
    "target_layer_ids": [1, 3, 4],
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
    "eos_token_id": 2,
}
ENCODER = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
WANTED = dataclasses.replace(DRAFTER, loss_decay_gamma=3.0)


@pytest.fixture(scope="module")
def target():
    """Made with numpy: its embedding and head are what borrowed copies must equal."""
    random = np.random.default_rng(5)
    tables = {name: jnp.asarray(random.standard_normal((VOCAB, HIDDEN)), jnp.float32) for name in ("embed_tokens", "lm_head")}
    return DenseTarget(dataclasses.replace(TARGET, tie_embeddings=False), {k: SimpleVariable(v) for k, v in tables.items()}, None)


class SimpleVariable:
    """What `DenseTarget` reads of a parameter."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, _):
        return self.value


def write(folder, values, tensors=None, rename=str, **more):
    """A folder in another writer's layout, with the layers of `random_drafter()`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if tensors is None:
        save_drafter(random_drafter(), folder / "layers", dtype="float32")
        tensors = load_file(folder / "layers" / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in (tensors | more).items()}, folder / "model.safetensors")
    return folder


def changed(values, body="transformer_layer_config", **changes):
    """A copy with other fields; `body` says where they go."""
    values = copy.deepcopy(values)
    (values[body] if body else values).update(changes)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# The page, and that its table is what happens


def test_the_page_is_what_the_code_says():
    assert format_tables.FILE.read_text(encoding="utf-8") == format_tables.page(), (
        "docs/formats.md is older than the code: run `python tests/format_tables.py` in the root of the project"
    )


def examples(layout):
    """config.json files that together make the reader look everywhere."""
    if layout == "assistant":
        return [ASSISTANT]
    kinds = [dataclasses.replace(DRAFTER, **changes) for changes in SHARED.values()]
    if layout == "speculators":
        return [config_to_speculators(c, "bfloat16", "t", "C") for c in kinds if not any(c.causal) or any(c.sliding_window)]
    kinds += [dataclasses.replace(DRAFTER, **changes) for changes in OWN.values()]
    return [config_to_json(c, "bfloat16") for c in kinds]


def leaves(values, prefix=""):
    """Dotted names of a JSON object's fields; nested objects of the layouts are entered."""
    objects = {path for layout in LAYOUTS.values() for path in layout.objects}
    for name, value in values.items():
        yield from leaves(value, f"{prefix}{name}.") if f"{prefix}{name}" in objects else [f"{prefix}{name}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_table_is_what_is_read(layout, monkeypatch):
    read = set()

    class Watched(hf_drafter.Sections):
        def finish(self, ignored):
            for path, part in self.parts.items():
                read.update(f"{path}.{name}".lstrip(".") for name in part.read)
            super().finish(ignored)

    monkeypatch.setattr(hf_drafter, "Sections", Watched)
    some = examples(layout)
    by_count = changed(some[0], LAYOUTS[layout].body, layer_types=None, sliding_window=4, use_sliding_window=True)
    for values in some if layout == "assistant" else [*some, by_count]:
        config_from_json(values, "here", TARGET)
    homes = {home for field in FIELDS for home in field.homes(layout)}
    assert read == homes | set(LAYOUTS[layout].objects)


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_the_table_is_what_is_written(layout):
    written = {name for values in examples(layout) for name in leaves(values)}
    homes = {home for field in FIELDS for home in field.homes(layout, written=True)}
    optional = {
        "target_hidden_size",
        "dflash_config.input_embedding_scale",
        "transformer_layer_config.partial_rotary_factor",
    }  # of drafters that no example is
    assert homes - written <= optional
    known = {name.rpartition(".")[2] for name in written - homes}
    assert known <= {*hf_drafter._CONSTANTS, *hf_drafter._IGNORED, *ONLY_VALUES}, "a field that the table does not have"


# ---------------------------------------------------------------------------------------------------------------------
# Speculators


def test_speculators(tmp_path, target):
    loaded = load_drafter(write(tmp_path / "d", SPECULATORS), target)
    assert loaded.config == WANTED
    equal_params(loaded, random_drafter())


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}
READ = {
    "sliding layers are causal": (changed(SPECULATORS, **SLIDING), {"sliding_window": (4, None), "causal": (True, False)}),
    "or not": (
        changed(changed(SPECULATORS, **SLIDING), "", sliding_window_non_causal=True),
        {"sliding_window": (4, None), "causal": (False, False)},
    ),
    "yarn, old spelling": (
        changed(
            SPECULATORS,
            rope_parameters=None,
            rope_theta=100.0,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        {"rope": RopeConfig(100.0, "yarn", 4.0, 64)},
    ),
    "partial rotary": (
        changed(SPECULATORS, rope_parameters={"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}),
        {"rope": RopeConfig(5e4, partial_rotary_factor=0.5)},
    ),
    "our settings": (changed(SPECULATORS, "", dflash_jax={"dropout": 0.25, "num_target_layers": LAYERS}), {"dropout": 0.25}),
}


@pytest.mark.parametrize(("values", "wanted"), READ.values(), ids=READ)
def test_speculators_fields(values, wanted):
    assert config_from_json(values, "here", TARGET) == dataclasses.replace(WANTED, **wanted)


REFUSED = {
    "slot 0 drafts too": (changed(SPECULATORS, "", sample_from_anchor=True), "sample_from_anchor True is not supported"),
    "other algorithm": (changed(SPECULATORS, "speculators_config", algorithm="eagle3"), "algorithm 'eagle3' is not supported"),
    "other layers": (changed(SPECULATORS, model_type="llama"), "model_type 'llama' is not supported"),
    "unknown field": (changed(SPECULATORS, "", tree_width=2), "tree_width = 2"),
    "unknown field of the layers": (changed(SPECULATORS, residual_scale=2.0), "residual_scale = 2.0"),
    "no taps": (changed(SPECULATORS, "", aux_hidden_state_layer_ids=None), "lacks 'aux_hidden_state_layer_ids'"),
    "no width": (changed(SPECULATORS, hidden_size=None), r"lacks 'transformer_layer_config\.hidden_size'"),
    "last tap": (changed(SPECULATORS, "", aux_hidden_state_layer_ids=[2, 6]), "tap 5 is the target's last layer"),
    "causal full layers": (changed(SPECULATORS, is_causal=True), "is_causal is True, but by sliding_window_non_causal"),
    "small vocabulary": (changed(SPECULATORS, "", draft_vocab_size=8), "draft_vocab_size is 8, but the weights draft all tokens"),
    "other masks": (
        changed(SPECULATORS, mask_token_id=59),
        r"mask_token_id is 60 and transformer_layer_config\.mask_token_id is 59",
    ),
    "other projector": (changed(SPECULATORS, "", projector_type="dspark"), "projector_type 'dspark' is not supported"),
    "interleaved rotary": (changed(SPECULATORS, is_neox_style=False), "is_neox_style False is not supported"),
    "more than all dimensions": (changed(SPECULATORS, partial_rotary_factor=1.5), "partial_rotary_factor 1.5 rotates"),
    "assistant, last tap": (changed(ASSISTANT, "", target_layer_ids=[1, 5]), "tap 5 is the target's last layer"),
    "assistant, unknown field": (changed(ASSISTANT, "", norm_after=True), "norm_after = True"),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_is_refused(values, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_json(values, "here", TARGET)


def test_harmless_fields_of_other_writers():
    plain = config_from_json(SPECULATORS, "here", TARGET)
    more = changed(changed(SPECULATORS, "", max_anchors=256, projector_type="dflash"), is_neox_style=True)
    assert config_from_json(more, "here", TARGET) == plain


def test_tap_zero_of_speculators_is_the_embedding():
    with pytest.raises(ConfigError, match=r"\[-1, 3\] must lie in 0\.\.5"):
        config_from_json(changed(SPECULATORS, "", aux_hidden_state_layer_ids=[0, 4]), "here", TARGET)


def test_other_depth(tmp_path, target):
    values = changed(SPECULATORS, "", dflash_jax={"num_target_layers": 9})
    with pytest.raises(ConfigError, match="num_target_layers is 9, but the target has 6"):
        load_drafter(write(tmp_path / "d", values), target)


# ---------------------------------------------------------------------------------------------------------------------
# Embedding, head and draft vocabulary in the files


IDS = np.asarray([0, 3, 7, 60])
D2T = {"d2t": IDS - np.arange(4), "t2d": np.isin(np.arange(VOCAB), IDS)}
FEW = changed(SPECULATORS, "", draft_vocab_size=4)


def test_a_draft_vocabulary_without_dimensions(tmp_path, target):
    with pytest.raises(CheckpointError, match="d2t does not name ascending ids"):
        load_drafter(write(tmp_path / "d", FEW, d2t=np.asarray(3)), target)


def rows(seed, count=VOCAB):
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def test_copies_of_the_targets_tables_are_borrowed(tmp_path, target):
    copies = {"embed_tokens.weight": target.params["embed_tokens"][...], "lm_head.weight": target.params["lm_head"][...]}
    copies = {name: np.asarray(table) for name, table in copies.items()} | {"verifier_norm.weight": np.ones(HIDDEN, np.float32)}
    loaded = load_drafter(write(tmp_path / "d", SPECULATORS, **copies), target)
    assert loaded.config == WANTED
    equal_params(loaded, random_drafter())


@pytest.mark.parametrize("values", [SPECULATORS, config_to_json(DRAFTER, "float32")], ids=["speculators", "zlab"])
def test_other_tables_are_the_drafters_own(tmp_path, target, values):
    own = {"embed_tokens.weight": rows(1), "lm_head.weight": rows(2)}
    loaded = load_drafter(write(tmp_path / "d", values, **own), target)
    assert (loaded.config.own_embedding, loaded.config.own_head) == (True, True)
    np.testing.assert_array_equal(loaded.params["embed_tokens"][...], own["embed_tokens.weight"])
    np.testing.assert_array_equal(loaded.params["lm_head"][...], own["lm_head.weight"])


def test_an_own_embedding_with_a_scale(tmp_path, target):
    values = config_to_json(dataclasses.replace(DRAFTER, input_embedding_scale=2.0), "float32")
    with pytest.raises(
        CheckpointError, match="input_embedding_scale is for the target's embedding, but the weights have their own"
    ):
        load_drafter(write(tmp_path / "d", values, **{"embed_tokens.weight": rows(1)}), target)


def test_draft_vocabulary(tmp_path, target):
    """Its own rows of the head, the target's rows, and no head at all; the logits are those of the file's rows."""
    hidden = jnp.asarray(rows(3, 5))
    borrowed = np.asarray(target.params["lm_head"][...])[IDS]
    for name, head, own in (("own", rows(2, 4), True), ("copied", borrowed, False), ("none", None, False)):
        more = D2T if head is None else D2T | {"lm_head.weight": head}
        loaded = load_drafter(write(tmp_path / name, FEW, **more), target)
        assert (loaded.config.draft_token_ids, loaded.config.own_head) == (tuple(IDS), own)
        logits = loaded.unembed(hidden, loaded.head(loaded.params, target, target.params), target, target.params)
        wanted = np.asarray(hidden, np.float64) @ (borrowed if head is None else head).T.astype(np.float64)
        np.testing.assert_allclose(logits, wanted, atol=1e-5)
        np.testing.assert_array_equal(loaded.token_ids(jnp.arange(4)), IDS)


def test_a_vocabulary_of_all_tokens_is_none(tmp_path, target):
    everything = {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)}
    assert load_drafter(write(tmp_path / "d", SPECULATORS, **everything), target).config == WANTED


def test_draft_vocabulary_in_a_flat_config(tmp_path, target):
    values = config_to_json(DRAFTER, "float32") | {"draft_vocab_size": 4}
    assert load_drafter(write(tmp_path / "d", values, **D2T), target).config.draft_token_ids == tuple(IDS)
    values["dflash_config"]["dflash_jax"]["draft_token_ids"] = [0, 3, 7]
    with pytest.raises(CheckpointError, match="draft_token_ids is not what the tensor d2t says"):
        load_drafter(write(tmp_path / "d", values, **D2T), target)


BAD_VOCABULARIES = {
    "no d2t": (FEW, {"t2d": D2T["t2d"]}, "has the tensor t2d without d2t"),
    "no tables": (FEW, {}, "draft_vocab_size is 4, but the weights draft all tokens"),
    "other size": (changed(FEW, "", draft_vocab_size=5), D2T, "draft_vocab_size is 5, but the weights draft 4 tokens"),
    "unsorted": (FEW, {"d2t": np.asarray([3, 0, 0, 0])}, r"does not name ascending ids in 0\.\.60"),
    "outside": (FEW, {"d2t": np.asarray([0, 0, 0, 58])}, r"does not name ascending ids in 0\.\.60"),
    "marks for fewer tokens": (FEW, {"d2t": np.asarray([0, 2, 5]), "t2d": np.isin(np.arange(21), [0, 3, 7])}, "d2t and t2d name"),
    "two opinions": (FEW, D2T | {"t2d": np.isin(np.arange(VOCAB), [0, 3, 8, 60])}, "d2t and t2d name different tokens"),
    "no whole numbers": (FEW, {"d2t": np.zeros(4, np.float32)}, "d2t is stored as F32; only I64, I32 are read"),
    "rows of another size": (FEW, D2T | {"lm_head.weight": rows(1, 5)}, r"lm_head\.weight is \[5, 32\], not \[61, 32\]"),
}


@pytest.mark.parametrize(("values", "tensors", "message"), BAD_VOCABULARIES.values(), ids=BAD_VOCABULARIES)
def test_bad_draft_vocabulary(tmp_path, target, values, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        load_drafter(write(tmp_path / "d", values, **tensors), target)


# ---------------------------------------------------------------------------------------------------------------------
# The assistant's layout, prefixes, shards, relatives, the last tap


def test_assistant(tmp_path, target):
    """Its names, no depth and no vocabulary in its config, and a window that counts one more position."""
    folder = write(tmp_path / "d", ASSISTANT, rename=lambda name: "model." + ENCODER.get(name, name))
    loaded = load_drafter(folder, target)
    assert loaded.config == dataclasses.replace(WANTED, sliding_window=(4, None), causal=(False, False))
    equal_params(loaded, random_drafter())


def test_a_name_given_twice(tmp_path, target):
    folder = write(tmp_path / "d", ASSISTANT, **{"encoder.output_norm_enc.weight": np.ones(HIDDEN, np.float32)})
    with pytest.raises(CheckpointError, match=r"norm.* is there under another name too"):
        load_drafter(folder, target)


def test_shards(tmp_path, target):
    folder = write(tmp_path / "d", SPECULATORS)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    equal_params(load_drafter(folder, target), random_drafter())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 weight files"):
        load_drafter(folder, target)


@pytest.mark.parametrize("name", ["DFlashDraftModel", "DFlashForCausalLM", "Qwen3DFlashDraftModel"])
def test_class_names(name):
    assert config_from_json(config_to_json(DRAFTER, "float32") | {"architectures": [name]}, "here") == DRAFTER


@pytest.mark.parametrize("architectures", [None, 5, "DFlashDraftModel", []])
@pytest.mark.parametrize("values", [SPECULATORS, ASSISTANT])
def test_class_names_of_no_sense_do_not_matter_in_other_layouts(values, architectures):
    assert config_from_json(values | {"architectures": architectures}, "here", TARGET).block_size == 6


@pytest.mark.parametrize(("name", "kind"), [("layers.0.self_attn.g_proj.weight", "Laguna"), ("attention_sink_bias", "MiMo")])
def test_relatives_by_tensor(tmp_path, target, name, kind):
    with pytest.raises(CheckpointError, match=f"is a {kind} drafter"):
        load_drafter(write(tmp_path / "d", SPECULATORS, **{name: np.ones(HIDDEN, np.float32)}), target)


def test_our_own_drafter_may_tap_the_last_layer(tmp_path, target):
    """Other engines refuse its class; we read the tap as we trained on it, before the final norm."""
    drafter = random_drafter(target_layer_ids=(1, 3, 5))
    save_drafter(drafter, tmp_path / "d", dtype="float32")
    assert json.loads((tmp_path / "d" / "config.json").read_text())["architectures"] == ["DFlashJaxDraftModel"]
    assert load_drafter(tmp_path / "d", target).config == drafter.config


@pytest.mark.oracle
def test_assistant_against_transformers(tmp_path, target):
    """A folder that transformers' class writes drafts the same, windows shorter than the context included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the oracle's own
        import torch
        from transformers import AutoConfig, AutoModel
        from transformers.cache_utils import DFlashCache

        torch.manual_seed(0)
        values = {k: v for k, v in ASSISTANT.items() if k != "architectures"}
        model = AutoModel.from_config(AutoConfig.for_model(**values), attn_implementation="eager").eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
        model.save_pretrained(tmp_path / "d")
    drafter = load_drafter(tmp_path / "d", target)
    assert drafter.config.sliding_window == (4, None)
    context, taps, block = 11, rows(7, 11 * 3).reshape(1, 11, -1), rows(8, 6)[None]
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(context)
    with torch.no_grad():
        inputs = {"noise_embeds": torch.tensor(block), "context_hidden_states": torch.tensor(taps)}
        wanted = model(**inputs, cache=cache, use_cache=True).last_hidden_state.numpy()
    positions = jnp.arange(context + 6, dtype=jnp.int32)[None]
    ours = drafter.init_cache(1, context + 6)
    ours = drafter.extend_context(drafter.params, jnp.asarray(taps), positions[:, :context], ours)
    hidden = drafter.propose(drafter.params, jnp.asarray(block), positions[:, context:], ours)
    np.testing.assert_allclose(hidden, wanted, atol=2e-5, rtol=0)
