"""Dense targets: against transformers, against themselves in other shapes, and the folders that must be refused."""

import json
import warnings
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file
from test_gguf import hf_weights
from test_gguf import write as write_gguf
from tiny_folder import HEAD_DIM, LAYERS, tiny_config, tiny_tensors, write_folder

from dflash_jax.config import MeshConfig
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.hf import load_target
from dflash_jax.hf_config import FAMILIES
from dflash_jax.layers import rope_frequencies
from dflash_jax.model_config import RopeConfig, TargetConfig
from dflash_jax.sharding import make_mesh
from dflash_jax.targets import DenseTarget

pytestmark = pytest.mark.one_cell

LENGTH, LEFT, RIGHT, CAPACITY = 40, 7, 5, 48
ALL_TAPS = (0, 1, 2)


@partial(jax.jit, static_argnames=("target", "taps"))
def extend(target, params, tokens, positions, cache, taps):
    hidden, taps_BTM, cache = target.extend(params, tokens, positions, cache, taps)
    return (target.unembed(params, hidden), hidden, taps_BTM), cache


def forward(target, tokens, positions, chunks, taps=ALL_TAPS):
    """Logits, final hidden states and taps of a sequence that is extended chunk by chunk over one cache."""
    assert sum(chunks) == tokens.shape[1]
    cache, outputs = target.init_cache(tokens.shape[0], CAPACITY), []
    for piece in np.split(np.arange(tokens.shape[1]), np.cumsum(chunks)[:-1]):
        output, cache = extend(target, target.params, jnp.asarray(tokens[:, piece]), jnp.asarray(positions[:, piece]), cache, taps)
        outputs.append(output)
    logits, hidden, taps_BTM = (np.concatenate(parts, axis=1) for parts in zip(*outputs, strict=True))
    return SimpleNamespace(logits=logits, hidden=hidden, taps=taps_BTM)


def padded_rows(vocab):
    """Three rows: full, padded at the left, padded at the right; positions count real tokens, padding stands at -1."""
    tokens = np.random.default_rng(3).integers(0, vocab, (3, LENGTH)).astype(np.int32)
    mask = np.ones((3, LENGTH), np.int32)
    mask[1, :LEFT] = 0
    mask[2, -RIGHT:] = 0
    positions = np.where(mask == 1, np.cumsum(mask, axis=1) - 1, -1).astype(np.int32)
    return tokens, mask, positions


# ---------------------------------------------------------------------------------------------------------------------
# Against transformers

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,  # one wavelength below, one inside and two above the blended range
}
# A small theta, so that several pairs lie on the ramp.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
ORACLES = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}, "20KB"),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, None),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, None),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}, None),
    "llama_yarn_mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}}, None),
    "mistral": ("Mistral", {"sliding_window": None}, None),
    "mistral_window": ("Mistral", {"sliding_window": 9}, None),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 9, "layer_types": LAYER_TYPES}, None),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, None),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, None),
    "qwen3": ("Qwen3", {"head_dim": 24}, "20KB"),
    "qwen3_yarn": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN}, None),
    "phi3": ("Phi3", {"rope_parameters": HALF_ROTATED, "sliding_window": 9, "pad_token_id": 0}, "20KB"),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "attention_bias": True, "pad_token_id": 0}, None),
    "seed_oss": ("SeedOss", {"head_dim": 24}, None),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.4, "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 0.7},
        None,
    ),
    "gemma": ("Gemma", {"head_dim": 16}, None),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}, None),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": LAYER_TYPES, "rope_parameters": TWO_ROPES}, None),
}


def test_every_family_has_its_judge():
    """Each row of the table is compared with the transformers class of its architecture."""
    judged = {f"{name}ForCausalLM" for name, *_ in ORACLES.values()}
    assert {family.architecture for family in FAMILIES.values()} == judged


@pytest.fixture(params=ORACLES)
def oracle(request, tmp_path):
    """A random transformers model in a folder written by save_pretrained, and its outputs for the padded rows."""
    family, changes, shard_size = ORACLES[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the oracle's own
        import torch
        import transformers

        model_class = getattr(transformers, f"{family}ForCausalLM")
        config = model_class.config_class(
            **{
                "vocab_size": 61,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "eos_token_id": [2, 5],
            }
            | changes
        )
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation="eager").eval()
        neutral = (
            0.0 if family.startswith("Gemma") else 1.0
        )  # Gemma's norms multiply by 1 + weight; twice as much grows layer by layer
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too, or mistakes in them would not show
                noise = torch.randn(parameter.shape)
                parameter.copy_(noise * 32**-0.5 if parameter.ndim == 2 else 0.2 * noise + neutral)
            tokens, mask, positions = padded_rows(61)
            out = model(
                torch.tensor(tokens).long(),
                attention_mask=torch.tensor(mask),
                position_ids=torch.tensor(np.maximum(positions, 0)).long(),
                output_hidden_states=True,
            )
        model.save_pretrained(tmp_path, **({"max_shard_size": shard_size} if shard_size else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(shard_size)
    return SimpleNamespace(
        folder=tmp_path, logits=out.logits.numpy(), hidden=[h.numpy() for h in out.hidden_states], rows=(tokens, mask, positions)
    )


@pytest.mark.oracle
def test_matches_transformers(oracle):
    """Logits and every tap, cached in two chunks, for full, left-padded and right-padded rows."""
    target = load_target(oracle.folder, "float32")
    assert target.config.stop_token_ids == (2, 5)
    tokens, mask, positions = oracle.rows
    out = forward(target, tokens, positions, chunks=(20, 20))  # of one length: one compilation a model
    real = mask == 1
    np.testing.assert_allclose(out.logits[real], oracle.logits[real], atol=5e-5, rtol=0)
    assert np.std(oracle.logits[real]) > 0.5, "logits so flat that the comparison says little"
    taps = np.split(out.taps, len(ALL_TAPS), axis=-1)
    for i, tap in enumerate(taps[:-1]):
        np.testing.assert_allclose(tap[real], oracle.hidden[i + 1][real], atol=5e-5, rtol=0, err_msg=f"tap {i}")
    # transformers gives the last layer's output after the final norm only
    normed_last = nnx.merge(target.graphdef, target.params).norm(jnp.asarray(taps[-1]))
    np.testing.assert_allclose(np.asarray(normed_last)[real], oracle.hidden[-1][real], atol=5e-5, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Against itself

SMALL = TargetConfig("qwen3", 61, 32, 3, 4, 2, 16, 48, 1e-6, 64, qkv_bias=True, qk_norm=True, tie_embeddings=False)


@pytest.fixture(scope="module")
def small():
    return DenseTarget.random(jax.random.key(0), SMALL)


def test_cached_equals_full(small):
    tokens, mask, positions = padded_rows(61)
    full = forward(small, tokens, positions, chunks=(LENGTH,))
    cached = forward(small, tokens, positions, chunks=(13, 1, 13, 13))
    for name in ("logits", "taps"):
        got, want = (getattr(out, name)[mask == 1] for out in (cached, full))
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0, err_msg=name)


def test_padding_changes_nothing(small):
    """One prompt of six tokens with 0, 1 and 7 pads at its left, and the rest at its right."""
    prompt, pads = np.random.default_rng(4).integers(0, 61, 6), (0, 1, 7)
    tokens = np.full((3, 13), 9, np.int32)
    positions = np.full((3, 13), -1, np.int32)
    for row, left in enumerate(pads):
        tokens[row, left : left + 6] = prompt
        positions[row, left : left + 6] = np.arange(6)
    out = forward(small, tokens, positions, (13,))
    for row, left in enumerate(pads):
        np.testing.assert_allclose(out.logits[row, left : left + 6], out.logits[0, :6], atol=1e-6, rtol=0)
        np.testing.assert_allclose(out.taps[row, left : left + 6], out.taps[0, :6], atol=1e-6, rtol=0)


def test_rejected_tokens_leave_no_trace(small):
    """Extending again from an earlier position forgets what was written there."""
    right, wrong = np.random.default_rng(5).integers(0, 61, (2, 3, 26)).astype(np.int32)
    positions = np.tile(np.arange(26, dtype=np.int32), (3, 1))
    clean = forward(small, right, positions, (13, 13))
    # thirteen tokens, of which those from position 8 are rejected; then the right ones from there
    tokens = np.concatenate([right[:, :8], wrong[:, 8:13], right[:, 8:21]], axis=1)
    detour = forward(small, tokens, np.concatenate([positions[:, :13], positions[:, 8:21]], axis=1), (13, 13))
    np.testing.assert_allclose(detour.logits[:, 13:], clean.logits[:, 8:21], atol=1e-5, rtol=0)


def test_tap_out_of_range(small):
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ConfigError, match=r"taps \[1, 3\] must lie in 0\.\.2"):
        small.extend(small.params, tokens, tokens, small.init_cache(1, 2), (1, 3))


# ---------------------------------------------------------------------------------------------------------------------
# Folders


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_every_tensor_lands_in_its_place(tmp_path, model_type, shards):
    config = tiny_config(model_type)
    tensors = tiny_tensors(config)
    target = load_target(write_folder(tmp_path, config, tensors, shards), "float32")
    layer = target.params["layers"][3]
    np.testing.assert_array_equal(layer["self_attn"]["k_proj"]["kernel"][...], tensors["model.layers.3.self_attn.k_proj.weight"].T)
    np.testing.assert_array_equal(layer["mlp"]["down_proj"]["kernel"][...], tensors["model.layers.3.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(layer["input_layernorm"]["scale"][...], tensors["model.layers.3.input_layernorm.weight"])
    np.testing.assert_array_equal(target.params["lm_head"][...], tensors["lm_head.weight"])
    assert len(jax.tree.leaves(target.params)) == len(tensors)
    assert target.tokenizer is None


def test_bfloat16_is_rounded_once(tmp_path):
    target = load_target(write_folder(tmp_path))
    want = tiny_tensors(tiny_config())["model.norm.weight"].astype(jnp.bfloat16)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(target.params))
    np.testing.assert_array_equal(np.asarray(target.params["norm"]["scale"][...]), want)


def test_onto_a_mesh(tmp_path):
    """The same values, spread by the rules; what an axis does not divide (61 vocabulary rows) is whole on every device."""
    folder = write_folder(tmp_path)
    target = load_target(folder, "float32", mesh=make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    jax.tree.map(np.testing.assert_array_equal, target.params, load_target(folder, "float32").params)
    layer = target.params["layers"][0]
    assert layer["self_attn"]["q_proj"]["kernel"][...].sharding.spec == PartitionSpec("fsdp", "tensor")
    assert layer["mlp"]["down_proj"]["kernel"][...].addressable_shards[0].data.shape == (24, 16)
    assert target.params["embed_tokens"][...].sharding.spec == PartitionSpec(None, "fsdp")


def test_gguf_and_folder_give_the_same_target(tmp_path):
    """The same weights through both loaders: the GGUF file's query and key rows are permuted, and must come back."""
    weights = hf_weights(untied=True)
    from_gguf = load_target(write_gguf(tmp_path / "m.gguf", weights), "float32")
    sizes = {"vocab_size": 267, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    from_folder = load_target(write_folder(tmp_path / "m", tiny_config("llama", **sizes), weights), "float32")
    assert from_gguf.config == TargetConfig(**vars(from_folder.config) | {"pad_token_id": 0})
    jax.tree.map(np.testing.assert_array_equal, from_gguf.params, from_folder.params)
    assert from_gguf.tokenizer.decode(from_gguf.tokenizer.encode("hello")) == "hello"


def test_stop_and_pad_ids_come_from_every_file(tmp_path):
    config = tiny_config(eos_token_id=3, pad_token_id=-1)
    folder = write_folder(tmp_path, config, generation_config={"eos_token_id": [4, 3], "pad_token_id": 7})
    config = load_target(folder).config
    assert sorted(config.stop_token_ids) == [3, 4]
    assert config.pad_token_id == 7


def test_tied_head_may_be_repeated_but_not_differ(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    copy = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    target = load_target(write_folder(tmp_path, config, copy), "float32")
    assert "lm_head" not in target.params
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings, but lm_head\.weight is not the embedding"):
        load_target(write_folder(tmp_path, config, copy | {"lm_head.weight": copy["lm_head.weight"] + 1}))


ROPES = {
    "flat": ({}, RopeConfig(theta=10000.0)),
    "nested wins": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
    "nested without theta": ({"rope_parameters": {"rope_type": "default"}}, RopeConfig(theta=10000.0)),
    "old linear": ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(10000.0, "linear", 2.0)),
    "both, equal": (
        {
            "rope_scaling": {"type": "linear", "factor": 2},
            "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e4},
        },
        RopeConfig(10000.0, "linear", 2.0),
    ),
    "llama3": ({"rope_scaling": LLAMA3}, RopeConfig(10000.0, "llama3", 8.0, 128, 1.0, 4.0)),
    "yarn": ({"rope_parameters": YARN | {"attention_factor": 0.9}}, RopeConfig(100.0, "yarn", 4.0, 64, attention_factor=0.9)),
    "partial": ({"partial_rotary_factor": 0.25}, RopeConfig(10000.0, partial_rotary_factor=0.25)),
    "partial nested": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, RopeConfig(10000.0, partial_rotary_factor=0.5)),
}


@pytest.mark.parametrize(("changes", "rope"), ROPES.values(), ids=ROPES)
def test_rope_schemas(tmp_path, changes, rope):
    config = load_target(write_folder(tmp_path, tiny_config(**changes))).config
    assert config.rope == rope
    assert rope_frequencies(rope, HEAD_DIM).shape == (int(HEAD_DIM * rope.partial_rotary_factor) // 2,)


SUPPORTED = (
    "is not supported; supported are llama, mistral, ministral, qwen2, qwen3, phi3, smollm3, seed_oss, granite, gemma, gemma2, "
    "gemma3_text$"
)
REFUSED_CONFIGS = {
    "mixture of experts": ({"model_type": "qwen3_moe"}, f"model_type 'qwen3_moe' {SUPPORTED}"),
    "hybrid": ({"model_type": "qwen3_next"}, f"model_type 'qwen3_next' {SUPPORTED}"),
    "pictures too": ({"model_type": "gemma3"}, f"model_type 'gemma3' {SUPPORTED}"),
    "norms after": ({"model_type": "olmo2"}, f"model_type 'olmo2' {SUPPORTED}"),
    "other class": ({"architectures": ["Qwen3ForSequenceClassification"]}, "only Qwen3ForCausalLM"),
    "no theta": ({"rope_theta": None}, "lacks 'rope_theta'"),
    "no head size": ({"head_dim": None}, "lacks 'head_dim'"),
    "no norm epsilon": ({"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
    "negative epsilon": ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' is -1e-05, not a positive number"),
    "theta 0": ({"rope_theta": 0}, "'rope_theta' is 0.0, not a positive number"),
    "theta 1": ({"rope_theta": 1.0}, "'rope_theta' is 1.0, but it must exceed 1"),
    "theta infinite": ({"rope_theta": float("inf")}, "'rope_theta' is inf, not of type float"),
    "theta of 400 digits": ({"rope_theta": 10**400}, "'rope_theta' is 1000+, not of type float"),
    "rotary share NaN": ({"partial_rotary_factor": float("nan")}, "'partial_rotary_factor' is nan, not of type float"),
    "rotary share huge": ({"partial_rotary_factor": 1e29}, "dimensions a head"),
    "linear factor 0": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "'factor' is 0.0, not a positive number"),
    "yarn beta 0": ({"rope_scaling": YARN | {"beta_fast": 0}}, "'beta_fast' is 0.0, not a positive number"),
    "yarn length 0": ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "not a positive number"),
    "yarn mscale": ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": -9.0}}, "mscale and mscale_all_dim must not be"),
    "llama3 limits": ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor must be below high_freq_factor"),
    "layer types of no text": ({"layer_types": [{}]}, "a sliding window of None with layer_types"),
    "text for a number": ({"hidden_size": "32"}, "'hidden_size' is '32', not of type int"),
    "zero heads": ({"num_key_value_heads": 0}, "'num_key_value_heads' is 0, not a positive number"),
    "head groups": ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
    "rope field": ({"rope_scaling": {"rope_type": "default", "mrope_section": [4, 4]}}, "mrope_section"),
    "rope length": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks 'original_max_position_embeddings'"),
    "rope per layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    "rope twice": ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}}, "disagree"),
    "odd rotary share": ({"partial_rotary_factor": 0.2}, "rotates 3 of 16 dimensions a head"),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved True is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    "unknown field": ({"logit_scale": 0.5}, r"logit_scale = 0\.5"),
    "stop id text": ({"eos_token_id": "</s>"}, "not an id or a list of ids"),
    "stop id outside": ({"eos_token_id": 61}, r"stop token ids \[61\] are outside the 61 embedding rows"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED_CONFIGS.values(), ids=REFUSED_CONFIGS)
def test_config_is_refused(tmp_path, changes, message):
    folder = write_folder(tmp_path, tensors=tiny_tensors(tiny_config()))
    (folder / "config.json").write_text(json.dumps(tiny_config(**{"model_type": "qwen3"} | changes)))
    with pytest.raises(CheckpointError, match=message):
        load_target(folder)


def test_all_misfitting_tensors_are_named_at_once(tmp_path):
    tensors = tiny_tensors(tiny_config())
    del tensors["model.layers.2.self_attn.q_norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.copy()
    with pytest.raises(CheckpointError) as error:
        load_target(write_folder(tmp_path, tensors=tensors))
    for part in (
        "2 missing: lm_head.weight, model.layers.2.self_attn.q_norm.weight",
        "1 unknown: model.layers.0.self_attn.q_proj.bias",
        "1 of another shape: model.layers.1.mlp.up_proj.weight is [32, 48], not [48, 32]",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("kept", [0, 100, 0.5, -1])
def test_truncated_weights(tmp_path, kept):
    file = write_folder(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match="cut short"):
        load_target(tmp_path)


def test_missing_and_repeated_weight_files(tmp_path):
    folder = write_folder(tmp_path, shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 3 weight files \(model-00002-of-00003\.safetensors\)"):
        load_target(folder)
    shard.write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="is also in another weight file"):
        load_target(folder)
    shard.write_bytes(data)
    load_target(folder)


def test_other_tensor_types(tmp_path):
    tensors = tiny_tensors(tiny_config())
    save_file(tensors | {"model.norm.weight": np.zeros(32, np.int8)}, write_folder(tmp_path) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as I8"):
        load_target(tmp_path)
    save_file({name: value.astype(np.float16) for name, value in tensors.items()}, tmp_path / "model.safetensors")
    loaded = load_target(tmp_path, "float32").params["norm"]["scale"][...]
    np.testing.assert_array_equal(loaded, tensors["model.norm.weight"].astype(np.float16).astype(np.float32))


def test_paths_and_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(CheckpointError, match=r"some/model is no local folder \(check .* \(no network\): download the model"):
        load_target("some/model")
    with pytest.raises(CheckpointError, match="does not exist: give a Hugging Face folder"):
        load_target(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file"):
        load_target(__file__)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_target(tmp_path)
    with pytest.raises(ConfigError, match="dtype 'float16' is not supported"):
        load_target(write_folder(tmp_path), "float16")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"holds neither .* convert them to safetensors"):
        load_target(tmp_path)


def test_hub_id_loads_from_the_downloaded_folder(tmp_path, monkeypatch):
    write_folder(tmp_path)
    asked = {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_target("some/model").config.num_layers == LAYERS
    assert "*.safetensors" in asked["some/model"]
    assert not any(pattern.endswith(".bin") for pattern in asked["some/model"])
