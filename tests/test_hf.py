"""Drafters in z-lab's layout: round trips, the two schemas, what must be refused. (Numbers: test_parity_zlab.)"""

import dataclasses
import errno
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_drafter import DRAFTER, OWN, SHARED, TARGET, equal_params, random_drafter
from tiny_folder import HIDDEN, LAYERS, VOCAB, write_folder
from tiny_models import random_params

from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.hf import load_drafter, load_target, save_drafter
from dflash_jax.targets import DenseTarget
from dflash_jax.targets.dense import abstract_decoder


@pytest.fixture(scope="module")
def target():
    return DenseTarget(TARGET, random_params(abstract_decoder(TARGET), 0))


# ---------------------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.one_cell
@pytest.mark.parametrize("changes", (SHARED | OWN).values(), ids=SHARED | OWN)
def test_round_trip(tmp_path, target, changes):
    """Config and parameters come back; in bfloat16 bit for bit."""
    drafter = random_drafter(**changes)
    rounded = Drafter(
        dataclasses.replace(drafter.config, dtype="bfloat16"),
        jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), drafter.params),
    )
    save_drafter(drafter, tmp_path / "d")
    loaded = load_drafter(tmp_path / "d", target, dtype="bfloat16")
    assert loaded.config == rounded.config
    equal_params(loaded, rounded)
    save_drafter(loaded, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    save_drafter(drafter, tmp_path / "d", dtype="float32")
    exact = load_drafter(tmp_path / "d", target)
    assert exact.config == drafter.config, "the operand dtype follows the target"
    equal_params(exact, drafter)


def test_layout(tmp_path):
    """Names, shapes and dtype of the files, and each field in every place where a reader looks."""
    save_drafter(random_drafter(), tmp_path / "d")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert len(tensors) == 11 * 2 + 3
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert tensors["layers.1.self_attn.k_proj.weight"].shape == (2 * 24, HIDDEN)
    assert tensors["layers.0.mlp.down_proj.weight"].shape == (HIDDEN, 40)
    assert {"hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} <= set(tensors)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 6
    assert config["dflash_config"]["mask_token_id"] == 60
    assert config["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    assert config["num_target_layers"] == LAYERS
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e4


@pytest.mark.parametrize("changes", [{"own_head": True}, {"learned_mask_embedding": True}])
def test_other_engines_refuse_what_they_would_misread(tmp_path, changes):
    save_drafter(random_drafter(**changes), tmp_path / "d")
    assert json.loads((tmp_path / "d" / "config.json").read_text())["architectures"] == ["DFlashJaxDraftModel"]


# ---------------------------------------------------------------------------------------------------------------------
# Reading other writers' files


@pytest.fixture
def folder(tmp_path):
    save_drafter(random_drafter(), tmp_path / "d")
    return tmp_path / "d"


def edit(folder, *, without=(), nested_without=(), nested=None, **changes):
    """Change config.json; dflash_config apart."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    inner = config.pop("dflash_config") | (nested or {})
    config |= changes
    inner = {k: v for k, v in inner.items() if k not in nested_without}
    config = {k: v for k, v in config.items() if k not in without}
    file.write_text(json.dumps(config | ({} if "dflash_config" in without else {"dflash_config": inner})))


def test_old_and_new_schema(folder, target):
    want = dataclasses.replace(DRAFTER, loss_decay_gamma=3.0)  # not stated: the paper's for this block size
    edit(folder, without=("rope_parameters", "target_hidden_size"), nested_without=("block_size", "dflash_jax"))
    assert load_drafter(folder, target).config == want
    edit(folder, without=("block_size", "rope_theta"), nested={"block_size": 6}, rope_parameters={"rope_theta": 5e4})
    assert load_drafter(folder, target).config == want
    flat = {"block_size": 6, "mask_token_id": 60, "target_layer_ids": [1, 3, 4]}
    edit(
        folder, without=("dflash_config", "architectures", "layer_types"), auto_map={"AutoModel": "dflash.DFlashDraftModel"}, **flat
    )
    assert load_drafter(folder, target).config == want


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_loss_decay_of_published_drafters(folder, target, block_size, gamma):
    edit(folder, nested_without=("dflash_jax",), nested={"block_size": block_size}, block_size=block_size)
    assert load_drafter(folder, target).config.loss_decay_gamma == gamma


SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ATTENTION = {
    "sliding layers are causal": (SLIDING, (4, None), (True, False)),
    "is_causal holds for all": (SLIDING | {"is_causal": False}, (4, None), (False, False)),
    "full and causal": ({"is_causal": True}, (None, None), (True, True)),
    "unused window": ({"sliding_window": 4, "use_sliding_window": False}, (None, None), (False, False)),
    "by layer count": (SLIDING | {"layer_types": None, "max_window_layers": 1}, (None, 4), (False, True)),
    "second statement": (SLIDING | {"nested": {"use_swa": True, "swa_window_size": 4}}, (4, None), (True, False)),
}


@pytest.mark.one_cell
@pytest.mark.parametrize(("changes", "windows", "causal"), ATTENTION.values(), ids=ATTENTION)
def test_attention_of_each_layer(folder, target, changes, windows, causal):
    edit(folder, **{"is_causal": None} | changes | {"nested": {"causal": None} | changes.get("nested", {})})
    config = load_drafter(folder, target).config
    assert (config.sliding_window, config.causal) == (windows, causal)


def test_prefixed_names(folder, target):
    want = load_drafter(folder, target)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    equal_params(load_drafter(folder, target), want)


def test_target_and_drafter_mixed_up(folder):
    with pytest.raises(ConfigError, match="target is 'smollm2-135m': give the model itself"):
        inspect.unwrap(load_drafter)(folder, target="smollm2-135m")
    with pytest.raises(CheckpointError, match="that of a drafter, not of a target: give it to load_drafter"):
        load_target(folder)


def test_a_mask_row_beside_the_weights_is_refused(folder, target):
    """vLLM and SGLang would put it over the target's row: without it, the drafter reads another mask."""
    (folder / "mask_embedding.pt").write_bytes(b"pickled")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt replaces the mask's embedding"):
        load_drafter(folder, target)


REFUSED = {
    "no depth": ({"without": ("num_target_layers",)}, "lacks 'num_target_layers'"),
    "no taps": ({"without": ("target_layer_ids",), "nested_without": ("target_layer_ids",)}, "lacks 'target_layer_ids'"),
    "no block size": ({"without": ("block_size",), "nested_without": ("block_size",)}, "lacks 'block_size'"),
    "two block sizes": ({"block_size": 8}, "block_size is 8 and dflash_config.block_size is 6: make them agree"),
    "no theta": ({"without": ("rope_theta", "rope_parameters")}, "lacks 'rope_theta'"),
    "no head size": ({"without": ("head_dim",)}, "lacks 'head_dim'"),
    "scaled logits": ({"output_multiplier": 0.5}, "output_multiplier 0.5 is not supported"),
    "capped logits": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    "reduced head": ({"draft_vocab_size": 32}, "draft_vocab_size is 32, but the weights draft all tokens"),
    "unknown field": ({"residual_scale": 2.0}, "residual_scale = 2.0"),
    "unknown nested field": ({"nested": {"denoising_steps": 2}}, "dflash_config has fields .* denoising_steps"),
    "slot 0 drafts too": ({"nested": {"sample_from_anchor": True}}, "sample_from_anchor True is not supported"),
    "unknown own field": ({"nested": {"dflash_jax": {"tree_width": 2}}}, "dflash_jax has fields .* tree_width"),
    "no window": (SLIDING | {"sliding_window": 0}, "'sliding_window' is 0, not a positive number"),
    "endless window": (SLIDING | {"sliding_window": 2**31}, "'sliding_window' is 2147483648, not a positive number below"),
    "endless context": ({"max_position_embeddings": 10**12}, "'max_position_embeddings' is 1000000000000, not a positive"),
    "window without size": ({"layer_types": ["sliding_attention"] * 2}, "has sliding layers: add sliding_window"),
    "layer types": ({"layer_types": ["full_attention"]}, "is not 2 of full_attention"),
    "architecture of no text": ({"architectures": [["x"]]}, "are no DFlash drafter"),
    "layer types of no text": ({"layer_types": [{}, {}]}, "is not 2 of full_attention"),
    "draft tokens of no number": ({"nested": {"dflash_jax": {"draft_token_ids": ["a"]}}}, "draft_token_ids must be whole numbers"),
    "two windows": (SLIDING | {"is_causal": None} | {"nested": {"use_swa": True, "swa_window_size": 8}}, "swa_window_size is 8"),
    "two causalities": ({"is_causal": True, "nested": {"causal": False}}, "is_causal is True and dflash_config.causal is False"),
    "DFlash 2 by field": ({"nested": {"selector_rank": 8}}, "is a DFlash 2 drafter"),
    "DFlash 2 by class": ({"architectures": ["DFlash2DraftModel"]}, "is a DFlash 2 drafter"),
    "DSpark by field": ({"markov_rank": 8}, "is a DSpark drafter"),
    "eagle3 by speculators": ({"speculators_model_type": "eagle3"}, "is a speculators drafter of type 'eagle3', not dflash"),
    "dspark by speculators": ({"speculators_model_type": "dspark"}, "is a DSpark drafter"),
    "last tap": (
        {"target_layer_ids": [1, 3, 5], "nested": {"target_layer_ids": [1, 3, 5]}},
        "tap 5 is the target's last layer: Hugging Face's hidden_states hold it after the final norm",
    ),
    "no drafter": ({"architectures": ["Qwen3ForCausalLM"]}, "are no DFlash drafter"),
    "other layers": ({"model_type": "llama"}, "model_type 'llama' is not supported"),
}


@pytest.mark.one_cell
@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_is_refused(folder, target, changes, message):
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder, target)


BAD_VALUES = {
    "other target width": ({"hidden_size": 16}, "target_hidden_dim is 16, but the target has 32"),
    "other vocabulary": ({"vocab_size": 64}, "vocab_size is 64, but the target has 61"),
    "other depth": ({"num_target_layers": 7}, "num_target_layers is 7, but the target has 6"),
    "no mask": ({"without": ("mask_token_id",), "nested_without": ("mask_token_id",)}, "mask_token_id is missing"),
    "scaled embedding": ({"nested": {"input_embedding_scale": 5.0}}, r"multiplies embeddings by 5\.0 .* but the target by 1\.0"),
    "mask outside": (
        {"mask_token_id": VOCAB, "nested": {"mask_token_id": VOCAB}},
        "mask_token_id 61 is outside the 61 embedding rows",
    ),
    "mask is a stop token": ({"mask_token_id": 2, "nested": {"mask_token_id": 2}}, "mask_token_id 2 is a stop or pad token"),
    "mask is the pad token": ({"mask_token_id": 0, "nested": {"mask_token_id": 0}}, "mask_token_id 0 is a stop or pad token"),
    "block beyond the context": ({"nested": {"block_size": 512}, "block_size": 512}, "block_size is 512: it must not exceed"),
    "tap outside": (
        {"target_layer_ids": [1, 3, 6], "nested": {"target_layer_ids": [1, 3, 6]}},
        r"target_layer_ids \[1, 3, 6\] must lie in 0\.\.5",
    ),
    "tap twice": ({"target_layer_ids": [1, 3, 3], "nested": {"target_layer_ids": [1, 3, 3]}}, "name a layer twice"),
}


@pytest.mark.one_cell
@pytest.mark.parametrize(("changes", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_value(folder, target, changes, message):
    edit(folder, **changes)
    with pytest.raises(ConfigError, match=message) as error:
        load_drafter(folder, target)
    assert "config.json" in str(error.value)


def test_tensors_are_refused(folder, target):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    shape = tensors["norm.weight"].shape
    for extra, kind in (("layers.0.attention_conv.base_kernel", "DFlash 2"), ("markov.w1.weight", "DSpark")):
        save_file(tensors | {extra: np.zeros(shape, np.float32)}, file)
        with pytest.raises(CheckpointError, match=f"is a {kind} drafter"):
            load_drafter(folder, target)
    wrong = {name: tensor for name, tensor in tensors.items() if name != "hidden_norm.weight"}
    save_file(wrong | {"layers.2.norm.weight": np.zeros(shape, np.float32), "fc.weight": np.zeros(shape, np.float32)}, file)
    with pytest.raises(CheckpointError) as error:
        load_drafter(folder, target)
    for part in ("1 missing: hidden_norm.weight", "1 unknown: layers.2.norm.weight", "1 of another shape: fc.weight is [32]"):
        assert part in str(error.value)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        load_drafter(folder, target)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"sliding_window": (4, 8)}, "one size for all sliding layers"), ({"causal": (True, False)}, "z-lab's layout has one value")],
)
def test_inexpressible_layers(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        save_drafter(random_drafter(**changes), tmp_path / "d")
    assert not list(tmp_path.iterdir())


def test_parameters_of_another_config(tmp_path):
    small, deep = random_drafter(), random_drafter(num_draft_layers=3, sliding_window=(), causal=())
    with pytest.raises(CheckpointError, match="are not those of its config"):
        save_drafter(Drafter(small.config, deep.params), tmp_path / "d")
    with pytest.raises(
        CheckpointError, match=r"parameter layers\.0\.mlp\.\w+_proj\.weight is \[.*\], not \[.*48.*\] as its config says"
    ):
        save_drafter(Drafter(dataclasses.replace(small.config, mlp_dim=48), small.params), tmp_path / "d")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", ["save_file", "rename"])
def test_failed_save_leaves_the_earlier_drafter(folder, target, monkeypatch, broken):
    want = load_drafter(folder, target)

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if broken == "save_file":
        monkeypatch.setattr("dflash_jax.hf.save_file", fail)
    else:
        rename = type(folder).rename
        monkeypatch.setattr(type(folder), "rename", lambda self, to: fail() if self.name == "new" else rename(self, to))
    with pytest.raises(CheckpointError, match="could not be written .*No space left"):
        save_drafter(random_drafter(block_size=4), folder)
    equal_params(load_drafter(folder, target), want)
    assert [path.name for path in folder.parent.iterdir()] == ["d"], "litter beside the folder"


def test_saving_again_keeps_other_files(folder, target):
    (folder / "README.md").write_text("mine")
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("too")
    save_drafter(random_drafter(block_size=4), folder)
    assert load_drafter(folder, target).config.block_size == 4
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "notes" / "a.txt").read_text() == "too"
    assert [path.name for path in folder.parent.iterdir()] == ["d"]
    assert len({(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}) == 1  # who reads one reads both


def test_saving_over_shards(folder, target):
    """An index that names an earlier drafter's shards would win over the new weights in other loaders."""
    (folder / "model-00001-of-00001.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"fc.weight": "model-00001-of-00001.safetensors"}})
    )
    save_drafter(random_drafter(block_size=4), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_links_stay_links(folder, target, tmp_path):
    (folder / "nowhere").symlink_to("absent")
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    save_drafter(random_drafter(block_size=4), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (folder / "nowhere").is_symlink()
    assert load_drafter(folder, target).config.block_size == 4


def test_ctrl_c_between_the_renames(folder, target, monkeypatch):
    want, rename = load_drafter(folder, target), type(folder).rename

    def interrupted(self, to):
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(type(folder), "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_drafter(random_drafter(block_size=4), folder)
    equal_params(load_drafter(folder, target), want)


@pytest.mark.one_cell
@pytest.mark.parametrize("architectures", [5, [["a"]], None])
def test_an_odd_config_is_not_a_drafters(tmp_path, architectures):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text(json.dumps({"architectures": architectures}))
    with pytest.raises(CheckpointError, match="holds something else than a drafter"):
        save_drafter(random_drafter(), tmp_path / "d")


def test_never_replaces_anything_else(tmp_path):
    write_folder(tmp_path / "target")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").touch()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name in ("target", "home", "file"):
        with pytest.raises(CheckpointError, match="holds something else than a drafter"):
            save_drafter(random_drafter(), tmp_path / name)
    with pytest.raises(CheckpointError, match="could not be written"):
        save_drafter(random_drafter(), tmp_path / "file" / "below")
    assert sorted(tmp_path.rglob("*")) == before
    save_drafter(random_drafter(), tmp_path / "empty")
    save_drafter(random_drafter(), tmp_path / "new" / "deep")
