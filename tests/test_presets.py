"""The presets of real targets with public drafters, without their weights: every name and shape, and every size of the drafter.

Expected names and shapes are written by rule from the public config.json files (tests/fixtures), not with our own name table.
"""

import json
import math
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from flax import nnx
from tiny_folder import tensor_shapes

from dflash_jax.cli import parse_config
from dflash_jax.errors import DFlashError
from dflash_jax.first_drafter import drafter_config
from dflash_jax.hf import load_drafter, load_target
from dflash_jax.hf_weights import Tensor, slots
from dflash_jax.targets.dense import abstract_decoder

pytestmark = pytest.mark.one_cell
ROOT = Path(__file__).parents[1]
FIXTURES = Path(__file__).parent / "fixtures"
# Parameters of target and drafter as published (the safetensors index; 1.07 GB and 1048.6 M in bfloat16).
PRESETS = {
    "qwen3_4b": (4_022_468_096, 537_427_200),
    "qwen3_8b": (8_190_735_360, 1_048_626_432),
    "llama31_8b": (8_030_261_248, 1_048_626_432),
}


def drafter_shapes(config):
    """z-lab's class: Qwen3 layers, one projection of all taps, two norms; no embedding and no head."""
    taps, width = len(config["dflash_config"]["target_layer_ids"]), config["hidden_size"]
    layers = tensor_shapes(config | {"tie_word_embeddings": True})
    inside = {name.removeprefix("model."): shape for name, shape in layers.items() if "embed_tokens" not in name}
    return inside | {"fc.weight": (width, taps * width), "hidden_norm.weight": (width,)}


def published_shapes(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return drafter_shapes(config) if "dflash_config" in config else tensor_shapes(config)


def never_read():
    raise AssertionError("a preset's check reads no weights")


def check_only(abstract, tensors, source, *args, **kwargs):
    """In place of `fill_state`: the file's tensors must be exactly those that our parameters ask for."""
    rename = kwargs.get("rename", args[2] if len(args) > 2 else str)
    wanted = {name: slot.shape for name, slot in slots(abstract, rename).items()}
    assert {tensor.name: tensor.shape for tensor in tensors} == wanted, f"{source} does not fit its config"
    return abstract


def file_tensors(folder):
    return [Tensor(name, shape, never_read) for name, shape in published_shapes(folder).items()]


@pytest.fixture(scope="module", autouse=True)
def _no_weights():
    """Both loaders read the fixtures, and no weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_jax.hf.model_folder", lambda path: FIXTURES / str(path).rpartition("/")[2])
        patch.setattr("dflash_jax.hf.fill_state", check_only)
        patch.setattr("dflash_jax.hf.safetensors_tensors", file_tensors)
        yield


cached_target = cache(load_target)


@cache
def cached_drafter(path, target):
    return load_drafter(path, target)


def size(params):
    return sum(math.prod(variable.get_value().shape) for _, variable in nnx.to_flat_state(params))


def check(name, *overrides):
    """Load what a preset names; the drafter that it would train must be the public one. Target, drafter and run."""
    config = parse_config(["--config", str(ROOT / "configs" / f"{name}.yaml"), *overrides])
    target = cached_target(config.target.path, config.target.dtype)
    public = cached_drafter(config.drafter.path, target)
    ours, theirs = (asdict(c) for c in (drafter_config(config, target.config), public.config))
    unknown = ("rms_norm_eps", "rope", "max_position") if name == "llama31_8b" else ()  # tests/fixtures/README.md
    different = [f"{k} is {ours[k]}, not {theirs[k]}" for k in ours if ours[k] != theirs[k] and k not in unknown]
    assert not different, f"the preset does not train the public drafter: {different}"
    return target, public, config


@pytest.mark.parametrize("name", PRESETS)
def test_names_shapes_and_sizes(name):
    target, drafter, config = check(name)
    assert (size(target.params), size(drafter.params)) == PRESETS[name]
    assert config.train.init == "random", "the published drafters did not start from the target's layers"
    assert (config.data.max_length, max(config.data.buckets), config.train.anchors_per_row) == (3072, 3072, 512)
    assert config.data.num_epochs == 6
    o = config.optim
    assert (o.learning_rate, o.final_learning_rate, o.warmup_ratio, o.clip_norm, o.weight_decay) == (6e-4, 0.0, 0.04, 1.0, 0.0)


PLANTED = {
    "tap past the end": ("qwen3_4b", "--drafter.target_layer_ids=[1,9,17,25,36]", r"must lie in 0\.\.35"),
    "other tap": ("qwen3_4b", "--drafter.target_layer_ids=[2,9,17,25,33]", "target_layer_ids is .2, 9"),
    "too few taps": ("qwen3_8b", "--drafter.target_layer_ids=[1,9,17,25]", "num_target_sampled_layers is 4, not 5"),
    "mask is the end": ("qwen3_8b", "--drafter.mask_token_id=151645", "151645 is a stop or pad token"),
    "mask outside": ("llama31_8b", "--drafter.mask_token_id=151669", "outside the 128256 embedding rows"),
    "another block": ("llama31_8b", "--drafter.block_size=16", "block_size is 16, not 10"),
    "the target's MLP": ("llama31_8b", "--drafter.mlp_dim=0", "mlp_dim is 14336, not 12288"),
    "fewer layers": ("qwen3_4b", "--drafter.num_draft_layers=4", "num_draft_layers is 4, not 5"),
    "other heads": ("qwen3_4b", "--drafter.head_dim=64", "head_dim is 64, not 128"),
    "drafter of another target": ("qwen3_4b", "--drafter.path=z-lab/Qwen3-8B-DFlash-b16", "target_hidden_dim is 4096"),
    "target of another drafter": ("qwen3_8b", "--target.path=meta-llama/Llama-3.1-8B-Instruct", "vocab_size is 151936"),
}


@pytest.mark.parametrize(("name", "fault", "message"), PLANTED.values(), ids=PLANTED)
def test_a_preset_that_does_not_fit_fails(name, fault, message):
    with pytest.raises((AssertionError, DFlashError), match=message):
        check(name, fault)


@pytest.mark.parametrize("fault", [{"num_kv_heads": 4}, {"qk_norm": False}, {"num_layers": 35}], ids=str)
def test_other_parameters_fail(fault, monkeypatch):
    """The comparison of names and shapes notices a wrong module."""
    monkeypatch.setattr("dflash_jax.hf.abstract_decoder", lambda config: abstract_decoder(replace(config, **fault)))
    with pytest.raises(AssertionError, match="does not fit its config"):
        load_target("Qwen/Qwen3-4B")
