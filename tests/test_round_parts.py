"""The benchmark of a round's parts: it runs on a folder without weights, forces acceptance and refuses what cannot be timed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tiny_folder import tiny_config
from tiny_models import DRAFTER

from dflash_jax.errors import ConfigError
from dflash_jax.hf_drafter import config_to_json

pytestmark = pytest.mark.one_cell


@pytest.fixture(scope="module")
def benchmark_file():
    spec = importlib.util.spec_from_file_location("round_parts", Path(__file__).parents[1] / "benchmarks/round_parts.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folders(tmp_path):
    sizes = {"hidden_size": DRAFTER.target_hidden_dim, "num_hidden_layers": DRAFTER.num_target_layers, "head_dim": 8}
    values = {"target": tiny_config(vocab_size=DRAFTER.vocab_size, **sizes), "drafter": config_to_json(DRAFTER, "float32")}
    for name, config in values.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return [f"--{name}={tmp_path / name}" for name in values]


def test_report_of_random_weights(benchmark_file, folders, capsys):
    """Two of three drafts are made to stand: three tokens a round, of any weights."""
    sizes = ["--dtype=float32", "--block_size=4", "--batch=2", "--prompt_length=9", "--rounds=3", "--repeats=2"]
    assert benchmark_file.main([*folders, *sizes, "--accepted=2"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["acceptance_length"] == 3
    assert set(result["ms"]) == {"plain step", "round", "call of one round", "draft", "verify", "context", "commit"}
    assert all(value > 0 for value in result["ms"].values())
    assert result["parameter_gb_read"]["round"] >= result["parameter_gb_read"]["plain step"]


@pytest.mark.parametrize(
    ("option", "message"), [("--rounds=0", "must be at least 1"), ("--prompt_length=200", "more than the target's")]
)
def test_what_cannot_be_timed_is_refused(benchmark_file, folders, option, message):
    with pytest.raises(ConfigError, match=message):
        benchmark_file.main([*folders, "--dtype=float32", "--block_size=4", option])
