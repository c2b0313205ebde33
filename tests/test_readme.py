"""What the README shows runs as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

import dflash_jax
import serve
import train
from dflash_jax import __main__ as commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.one_cell
def test_the_example_runs(capsys, monkeypatch):
    """The real model and the shipped drafter; only the answer is shorter."""
    monkeypatch.chdir(ROOT)
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 2
    printed, names = [], {}
    for example in examples:
        for shown, shorter in {
            "max_new_tokens=128": "max_new_tokens=12",
            "max_batch=4, max_len=1024": "max_batch=1, max_len=64",
        }.items():
            assert shown in "".join(examples)
            example = example.replace(shown, shorter)
        exec(compile(example, "README.md", "exec"), names)
        printed.append(capsys.readouterr().out)
    text, reason, tau = re.fullmatch(r"(.*) \['(length|stop)'\] ([\d.]+)\n", printed[0], re.DOTALL).groups()
    assert len(text) > 20
    assert reason == "length"
    assert 1 <= float(tau) <= 8
    assert names["request"].finish_reason in ("length", "stop")
    assert printed[1] == names["request"].text
    assert len(printed[1]) > 10


def test_every_public_name_exists():
    for name in dflash_jax.__all__:
        assert getattr(dflash_jax, name) is not None


@pytest.mark.parametrize("line", re.findall(r"^\| `(python .*?)`", README, re.MULTILINE))
def test_commands_exist(line, capsys):
    """Each command of the table parses its options: --help of the same command knows their names."""
    words = shlex.split(line.replace("[", "").replace("]", ""))
    if words[1:3] == ["-m", "dflash_jax"]:
        main, options = (lambda argv: commands.main([words[3], *argv])), words[4:]
    else:
        main, options = {"serve.py": serve.main, "train.py": train.main}[words[1]], words[2:]
    try:
        status = main(["--help"])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 0
    out = capsys.readouterr().out
    assert all(option in out for option in options if option.startswith("--") and option != "--resume")


def test_the_layout_names_every_file():
    layout = README[README.index("## Layout") : README.index("## Limits")]
    named = set(re.findall(r"`([\w*/]+)`", layout))
    for path in (ROOT / "dflash_jax").iterdir():
        name = path.stem + "/" * path.is_dir()
        if path.suffix in ("", ".py") and name not in ("__init__", "__pycache__/"):
            assert name in named or (name.startswith("hf") and "hf*" in named), f"{name} is not in the README's layout"


@pytest.mark.one_cell
def test_the_shipped_drafter_is_exported_as_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (options,) = re.findall(r"`(--target smollm2-135m.*?)`", README, re.DOTALL)
    assert commands.main(["export", "--to", "zlab", *shlex.split(options), "--out", str(tmp_path / "X-DFlash")]) == 0
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct" in (tmp_path / "X-DFlash" / "README.md").read_text()
