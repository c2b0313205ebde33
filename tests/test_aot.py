"""The report of a run's programs on fake CPU devices: sizes as written by hand, what does not fit, and what is refused."""

import importlib.util
import json

import jax
import pytest
from tiny_folder import tiny_config

import dflash_jax.__main__ as commands
from dflash_jax.aot import Report, _described_target
from dflash_jax.cli import build_config, config_parser, run
from dflash_jax.errors import ConfigError
from dflash_jax.first_drafter import described_drafter, drafter_config
from dflash_jax.hf_drafter import config_to_json
from dflash_jax.program import Sent

pytestmark = pytest.mark.one_cell

VOCAB, WIDTH, MLP = 64, 32, 48
ROWS, LENGTH, BLOCK = 8, 16, 4
PARTS = 4  # fsdp 2 x tensor 2; data 2 holds copies


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A target of two layers of which training reads the first; of its folder there is only config.json."""
    folder = tmp_path_factory.mktemp("target")
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    preset = {
        "target": {"path": str(folder), "dtype": "bfloat16"},
        "drafter": {"block_size": BLOCK, "num_draft_layers": 1, "target_layer_ids": [0], "mask_token_id": 3, "dtype": "bfloat16"},
        "data": {"batch_size": ROWS, "max_length": LENGTH, "buckets": [LENGTH]},
        "train": {"anchors_per_row": 3, "init": "random"},
        "optim": {"accumulation": 2},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "decode": {"max_new_tokens": 16},
    }
    (folder / "run.yaml").write_text(json.dumps(preset), encoding="utf-8")
    return ["aot", "--config", str(folder / "run.yaml"), "--rows", "2", "--prompt_length", "10"]


def status(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(commands.main, argv)
    out = capsys.readouterr()
    return stopped.value.code, out.out, out.err


def elements(width):
    """Of all kernels of one layer, and its two norms."""
    return 2 * width * 32 + 2 * width * 16 + 3 * width * MLP, 2 * width


def check_device(train, decode):
    """What a device holds and computes, by hand, whatever its kind; state and caches are written in place."""
    kernels, norms = elements(WIDTH)
    tables = 2 * VOCAB * WIDTH
    target = 2 * ((2 * kernels + tables) // PARTS + 2 * norms + WIDTH)
    head_norms, fuser = 2 * 8, WIDTH * WIDTH // 2  # the fuser is split over fsdp only
    drafter = kernels // PARTS + norms + head_norms + fuser + 2 * WIDTH
    assert train["arguments"]["target"] == target
    assert train["arguments"]["drafter"] == 4 * drafter
    assert train["arguments"]["optimizer"] == 2 * 4 * drafter + 2 * 4  # both moments, and the counts of Adam and of the schedule
    assert train["arguments"]["batch"] == ROWS // 4 * (LENGTH * (4 + 1 + 4) + 4), "tokens, loss mask, documents; lengths"
    assert decode["arguments"]["drafter"] == 2 * drafter, "served in the target's dtype"
    caches = 3 * 2 * 2 * 2 * 128 * 8 * 2  # layers of both, keys and values, rows, heads, capacity, width, bytes
    assert decode["arguments"]["caches"] == caches // 2, "split by heads"
    for memory in (train["memory"], decode["memory"]):
        assert memory["outputs"] - memory["aliased"] < 8192, "only counts and figures have a buffer of their own, 512 bytes each"
    assert train["sent"]["all-gather"]["times"] > 2 * 14, "kernels are gathered in each micro-batch"

    slots, heads_width = 2 * BLOCK, 4 * 8  # slots of both rows
    weights = 3 * kernels * slots + (2 * fuser + 2 * WIDTH * 16) * slots + VOCAB * WIDTH * (slots + slots - 2)
    attention = 2 * heads_width * slots * (2 * 128 + 128 + BLOCK)
    assert decode["product_flops"] == 2 * (weights + attention) // PARTS, "every data part decodes the same rows"


def test_report(options, capsys):
    """Train step, prefill and decode chunk on 2 x 2 x 2 fake devices."""
    code, out, _ = status([*options, "--topology", "cpu:8", "--memory_gib", "1"], capsys)
    assert code == 0
    assert "mesh {'replica': 1, 'data': 2, 'fsdp': 2, 'tensor': 2}" in out
    assert out.count("fits in 1.0 GiB") == 3
    report = json.loads(out.splitlines()[-1])
    assert (report["devices"], report["fits"]) == (8, True)
    train, _, decode = report["programs"]
    assert [p["name"].split(" (")[0] for p in report["programs"]] == ["train step", "prefill", "decode chunk"]

    check_device(train, decode)
    memory = train["memory"]
    assert memory["arguments"] + memory["unread"] >= sum(train["arguments"].values()), "the layer above the last tap is held too"
    parts = sum(memory[name] for name in ("arguments", "unread", "outputs", "temporaries", "code")) - memory["aliased"]
    assert memory["total"] == parts
    assert all(program["product_flops"] > 0 and program["compiler"]["bytes accessed"] > 0 for program in report["programs"])


def test_what_does_not_fit(options, capsys, monkeypatch):
    """Exit status 1, by the sum of what is held, or by the compiler's own word."""
    memory = {"arguments": 2**29, "temporaries": 2**29, "total": 2**30 + 1}
    report = Report("train step", 1.0, {}, memory, 0, {"flops": 0.0, "bytes accessed": 0.0}, {"all-gather": Sent(3, 10)})
    monkeypatch.setattr("dflash_jax.aot._reports", lambda *args: iter([report]))
    argv = [*options, "--topology", "cpu:8", "--memory_gib"]
    code, out, _ = status([*argv, "1"], capsys)
    assert code == 1
    assert "does NOT fit in 1.0 GiB" in out
    assert json.loads(out.splitlines()[-1])["fits"] is False
    assert status([*argv, "1.1"], capsys)[0] == 0

    def refused(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.2G of 15.75G hbm.")

    monkeypatch.setattr("dflash_jax.aot._reports", refused)
    code, out, _ = status([*argv, "1"], capsys)
    assert code == 1
    assert "the compiler says that it does NOT fit: RESOURCE_EXHAUSTED: Ran out of memory" in out


REFUSED = {
    "more devices than there are": (["--topology", "cpu:4096"], "use a process of its own"),
    "no number": (["--topology", "cpu:many"], "pip install 'dflash_jax"),
    "no libtpu": (["--topology", "v5e:2x2"], "pip install 'dflash_jax"),
    "mesh": (["--topology", "cpu:8", "--mesh.tensor", "3"], "does not hold 8 devices: change mesh.data"),
    "rows of the batch": (["--topology", "cpu:8", "--data.batch_size", "7"], "change one of them"),
    "rows": (["--topology", "cpu:8", "--rows", "0"], "must be at least 1"),
    "no such target": (["--topology", "cpu:8", "--target.path", "no/such/folder"], "give a Hugging Face folder"),
    "nothing to load": (["--topology", "cpu:8", "--train.init", "loaded"], "needs drafter.path"),
}


@pytest.mark.parametrize(("more", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, more, message, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = status([*options, *more], capsys)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.libtpu
def test_for_tpus(options, capsys):
    """The same run by libtpu's own compiler, for a v5e slice of eight; no TPU is needed."""
    code, out, _ = status([*options, "--topology", "v5e:2x4"], capsys)
    assert code == 0
    assert "8 devices (TPU v5 lite) of 16 GiB" in out
    assert out.count("fits in 16.0 GiB") == 3
    train, _, decode = json.loads(out.splitlines()[-1])["programs"]
    check_device(train, decode)
    code, _, err = status([*options, "--topology", "v5e:3x5"], capsys)
    assert code == 1
    assert "is unknown to libtpu" in err


SMALLER = ["--drafter.mlp_dim", str(MLP // 2), "--drafter.num_draft_layers", "2"]


def test_a_loaded_drafter_is_described_by_its_own_config(options, tmp_path):
    """Its sizes come from its folder, and what the run asks for and it lacks is refused as in training; no weights are read."""
    parser = config_parser("test")

    def loaded(*more):
        argv = [*options[1:3], "--train.init", "loaded", "--drafter.path", str(tmp_path), *more]
        return build_config(parser.parse_args(argv), parser)

    config = loaded("--drafter.num_draft_layers", "2")
    target = _described_target(config)
    stored = drafter_config(build_config(parser.parse_args([*options[1:3], *SMALLER]), parser), target)
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(stored, "bfloat16")), encoding="utf-8")
    drafter = described_drafter(config, target)
    assert (drafter.mlp_dim, drafter.num_draft_layers, drafter.dtype) == (MLP // 2, 2, "bfloat16")
    with pytest.raises(ConfigError, match=r"drafter\.num_draft_layers is 1, but the drafter of drafter\.path has 2"):
        described_drafter(loaded(), target)
