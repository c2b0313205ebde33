"""A tiny Hugging Face folder, written from names and shapes as transformers writes them (not with our own name table)."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 61, 32, 6, 4, 2, 16, 48


def tiny_config(model_type="qwen3", **changes):
    """A config.json; `changes` replace fields, and None removes one."""
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config = {
        "architectures": [architecture.get(model_type, "OtherForCausalLM")],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    return {name: value for name, value in (config | changes).items() if value is not None}


def tensor_shapes(config):
    """The shape of every tensor under its checkpoint name, [out, in]."""
    width, heads, kv, dim = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj.weight": (heads * dim, width),
            "self_attn.k_proj.weight": (kv * dim, width),
            "self_attn.v_proj.weight": (kv * dim, width),
            "self_attn.o_proj.weight": (width, heads * dim),
            "mlp.gate_proj.weight": (config["intermediate_size"], width),
            "mlp.up_proj.weight": (config["intermediate_size"], width),
            "mlp.down_proj.weight": (width, config["intermediate_size"]),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
        if config["model_type"] == "qwen2":
            layer |= {f"self_attn.{p}_proj.bias": layer[f"self_attn.{p}_proj.weight"][:1] for p in "qkv"}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def tiny_tensors(config, seed=0):
    """Random float32 tensors under their checkpoint names."""
    random = np.random.default_rng(seed)
    scale = {1: lambda x: 1 + 0.1 * x, 2: lambda x: x * x.shape[1] ** -0.5}
    return {
        name: scale[len(shape)](random.standard_normal(shape)).astype(np.float32) for name, shape in tensor_shapes(config).items()
    }


def write_folder(folder, config=None, tensors=None, shards=0, **files):
    """Write config.json and the weights, split over `shards` files if asked; `files` are more JSON files by stem."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    config = tiny_config() if config is None else config
    tensors = tiny_tensors(config) if tensors is None else tensors
    for name, value in ({"config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    if not shards:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
