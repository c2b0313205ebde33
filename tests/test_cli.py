"""Command lines: merged configs, errors that people can act on, and the commands of `python -m dflash_jax`."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import conversations, target_folder, tiny_target, user, write_lines

import dflash_jax.__main__ as commands
import train
from dflash_jax import errors
from dflash_jax.cli import parse_config, run
from dflash_jax.config import Config, DataConfig
from dflash_jax.generate import generate

pytestmark = pytest.mark.one_cell

ROOT = Path(__file__).parents[1]


def status_of(main, argv):
    with pytest.raises(SystemExit) as stopped:
        run(main, argv)
    return stopped.value.code


# ---------------------------------------------------------------------------------------------------------------------
# Configs


def test_defaults_are_the_dataclasses():
    assert parse_config([]) == Config()


def test_files_and_options_merge(tmp_path):
    """A sparse YAML file over the defaults, dotted options over both, whatever their order of kinds."""
    preset = tmp_path / "p.yaml"
    preset.write_text("optim:\n  learning_rate: 2.0e-3\n  beta1: 0.8\ndata:\n  train: [a.jsonl, b.jsonl]\n")
    config = parse_config(["--config", str(preset), "--optim.beta1=0.7", "--data.buckets=[8, 16]", "--drafter.mask_token_id", "5"])
    assert (config.optim.learning_rate, config.optim.beta1, config.optim.beta2) == (2e-3, 0.7, Config().optim.beta2)
    assert (config.data.train, config.data.buckets) == (["a.jsonl", "b.jsonl"], [8, 16])
    assert config.drafter.mask_token_id == 5
    assert isinstance(config.data, DataConfig)


BAD = [
    (["--optim.learning_rat", "1"], "learning_rat"),
    (["--optim.learning_rate", "fast"], "learning_rate"),
    (["--train.init", "zeros"], "init"),
    (["--target.dtype", "float16"], "dtype"),
    (["--data.batch_size", "2.5"], "batch_size"),
    (["--config", "absent.yaml"], "absent.yaml"),
]


@pytest.mark.parametrize(("argv", "named"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_options_are_named(argv, named, capsys):
    assert status_of(parse_config, argv) == 2
    err = capsys.readouterr().err
    assert named in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 5, "the mistake, not the list of all options"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("optim:\n  speed: 1\n", "speed"),
        ("optimizer:\n  beta1: 1\n", "optimizer"),
        ("optim:\n  beta1: [1]\n", "beta1"),
        ("train: 5\n", "train"),
        ("train:\n  log_every: null\n", "train.log_every is null: give a value, or leave it out for its default"),
        ("data:\n  train: null\n", "data.train is null"),
        ("drafter:\n  target_layer_ids: null\n", "drafter.target_layer_ids is null"),
        ("bench:\n  limit:\n", "bench.limit is null"),
        ("# only words\n", "p.yaml sets nothing: leave --config out"),
        ("drafter:\n", "p.yaml sets nothing"),
        ("a: [\n", "line 2"),
        ("a: [\n", "p.yaml is not YAML"),
    ],
)
def test_bad_presets_are_named(tmp_path, text, named, capsys):
    (tmp_path / "p.yaml").write_text(text)
    assert status_of(parse_config, ["--config", str(tmp_path / "p.yaml")]) == 2
    err = capsys.readouterr().err
    assert named in err
    assert "Traceback" not in err


def test_an_empty_section_takes_the_defaults(tmp_path):
    preset = tmp_path / "p.yaml"
    preset.write_text("target:\n  path: x\ndrafter:\n  # path: y\n")
    config = parse_config(["--config", str(preset)])
    assert (config.target.path, config.drafter) == ("x", Config().drafter)
    config = parse_config(["--config", str(preset), "--drafter.block_size", "4"])
    assert config.drafter == dataclasses.replace(Config().drafter, block_size=4)


def test_null_is_a_value_where_it_has_a_meaning(tmp_path):
    (tmp_path / "p.yaml").write_text("decode:\n  block_size: null\ndrafter:\n  path: null\n")
    assert parse_config(["--config", str(tmp_path / "p.yaml")]).decode.block_size is None


def test_a_preset_of_another_encoding_is_named(tmp_path, capsys):
    (tmp_path / "p.yaml").write_bytes(b"optim:\n  beta1: 0.9 # \xff\n")
    assert status_of(parse_config, ["--config", str(tmp_path / "p.yaml")]) == 2
    assert "p.yaml is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("main", [train.main, commands.bench_command, commands.regenerate_command])
def test_help_explains_fields(main, capsys):
    """The docstrings of the fields are the help."""
    assert status_of(main, ["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "padded row lengths; each costs one compilation" in out
    assert "--optim.learning_rate" in out


def test_every_option_has_a_meaning(capsys):
    """An option without help text shows nothing but its type."""
    assert status_of(train.main, ["--help"]) == 0
    entries = re.split(r"\n(?=  --)", capsys.readouterr().out)
    bare = [entry.split()[0] for entry in entries if re.fullmatch(r"--[\w.]+ \S+ (\(.*\))", " ".join(entry.split()))]
    assert not bare, f"options of config.py without a docstring: {bare}"


# ---------------------------------------------------------------------------------------------------------------------
# Exit statuses

KINDS = [
    errors.DFlashError, errors.ConfigError, errors.CheckpointError, errors.DataError, errors.PromptError,
    errors.EngineError, errors.NonFiniteLossError,
]  # fmt: skip


def test_every_error_is_listed_here():
    found = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.DFlashError)}
    assert found == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_one_line(kind, capsys):
    def main(argv):
        raise kind("a.json is broken: mend it")

    assert status_of(main, []) == 1
    assert capsys.readouterr().err == "error: a.json is broken: mend it\n"


def test_other_endings(capsys):
    def raising(error):
        def main(argv):
            raise error

        return main

    assert status_of(raising(KeyboardInterrupt()), []) == 130
    assert status_of(raising(BrokenPipeError()), []) == 1
    assert status_of(lambda argv: None, []) is None
    assert status_of(lambda argv: 3, []) == 3
    assert status_of(lambda argv: len(argv), ["a", "b"]) == 2
    assert capsys.readouterr().err == ""
    assert status_of(raising(OSError(28, "No space left on device", "out.jsonl")), []) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: [Errno 28] No space left on device: 'out.jsonl': free some space; training goes on with --resume")
    assert status_of(raising(OSError(13, "Permission denied", "out.jsonl")), []) == 1
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: 'out.jsonl'\n"
    with pytest.raises(ZeroDivisionError):  # a mistake of ours keeps its traceback
        run(raising(ZeroDivisionError()), [])


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def test_bench_takes_prompt_files(monkeypatch):
    """--prompts FILE, repeatable, is bench.prompts."""
    seen = []
    monkeypatch.setattr(commands, "bench", lambda config: seen.append(config.bench.prompts) or 0)
    assert commands.main(["bench", "--prompts", "a.jsonl", "--prompts", "b.jsonl"]) == 0
    assert commands.main(["bench", "--bench.prompts", "[c.jsonl]"]) == 0
    assert seen == [["a.jsonl", "b.jsonl"], ["c.jsonl"]]


def test_usage(capsys):
    assert commands.main([]) == 2
    out = capsys.readouterr().out
    for name in ("regenerate", "bench", "doctor", "invariants"):
        assert f"  {name}" in out
    assert commands.main(["--help"]) == 0
    assert commands.main(["banch"]) == 2
    assert "error: 'banch' is no command" in capsys.readouterr().err
    assert commands.main(["invariants", "--help"]) == 0
    assert commands.main(["invariants", "--fast"]) == 2


def test_as_a_process():
    """No traceback from a real process either, whatever the mistake."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    argv = [sys.executable, "-m", "dflash_jax", "bench", "--bench.limit", "-1"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: bench.limit is -1")
    assert "Traceback" not in done.stderr


def test_regenerate(tmp_path, capsys):
    """Prompts in, the target's answers out, twice the same file."""
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"turns": ["a"]}, {"turns": ["b"]}])
    argv = ["--target.path", target_folder(), "--target.dtype", "float32", "--decode.max_new_tokens", "12"]
    argv += ["--prompts", prompts, "--out", str(tmp_path / "o.jsonl"), "--limit", "1", "--batch_size", "1"]
    assert commands.main(["regenerate", *argv]) == 0
    assert f"1 answers written to {tmp_path / 'o.jsonl'}" in capsys.readouterr().out
    row = json.loads((tmp_path / "o.jsonl").read_text())
    target = tiny_target()
    out = generate(target, None, [target.tokenizer.encode_chat([user("a")])], max_new_tokens=12)
    assert (row["id"], row["answer_tokens"]) == ("prompts:1", out.tokens[0])
    assert commands.main(["regenerate", *argv]) == 0
    assert "0 answers written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "error: there is no output file: give --out"),
        (["--out", "OUT", "--limit", "-1"], "error: --limit -1"),
        (["--out", "OUT", "--batch_size", "0"], "error: --limit 0 must be 0 or more and --batch_size 0"),
        (["--out", "OUT", "--prompts", "absent.jsonl"], "error: absent.jsonl cannot be read"),
        (["--out", "OUT", "--prompts", "CONVERSATIONS", "--target.path", "absent-folder"], "error: "),
        (["--out", "OUT", "--prompts", "CONVERSATIONS", "--decode.top_p", "2", "--decode.temperature", "1"], "error: top_p is 2"),
        (
            ["--out", "OUT", "--prompts", "CONVERSATIONS", "--decode.max_new_tokens", "128"],
            "error: max_new_tokens 128 leaves no room",
        ),
    ],
)
def test_regenerate_refusals(tmp_path, more, message, capsys):
    places = {"OUT": str(tmp_path / "o.jsonl"), "CONVERSATIONS": conversations()}
    argv = [
        "regenerate",
        "--target.path",
        target_folder(),
        "--decode.max_new_tokens",
        "12",
        *(places.get(word, word) for word in more),
    ]
    assert status_of(commands.main, argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert next(line for line in err.splitlines() if line.startswith("error:")).startswith(message)


@pytest.mark.parametrize("argv", [["--resume"], ["--train.resume=true"]])
def test_train_resume_is_an_option(argv, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "fit", lambda config: seen.append(config.train.resume) or 0)
    assert train.main(argv) == 0
    assert seen == [True]


# ---------------------------------------------------------------------------------------------------------------------
# Damaged targets, through a command


def damaged(tmp_path, how):
    import shutil

    folder = tmp_path / "t"
    shutil.copytree(target_folder(), folder)
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "missing":
        weights.unlink()
    elif how == "architecture":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    elif how == "shape":
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    return str(folder)


@pytest.mark.parametrize("how", ["truncated", "missing", "architecture", "shape", "no tokenizer"])
def test_damaged_targets(tmp_path, how, capsys):
    """The message names the folder; nothing is written."""
    folder = damaged(tmp_path, how)
    prompts = write_lines(tmp_path / "p.jsonl", [{"turns": ["a"]}])
    argv = ["regenerate", "--target.path", folder, "--prompts", prompts, "--out", str(tmp_path / "o.jsonl")]
    assert status_of(commands.main, argv) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert folder in err
    assert not (tmp_path / "o.jsonl").exists()
