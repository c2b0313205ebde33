"""What sets the dense families apart: reading their files, and the parts of a layer that only some have.

The numbers are compared with transformers in test_targets.py.
"""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_folder import LAYERS, tiny_config, tiny_tensors, write_folder
from tiny_models import BLOCK, CONTEXT, VOCAB, dense_drafter, dense_target, random_prompt

from dflash_jax.errors import CheckpointError
from dflash_jax.generate import generate
from dflash_jax.hf import load_drafter, load_target, save_drafter
from dflash_jax.hf_config import FAMILIES, target_config
from dflash_jax.layers import softcap
from dflash_jax.model_config import RopeConfig

pytestmark = pytest.mark.one_cell

S, F = "sliding_attention", "full_attention"


def read(folder, model_type, **changes):
    """The `TargetConfig` of a tiny config.json; `changes` replace fields, None writes null, ... removes one."""
    base = tiny_config(architectures=[FAMILIES[model_type].architecture], model_type=model_type) | changes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in base.items() if value is not ...}))
    return target_config(folder, "float32")


# Fields as published checkpoints have them, in the older schema too.
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": ...}
GEMMA2 = GEMMA | {"query_pre_attn_scalar": 16, "sliding_window": 8, "cache_implementation": "hybrid"}
GEMMA3 = GEMMA2 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GRANITE = {"attention_multiplier": 0.015625, "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 8.0}
PHI3 = {
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attention_bias": False,
    "original_max_position_embeddings": 4096,
}
SEED = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.1}
QWEN = {"use_sliding_window": True, "sliding_window": 8}
NO_WINDOWS = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2}
READ = {
    "mistral v0.1": ("mistral", {"sliding_window": 8}, {"sliding_window": (8,) * LAYERS}),
    "mistral v0.3": ("mistral", {"sliding_window": None}, {"sliding_window": ()}),
    "mistral by layer": ("mistral", {"sliding_window": 8, "layer_types": [S] * LAYERS}, {"sliding_window": (8,) * LAYERS}),
    "ministral": ("ministral", {"sliding_window": 8, "layer_types": [F, S] * 3}, {"sliding_window": (None, 8) * 3}),
    "ministral, no list": ("ministral", {"sliding_window": 8}, {"sliding_window": (8,) * LAYERS}),
    "llama, a window unused": ("llama", {"use_sliding_window": False, "sliding_window": 8}, {"sliding_window": ()}),
    "qwen2, a window unused": ("qwen2", NO_WINDOWS, {"sliding_window": (), "qkv_bias": True}),
    "qwen2, not said": ("qwen2", {"sliding_window": 8, "max_window_layers": 2}, {"sliding_window": ()}),
    "qwen2, upper layers": ("qwen2", QWEN | {"max_window_layers": 4}, {"sliding_window": (None,) * 4 + (8,) * 2}),
    "qwen3 by layer": ("qwen3", QWEN | {"layer_types": [S, F] * 3}, {"sliding_window": (8, None) * 3}),
    "qwen3, whole layers": ("qwen3", QWEN | {"layer_types": [F] * LAYERS}, {"sliding_window": ()}),
    "phi-3 mini": ("phi3", PHI3 | {"sliding_window": 8}, {"sliding_window": (8,) * LAYERS, "num_kv_heads": 2}),
    "phi-4": ("phi3", PHI3 | {"sliding_window": None, "num_key_value_heads": ...}, {"sliding_window": (), "num_kv_heads": 4}),
    "smollm3": (
        "smollm3",
        NO_WINDOWS | {"no_rope_layer_interval": 4, "tie_word_embeddings": ...},
        {"layers_without_rope": (3,), "tie_embeddings": True, "sliding_window": ()},
    ),
    "smollm3, listed": ("smollm3", {"no_rope_layers": [0, 1, 1, 1, 1, 0]}, {"layers_without_rope": (0, 5)}),
    "seed": ("seed_oss", SEED, {"qkv_bias": True, "o_bias": False}),
    "granite": (
        "granite",
        GRANITE,
        {"attention_scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.125},
    ),
    "gemma, older word": (
        "gemma",
        GEMMA | {"hidden_act": "gelu", "hidden_activation": None},
        {"activation": "gelu_tanh", "norm_offset": 1.0, "embedding_scale": 32**0.5, "tie_embeddings": True},
    ),
    "gemma2": (
        "gemma2",
        GEMMA2 | SOFTCAPS,
        {
            "sliding_window": (8, None) * 3,
            "sandwich_norms": True,
            "attention_scale": 0.25,
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
            "local_rope": None,
        },
    ),
    "gemma3, older schema": (
        "gemma3_text",
        GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "sliding_window": (8,) * 5 + (None,),
            "rope": RopeConfig(1e6, "linear", 8.0),
            "local_rope": RopeConfig(1e4),
            "qk_norm": True,
            "logit_softcap": None,
        },
    ),
    "gemma3, newer schema": (
        "gemma3_text",
        GEMMA2
        | {"rope_theta": ..., "_sliding_window_pattern": 6, "use_bidirectional_attention": False, "layer_types": [S, F] * 3}
        | {"rope_parameters": {F: {"rope_type": "default", "rope_theta": 1e6}, S: {"rope_type": "default", "rope_theta": 1e4}}},
        {"sliding_window": (8, None) * 3, "rope": RopeConfig(1e6), "local_rope": RopeConfig(1e4)},
    ),
}


@pytest.mark.parametrize(("model_type", "changes", "wanted"), READ.values(), ids=READ)
def test_published_fields(tmp_path, model_type, changes, wanted):
    config = read(tmp_path, model_type, **changes)
    assert {name: getattr(config, name) for name in wanted} == wanted


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED = {
    "mistral says nothing": ("mistral", {}, r"lacks 'sliding_window': add it \(null: no window\)"),
    "mistral with whole layers": ("mistral", {"sliding_window": 8, "layer_types": [S, F] * 3}, "is not what mistral computes"),
    "llama with a window": ("llama", {"sliding_window": 8}, "a sliding window of 8 .* is not what llama computes"),
    "llama with chunks": ("llama", {"layer_types": ["chunked_attention"] * LAYERS}, "chunked_attention.* is not what llama"),
    "window of none": ("qwen3", {"layer_types": [F, S] * 3}, "a sliding window of None with layer_types"),
    "window of zero": ("qwen3", QWEN | {"sliding_window": 0, "layer_types": [F, S] * 3}, "a sliding window of 0"),
    "too few layers": ("qwen3", QWEN | {"layer_types": [F, S]}, "in 2 layers is not what qwen3 computes"),
    "linear layers": ("qwen3", QWEN | {"layer_types": [F, "linear_attention"] * 3}, "linear_attention.* is not what qwen3"),
    "which layers": ("qwen2", QWEN, "lacks 'max_window_layers'"),
    "longrope": ("phi3", PHI3 | {"sliding_window": None, "rope_scaling": LONGROPE}, "rope type 'longrope' is not supported"),
    "phi3 biases": ("phi3", PHI3 | {"sliding_window": None, "attention_bias": True}, "attention_bias True is not supported"),
    "smollm3 windows": ("smollm3", QWEN | {"layer_types": [F, S] * 3}, "is not what smollm3 computes"),
    "smollm3 positions": ("smollm3", {"no_rope_layers": [1, 1]}, r"no_rope_layers \[1, 1\] is not 6 of 0 and 1"),
    "smollm3 words": ("smollm3", {"no_rope_layers": ["a"] * 6}, "is not 6 of 0 and 1"),
    "seed biases": ("seed_oss", {}, "lacks 'attention_bias'"),
    "granite scale": ("granite", GRANITE | {"logits_scaling": 0}, r"'logits_scaling' is 0\.0, not a positive number"),
    "gemma activation": ("gemma", GEMMA | {"hidden_act": "silu"}, "only 'gelu_pytorch_tanh', 'gelu'"),
    "gemma exact gelu": ("gemma", GEMMA | {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
    "gemma encoder": ("gemma2", GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    "gemma2 scale": ("gemma2", GEMMA2 | {"query_pre_attn_scalar": ...}, "lacks 'query_pre_attn_scalar'"),
    "gemma3 pattern": ("gemma3_text", GEMMA3 | {"sliding_window_pattern": 4}, "sliding_window_pattern 4 is not supported"),
    "gemma3 softcap": ("gemma3_text", GEMMA3 | SOFTCAPS, r"attn_logit_softcapping 50\.0 is not supported"),
    "gemma3 local theta of a half": ("gemma3_text", GEMMA3 | {"rope_local_base_freq": 0.5}, "must exceed 1"),
    "gemma3 local theta": ("gemma3_text", GEMMA3 | {"rope_local_base_freq": ...}, "lacks 'rope_local_base_freq'"),
    "gemma3 one rope": ("gemma3_text", GEMMA3 | {"rope_parameters": {S: {"rope_theta": 1e4}}}, "lacks 'full_attention'"),
    "another's field": ("llama", {"residual_multiplier": 0.22}, r"residual_multiplier = 0\.22"),
}


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_we_would_compute_otherwise_is_refused(tmp_path, model_type, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, model_type, **changes)


def test_pattern_beside_layer_types_is_no_contradiction(tmp_path):
    """A list of layers says more than a pattern, and published files have both."""
    config = read(tmp_path, "gemma3_text", **GEMMA3, layer_types=[S] * 5 + [F])
    assert config.sliding_window == (8,) * 5 + (None,)


# ---------------------------------------------------------------------------------------------------------------------
# Phi-3's fused projections


def fused(tensors):
    """As Phi-3's files have them: rows of q, k and v after one another, and of gate and up."""
    out = dict(tensors)
    for i in range(LAYERS):
        for name, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            module = name.split(".")[0]
            rows = [out.pop(f"model.layers.{i}.{module}.{part}_proj.weight") for part in parts]
            out[f"model.layers.{i}.{name}.weight"] = np.concatenate(rows)
    return out


PHI3_CONFIG = tiny_config(model_type="phi3", architectures=["Phi3ForCausalLM"]) | {"sliding_window": None}


def test_fused_projections_are_split(tmp_path):
    """The same parameters as a llama of the same tensors, unfused."""
    tensors = tiny_tensors(tiny_config("llama"))
    plain = load_target(write_folder(tmp_path / "plain", tiny_config("llama"), tensors), "float32")
    phi3 = load_target(write_folder(tmp_path / "phi3", PHI3_CONFIG, fused(tensors), shards=2), "float32")
    for i in (0, LAYERS - 1):
        for module, parts in (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj"))):
            for part in parts:
                ours, wanted = (target.params["layers"][i][module][part]["kernel"][...] for target in (phi3, plain))
                np.testing.assert_array_equal(ours, wanted)
    assert replace(phi3.config, model_type="llama") == plain.config


def test_a_projection_fused_and_by_itself(tmp_path):
    tensors = fused(tiny_tensors(tiny_config("llama")))
    q = "model.layers.1.self_attn.q_proj.weight"
    folder = write_folder(tmp_path, PHI3_CONFIG, tensors | {q: tiny_tensors(tiny_config("llama"))[q]})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight by itself and as part of a fused tensor"):
        load_target(folder, "float32")


@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_fused_projection_of_other_size(tmp_path, name):
    tensors = fused(tiny_tensors(tiny_config("llama")))
    key = f"model.layers.2.{name}.weight"
    folder = write_folder(tmp_path, PHI3_CONFIG, tensors | {key: tensors[key][:-1]})
    part = "v_proj is \\[31, 32\\], not \\[32, 32\\]" if "qkv" in name else "up_proj is \\[47, 32\\], not \\[48, 32\\]"
    with pytest.raises(CheckpointError, match=part.replace("_proj is", r"_proj\.weight is")):
        load_target(folder)


def test_only_phi3_may_be_fused(tmp_path):
    """In another family's file the order of the rows is unknown."""
    folder = write_folder(tmp_path, tiny_config("llama"), fused(tiny_tensors(tiny_config("llama"))))
    with pytest.raises(CheckpointError, match=r"unknown: model\.layers\.\d\.\w+\.(gate_up|qkv)_proj\.weight"):
        load_target(folder)


# ---------------------------------------------------------------------------------------------------------------------
# A target with every special part at once

EVERYTHING = {
    "model_type": "gemma2",
    "num_layers": 3,
    "activation": "gelu_tanh",
    "sliding_window": (5, None, 7),
    "local_rope": RopeConfig(100.0),
    "layers_without_rope": (1,),
    "norm_offset": 1.0,
    "sandwich_norms": True,
    "attention_scale": 0.5,
    "attention_softcap": 4.0,
    "embedding_scale": 4.0,
    "residual_scale": 0.6,
    "logit_scale": 2.0,
    "logit_softcap": 6.0,
}


def test_speculation_changes_nothing():
    """Drafted decoding, plain decoding and the embeddings and head that a drafter borrows, on layers with windows and caps."""
    target = dense_target(**EVERYTHING)
    drafter = dense_drafter(num_target_layers=3, input_embedding_scale=4.0)
    prompts = [random_prompt(8, length) for length in (3, 11)]
    plain = generate(target, None, prompts, 3 * BLOCK, stop_token_ids=())
    drafted = generate(target, drafter, prompts, 3 * BLOCK, stop_token_ids=())
    assert drafted.tokens == plain.tokens
    assert len({token for row in plain.tokens for token in row}) > 6, "an answer so dull that the comparison says little"
    assert max(map(len, prompts)) + 3 * BLOCK <= CONTEXT


def test_embeddings_and_logits_are_scaled_and_bounded():
    target, plain = dense_target(**EVERYTHING), dense_target(num_layers=3)
    tokens = jnp.arange(VOCAB, dtype=jnp.int32)
    np.testing.assert_allclose(target.embed(target.params, tokens), 4.0 * plain.embed(target.params, tokens), rtol=1e-6)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((5, 16)), jnp.float32)
    raw = np.asarray(plain.unembed(target.params, hidden), np.float64)
    np.testing.assert_allclose(target.unembed(target.params, hidden), 6 * np.tanh(2 * raw / 6), rtol=1e-4, atol=1e-5)
    assert softcap(hidden, None) is hidden


def test_drafter_of_a_scaled_target_says_so(tmp_path):
    """z-lab's decoder takes raw embedding rows and multiplies them by this field."""
    target = dense_target(**EVERYTHING)
    drafter = dense_drafter(num_target_layers=3, input_embedding_scale=4.0)
    save_drafter(drafter, tmp_path / "d", "float32")
    assert json.loads((tmp_path / "d" / "config.json").read_text())["dflash_config"]["input_embedding_scale"] == 4.0
    assert load_drafter(tmp_path / "d", target).config == drafter.config
