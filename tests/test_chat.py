"""Answers in the terminal, through serve.py's own main."""

import json
import re

import pytest
from tiny_run import drafter_folder, target_folder, tiny_target, user

import serve
from dflash_jax.cli import run
from dflash_jax.config import Config, DecodeConfig, TargetSource
from dflash_jax.divergence import Divergence
from dflash_jax.generate import generate

pytestmark = pytest.mark.one_cell

NEW = 12


@pytest.fixture
def options():
    return ["--target.path", target_folder(), "--target.dtype", "float32", "--decode.max_new_tokens", str(NEW)]


def plain_answer(text):
    target = tiny_target()
    out = generate(target, None, [target.tokenizer.encode_chat([user(text)])], max_new_tokens=NEW)
    return target.tokenizer.decode(out.tokens[0]), len(out.tokens[0])


def test_answer_with_comparison(options, capsys):
    """The streamed text is plain decoding's, then a table with one line a prompt."""
    argv = [
        *options,
        "--drafter.path",
        drafter_folder(),
        "--prompt",
        "a",
        "--prompt",
        "hello  you",
        "--compare",
        "--decode.audit",
        "true",
    ]
    assert serve.main(argv) == 0
    out = capsys.readouterr().out
    for text in ("a", "hello  you"):
        said, _ = plain_answer(text)
        assert f"\n> {text}\n\n{said}\n" in out
    assert "audit of hello you: no sampled token had a drafter's law" in out
    table = out[out.index("prompt ") : out.index("\naudit of a:")].splitlines()
    assert re.split(r"\s{2,}", table[0]) == ["prompt", "tokens", "tau", "tokens/s", "plain tokens/s", "speedup", "same text"]
    for line, text in zip(table[2:], ("a", "hello you"), strict=True):
        prompt, tokens, tau, rate, plain_rate, speedup, same = re.split(r"\s{2,}", line)
        assert (prompt, int(tokens), same) == (text, plain_answer(text)[1], "yes")
        assert 1 <= float(tau) < 2
        assert float(rate) > 0
        assert float(plain_rate) > 0
        assert speedup.endswith("x")


def test_answer_without_drafter(options, capsys):
    assert serve.main([*options, "--prompt", "a"]) == 0
    out = capsys.readouterr().out
    assert f"{plain_answer('a')[0]}\n" in out
    assert re.split(r"\s{2,}", out[out.index("prompt ") :].splitlines()[0]) == ["prompt", "tokens", "tau", "tokens/s"]


def test_a_different_text_is_said(options, capsys, monkeypatch):
    """The column is a comparison, not a promise; in float32 a difference is an error."""
    import dflash_jax.chat as module

    answer = module._answer

    def wrong(target, drafter, prompt, config, show):
        given = answer(target, drafter, prompt, config, show)
        return given if drafter is not None else given._replace(tokens=[*given.tokens[:3], 7, *given.tokens[4:]])

    monkeypatch.setattr(module, "_answer", wrong)
    compared = [*options, "--drafter.path", drafter_folder(), "--prompt", "a", "--compare"]
    assert serve.main(compared) == 1
    said = capsys.readouterr()
    assert "no, from token 3 on" in said.out
    assert "error: float32 texts must be equal" in said.err
    in_bfloat16 = [*compared, "--target.dtype", "bfloat16"]
    assert serve.main(in_bfloat16) == 1
    said = capsys.readouterr()
    margin, bound = re.search(r"error: the texts part by a margin of (.*); bfloat16 explains (.*) at most", said.err).groups()
    assert float(margin) > float(bound) > 0
    assert f"no, from token 3 on, margin {margin}" in said.out
    monkeypatch.setattr(module, "first_divergence", lambda *arguments: Divergence(3, 0.0625, 0.125))
    assert serve.main(in_bfloat16) == 0
    said = capsys.readouterr().out
    assert "no, from token 3 on, margin 0.062" in said
    assert "--target.dtype float32 is exact" in said
    # beyond a cut no margin says anything: a token may have been cut in one pass only
    cut = Config(decode=DecodeConfig(temperature=1.0, top_k=3, verify="match"), target=TargetSource(dtype="bfloat16"))
    assert module._compared(tiny_target(), [1], [2], [3], cut) == ("no, from token 3 on", None)


def test_compare_of_samples(options, capsys):
    """match gives plain decoding's text; the other rules give another sample, which is no error."""
    sampled = [*options, "--drafter.path", drafter_folder(), "--prompt", "a", "--compare", "--decode.temperature", "1.5"]
    assert serve.main([*sampled, "--decode.verify", "match"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("yes")
    assert serve.main([*sampled, "--decode.verify", "block", "--decode.audit", "true"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^audit of a: z -?\d\.\d\d over \d+ tokens, as it should be$", out, flags=re.MULTILINE)
    assert "another sample" in out
    assert "decode.verify block gives another sample of the same law" in out


def test_config_file(options, tmp_path, capsys):
    """The same from a YAML preset; an option after it wins."""
    preset = tmp_path / "p.yaml"
    preset.write_text(json.dumps({"target": {"path": target_folder(), "dtype": "float32"}, "decode": {"max_new_tokens": 3}}))
    assert serve.main(["--config", str(preset), "--decode.max_new_tokens", str(NEW), "--prompt", "a"]) == 0
    assert f"{plain_answer('a')[0]}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompt", " "], "error: --prompt is empty: give some text"),
        (["--prompt", "a", "--compare"], "error: --compare needs drafter.path"),
        (["--prompt", "x" * 200], "error: prompt 0 has"),
        (["--prompt", "a", "--target.path", "absent-folder"], "error: "),
        (["--prompt", "a", "--drafter.path", "absent-folder"], "error: "),
        (["--prompt", "a", "--decode.max_new_tokens", "0"], "error: max_new_tokens is 0"),
        (["--prompt", "a", "--decode.temperature", "-1"], "error: temperature is -1.0"),
        (["--prompt", "a", "--drafter.path", "DRAFTER", "--decode.block_size", "9"], "error: block_size is 9"),
    ],
)
def test_refusals(options, capsys, more, message):
    """One line, status 1, no traceback."""
    more = [drafter_folder() if word == "DRAFTER" else word for word in more]
    with pytest.raises(SystemExit) as stopped:
        run(serve.main, [*options, *more])
    assert stopped.value.code == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert line.startswith(message)


def test_no_prompt(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(serve.main, options)
    assert stopped.value.code == 2
    assert "give --prompt TEXT" in capsys.readouterr().err
