"""Export: round trips bit for bit, what is refused, the README, the command, and speculators' own package as the judge."""

import dataclasses
import errno
import json
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_drafter import SHARED, equal_params, random_drafter
from tiny_folder import tiny_config, tiny_tensors, write_folder

from dflash_jax.__main__ import main
from dflash_jax.cli import run
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.export import export_drafter, notes, readme
from dflash_jax.hf import load_drafter, load_target, save_drafter
from dflash_jax.model_config import RopeConfig
from dflash_jax.targets import DenseTarget

pytestmark = pytest.mark.one_cell

SPEC_KINDS = {name: changes for name, changes in SHARED.items() if name != "full, causal"}
FEW = {"draft_token_ids": (0, 3, 7, 59)}
FEW_KINDS = {"few tokens": FEW, "few tokens, own head": FEW | {"own_head": True}}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A target whose numbers bfloat16 holds exactly, so that its rows in an exported file are its own."""
    config = tiny_config(eos_token_id=[2], pad_token_id=0)
    exact = {name: x.astype(jnp.bfloat16).astype(np.float32) for name, x in tiny_tensors(config).items()}
    return write_folder(tmp_path_factory.mktemp("targets") / "tiny", config, exact)


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(target_folder, "float32")


def files(folder):
    return {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}


def export(drafter, target, to, folder):
    export_drafter(drafter, target, to, folder, "some/target")
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.parametrize("changes", SHARED.values(), ids=SHARED)
def test_zlab_bit_for_bit(tmp_path, target, changes):
    first = export(random_drafter(**changes), target, "zlab", tmp_path / "a-DFlash")
    again = export(load_drafter(first, target), target, "zlab", tmp_path / "b-DFlash")
    assert files(first) == files(again)


@pytest.mark.parametrize("changes", (SPEC_KINDS | FEW_KINDS).values(), ids=SPEC_KINDS | FEW_KINDS)
def test_speculators_bit_for_bit(tmp_path, target, changes):
    drafter = random_drafter(**changes)
    first = export(drafter, target, "speculators", tmp_path / "a")
    loaded = load_drafter(first, target)
    assert loaded.config == drafter.config
    assert files(first) == files(export(loaded, target, "speculators", tmp_path / "b"))


@pytest.mark.parametrize("changes", SPEC_KINDS.values(), ids=SPEC_KINDS)
def test_zlab_by_way_of_speculators(tmp_path, target, changes):
    first = export(random_drafter(**changes, dropout=0.1), target, "zlab", tmp_path / "a-DFlash")
    middle = export(load_drafter(first, target), target, "speculators", tmp_path / "s")
    assert files(first) == files(export(load_drafter(middle, target), target, "zlab", tmp_path / "b-DFlash"))


def test_what_is_written(tmp_path, target):
    """Each value in both homes, rotary positions for old and new readers, `is_causal` where it is uniform."""
    rope = RopeConfig(100.0, "yarn", 4.0, 64)
    config = json.loads((export(random_drafter(rope=rope), target, "zlab", tmp_path / "DFlash") / "config.json").read_text())
    for name, value in (("block_size", 6), ("mask_token_id", 60), ("target_layer_ids", [1, 3, 4])):
        assert config[name] == config["dflash_config"][name] == value
    assert config["is_causal"] is config["dflash_config"]["causal"] is False
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100.0
    assert config["rope_scaling"]["type"] == config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "yarn"
    mixed = export(random_drafter(**SHARED["sliding, causal"]), target, "zlab", tmp_path / "DFlash")
    assert "is_causal" not in json.loads((mixed / "config.json").read_text())
    made = export(random_drafter(**FEW), target, "speculators", tmp_path / "s")
    config = json.loads((made / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["draft_vocab_size"] == 4
    assert config["speculators_config"]["verifier"] == {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    tensors = load_file(made / "model.safetensors")
    head = np.asarray(target.params["lm_head"][...].astype(jnp.bfloat16))
    np.testing.assert_array_equal(tensors["lm_head.weight"], head[[0, 3, 7, 59]])
    np.testing.assert_array_equal(tensors["d2t"], [0, 2, 5, 56])
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), [0, 3, 7, 59])
    assert {str(t.dtype) for name, t in tensors.items() if name not in ("d2t", "t2d")} == {"bfloat16"}


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


OWN = {"own_embedding": True, "own_head": True}
REFUSED = {
    "own embedding": ("zlab", OWN, "without own_embedding, which they replace by the target's; own_head"),
    "learned mask": ("zlab", {"learned_mask_embedding": True, "mask_token_id": None}, "without learned_mask_embedding"),
    "draft tokens": ("zlab", FEW, "draft_token_ids, because they draft from all tokens.*--to speculators, or give --all_tokens"),
    "last tap": ("zlab", {"target_layer_ids": (1, 5)}, "tap 5, which is the target's last layer: Hugging Face's hidden_states"),
    "two causalities": ("zlab", {"causal": (True, False)}, "z-lab's layout has one value"),
    "two windows": ("zlab", {"sliding_window": (4, 8)}, "one size for all sliding layers"),
    "own embedding for speculators": ("speculators", OWN, "without own_embedding"),
    "own head of all tokens": ("speculators", {"own_head": True}, "without own_head"),
    "own embedding and few tokens": ("speculators", FEW | OWN, "without own_embedding"),
    "learned mask for speculators": (
        "speculators", {"learned_mask_embedding": True, "mask_token_id": None}, "without learned_mask_embedding",
    ),
    "last tap for speculators": ("speculators", {"target_layer_ids": (1, 5)}, "tap 5, which is the target's last layer"),
    "causal full layers": ("speculators", {"causal": (True, True)}, "speculators' layout has bidirectional full layers"),
    "unlike sliding layers": (
        "speculators", {"sliding_window": (4, 4), "causal": (True, False)}, "one value for sliding ones",
    ),
    "scaled embeddings for speculators": ("speculators", {"input_embedding_scale": 4.0}, "reads embeddings as they are stored"),
    "another layout": ("gguf", {}, "--to 'gguf' is not known: use one of zlab, speculators"),
}  # fmt: skip


@pytest.mark.parametrize(("to", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_is_refused(tmp_path, target, to, changes, message):
    with pytest.raises(ConfigError, match=message):
        export(random_drafter(**changes), target, to, tmp_path / "DFlash")
    assert not list(tmp_path.iterdir())


def test_folder_name(tmp_path, target):
    """vLLM knows a DFlash drafter by its path; speculators' config says it itself."""
    with pytest.raises(ConfigError, match="vLLM knows a DFlash drafter by 'dflash' in its path. Call the folder mine-DFlash"):
        export(random_drafter(), target, "zlab", tmp_path / "mine")
    export(random_drafter(), target, "zlab", tmp_path / "my-dflash")
    export(random_drafter(), target, "speculators", tmp_path / "mine")


@pytest.mark.parametrize("name", ["smollm2-135m", "some/where.gguf"])
def test_name_of_the_target(tmp_path, target, name):
    with pytest.raises(ConfigError, match=f"other engines cannot load the target as {name}: give its hub id"):
        export_drafter(random_drafter(), target, "zlab", tmp_path / "DFlash", name)


def test_all_or_nothing(tmp_path, target, monkeypatch):
    """An earlier drafter is replaced, in either layout; anything else is kept, and so is the earlier one when writing fails."""
    folder = export(random_drafter(), target, "zlab", tmp_path / "DFlash")
    (folder / "mine.txt").write_text("mine")
    export(random_drafter(block_size=4), target, "speculators", folder)
    assert load_drafter(folder, target).config.block_size == 4
    export(random_drafter(block_size=5), target, "zlab", folder)
    assert load_drafter(folder, target).config.block_size == 5
    assert (folder / "mine.txt").read_text() == "mine"
    assert "(block size 5:" in (folder / "README.md").read_text()
    (tmp_path / "dflash-letters").mkdir()
    (tmp_path / "dflash-letters" / "letter.txt").touch()
    with pytest.raises(CheckpointError, match="holds something else than a drafter"):
        export(random_drafter(), target, "zlab", tmp_path / "dflash-letters")

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = files(folder) | {"README.md": (folder / "README.md").read_bytes()}
    monkeypatch.setattr("dflash_jax.hf.save_file", fail)
    with pytest.raises(CheckpointError, match="could not be written .*No space left"):
        export(random_drafter(), target, "zlab", folder)
    assert before == {name: (folder / name).read_bytes() for name in before}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DFlash", "dflash-letters"]


def test_speculators_needs_the_target_class_and_head(tmp_path, target, monkeypatch):
    strange = dataclasses.replace(target, config=dataclasses.replace(target.config, model_type="mine"))
    with pytest.raises(ConfigError, match="names the target's class, and 'mine' has none here"):
        export(random_drafter(), strange, "speculators", tmp_path / "s")
    monkeypatch.delattr(DenseTarget, "head_kernel")
    with pytest.raises(ConfigError, match="does not show its head"):
        export(random_drafter(**FEW), target, "speculators", tmp_path / "s")


# ---------------------------------------------------------------------------------------------------------------------
# The README and the command


def test_readme_commands(target):
    text = readme(random_drafter().config, target.config, "zlab", "out/my DFlash", "some/target")
    speculative = """'{"method": "dflash", "model": "out/my DFlash", "num_speculative_tokens": 5}'"""
    assert f"\nvllm serve some/target --speculative-config {speculative}\n" in text
    assert (
        "\npython -m sglang.launch_server --model-path some/target --speculative-algorithm DFLASH "
        "--speculative-draft-model-path 'out/my DFlash' --speculative-num-draft-tokens 6\n"
    ) in text
    assert text.index("## vLLM\n") < text.index("## SGLang\n") < text.index("## tpu-inference")
    text = readme(random_drafter().config, target.config, "speculators", "out/s", "some/target")
    assert "\nvllm serve out/s\n" in text
    assert "sglang.launch_server" not in text


NOTES = {
    "theta of another": ("zlab", {}, ["they differ from this drafter's"], ["sliding", "causal"]),
    "theta of the target": ("zlab", {"rope": RopeConfig(1e4)}, ["they are the same here"], ["differ"]),
    "windows": ("zlab", {"sliding_window": (4, 4)}, ["tpu-inference has no sliding windows", "converter of speculators"], ["V2"]),
    "layers of two kinds": ("zlab", SHARED["sliding, causal"], ["V2 model runner", "drafts bidirectionally"], ["converter"]),
    "partial rotary": ("zlab", {"rope": RopeConfig(1e4, partial_rotary_factor=0.5)}, ["rotate whole heads"], []),
    "scaled embeddings": ("zlab", {"input_embedding_scale": 4.0}, ["without input_embedding_scale"], []),
    "speculators": ("speculators", {}, ["export once more with --to zlab"], ["tpu-inference has", "sliding"]),
    "speculators, windows": (
        "speculators", {"sliding_window": (4, 4)}, ["does not read sliding_window_non_causal", "at the window before"], ["V2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("to", "changes", "said", "unsaid"), NOTES.values(), ids=NOTES)
def test_notes(target, to, changes, said, unsaid):
    text = " ".join(notes(random_drafter(**changes).config, target.config, to))
    assert "num_speculative_tokens must be 5" in text
    assert all(words in text for words in said), text
    assert not any(words in text for words in unsaid), text


def test_command(tmp_path, target_folder, target, capsys):
    save_drafter(random_drafter(), tmp_path / "d", dtype="float32")
    options = ["export", "--drafter", str(tmp_path / "d"), "--target", str(target_folder), "--out", str(tmp_path / "x-DFlash")]
    assert main([*options, "--to", "zlab", "--target_name", "some/target"]) == 0
    assert "README.md has the commands" in capsys.readouterr().out
    assert "vllm serve some/target" in (tmp_path / "x-DFlash" / "README.md").read_text()
    equal_params(load_drafter(tmp_path / "x-DFlash", target), load_drafter(export_again(tmp_path, target), target))
    with pytest.raises(SystemExit) as stopped:
        main([*options, "--to", "gguf"])
    assert stopped.value.code == 2
    assert "invalid choice: 'gguf'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        run(main, [*options[:-1], str(tmp_path / "plain"), "--to", "zlab"])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Call the folder plain-DFlash" in error
    assert "Traceback" not in error


def test_never_onto_itself(tmp_path, target_folder, capsys):
    save_drafter(random_drafter(**FEW), tmp_path / "x-DFlash")
    before = files(tmp_path / "x-DFlash")
    places = ["--drafter", str(tmp_path / "x-DFlash"), "--target", str(target_folder), "--out", str(tmp_path / "." / "x-DFlash")]
    with pytest.raises(SystemExit) as stopped:
        run(main, ["export", "--to", "zlab", "--all_tokens", *places])
    assert stopped.value.code == 1
    assert "--out is the drafter's own folder" in capsys.readouterr().err
    assert files(tmp_path / "x-DFlash") == before


def test_a_readme_of_somebody_stays(tmp_path, target):
    folder = export(random_drafter(), target, "zlab", tmp_path / "x-DFlash")
    export(random_drafter(block_size=4), target, "zlab", folder)  # its own README is written again
    (folder / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match=r"README\.md is not of an earlier export"):
        export(random_drafter(), target, "zlab", folder)
    assert (folder / "README.md").read_text() == "mine"
    assert load_drafter(folder, target).config.block_size == 4


@pytest.mark.parametrize("value", [np.nan, 3.4e38])
def test_broken_weights_are_not_exported(tmp_path, target, value):
    """3.4e38 is finite, but not in bfloat16."""
    drafter = random_drafter()
    drafter.params["norm"]["scale"].set_value(drafter.params["norm"]["scale"][...].at[0].set(value))
    with pytest.raises(CheckpointError, match=r"not finite in bfloat16: norm\.weight"):
        export(drafter, target, "zlab", tmp_path / "x-DFlash")
    assert not list(tmp_path.iterdir())


def test_commands_name_places_that_engines_can_open(tmp_path, target, target_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export_drafter(random_drafter(), target, "zlab", "x-DFlash", str(target_folder))
    text = (tmp_path / "x-DFlash" / "README.md").read_text()
    assert f'"model": "{tmp_path / "x-DFlash"}"' in text
    assert f"vllm serve {target_folder}" in text


def test_all_tokens(tmp_path, target_folder, target):
    """The same tensors; only the table of drafted tokens goes."""
    save_drafter(random_drafter(**FEW), tmp_path / "d")
    places = ["--drafter", str(tmp_path / "d"), "--target", str(target_folder), "--out", str(tmp_path / "x-DFlash")]
    assert main(["export", "--to", "zlab", "--all_tokens", *places, "--target_name", "some/target"]) == 0
    assert files(tmp_path / "x-DFlash") == files(export_again(tmp_path, target))


def export_again(tmp_path, target):
    return export(random_drafter(), target, "zlab", tmp_path / "y-DFlash")


# ---------------------------------------------------------------------------------------------------------------------
# Against the package speculators


@pytest.fixture(scope="module")
def speculators():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the oracle's own
        import torch
        from speculators.convert.dflash import DFlashConverter
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    return SimpleNamespace(torch=torch, Converter=DFlashConverter, Model=DFlashDraftModel, Config=DFlashSpeculatorConfig)


LENGTH, ANCHOR = 20, 9
# Windows as wide as the text: speculators trains with another rule for narrower ones (docs/formats.md).
JUDGED = {
    "plain": {},
    "biases": {"attention_bias": True},
    "yarn": SHARED["yarn"],
    "llama3": SHARED["llama3"],
    "sliding, causal": {"sliding_window": (32, None), "causal": (True, False)},
    "sliding, bidirectional": {"sliding_window": (32, 32)},
} | FEW_KINDS


def speculators_logits(speculators, folder, taps_1TM, tokens_1T):
    """Logits [K, V] of one block at ANCHOR from the package's class, and what it found in the folder."""
    torch = speculators.torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = speculators.Config.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        blank = speculators.Model(config)
        stored = load_file(folder / "model.safetensors")
        stored = {name: torch.tensor(x if x.dtype.kind in "bi" else x.astype(np.float32)) for name, x in stored.items()}
        keys = blank.load_state_dict(stored, strict=False)
        model = speculators.Model.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        here = torch.arange(LENGTH)[None] == ANCHOR
        with torch.no_grad():
            logits = model._backbone_forward(
                hidden_states=torch.tensor(taps_1TM),
                input_ids=torch.tensor(tokens_1T).long(),
                loss_mask=here.float(),
                verifier_last_hidden_states=torch.zeros(1, LENGTH, taps_1TM.shape[-1] // 3),
                document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
                max_anchors=1,
            )[1]
    return logits[0].numpy(), keys


def our_logits(drafter, target, taps_1TM, tokens_1T):
    block_size = drafter.config.block_size
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    cache = drafter.extend_context(drafter.params, jnp.asarray(taps_1TM), positions, drafter.init_cache(1, LENGTH))
    block = drafter.embed_block(
        drafter.params, jnp.asarray(tokens_1T[:, ANCHOR]), block_size, lambda tokens: target.embed(target.params, tokens)
    )
    hidden = drafter.propose(drafter.params, block, positions[:, ANCHOR : ANCHOR + block_size], cache)
    head = drafter.head(drafter.params, target, target.params)
    return np.asarray(drafter.unembed(hidden, head, target, target.params))[0]


@pytest.mark.oracle
@pytest.mark.parametrize("changes", JUDGED.values(), ids=JUDGED)
def test_speculators_loads_ours(tmp_path, speculators, target_folder, target, changes):
    """No unexpected key, none missing but the target's, and the same logits of a block."""
    export_drafter(random_drafter(**changes), target, "speculators", tmp_path / "s", str(target_folder))
    drafter = load_drafter(tmp_path / "s", target)
    random = np.random.default_rng(7)
    taps = random.standard_normal((1, LENGTH, 3 * 32)).astype(np.float32)
    tokens = random.integers(3, 60, (1, LENGTH)).astype(np.int32)
    wanted, keys = speculators_logits(speculators, tmp_path / "s", taps, tokens)
    assert not keys.unexpected_keys
    of_the_target = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert set(keys.missing_keys) <= of_the_target
    ours = our_logits(drafter, target, taps, tokens)
    np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)
    assert np.std(wanted) > 0.5, "logits so flat that the comparison says little"


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["biases", "yarn", "sliding, causal"])
def test_the_converter_takes_ours(tmp_path, speculators, target_folder, target, kind):
    """What it makes of our z-lab folder loads here, equal to the drafter."""
    folder = export(random_drafter(**SHARED[kind]), target, "zlab", tmp_path / "a-DFlash")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        speculators.Converter().convert(folder, tmp_path / "converted", str(target_folder), validate=True)
    loaded, wanted = load_drafter(tmp_path / "converted", target), load_drafter(folder, target)
    assert loaded.config == dataclasses.replace(wanted.config, loss_decay_gamma=3.0)
    equal_params(loaded, wanted)
