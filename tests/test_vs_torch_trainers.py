"""The benchmark against SpecForge: both sides do the same work, and say so when they do not. (What they cost is not tested.)"""

import importlib.util
import sys
from pathlib import Path

import pytest
from tiny_models import MASK, dense_target

from dflash_jax.errors import ConfigError, DFlashError


@pytest.fixture(scope="module")
def benchmark_file():
    spec = importlib.util.spec_from_file_location(
        "vs_torch_trainers", Path(__file__).parents[1] / "benchmarks/vs_torch_trainers.py"
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.oracle
def test_both_sides_learn_the_same(benchmark_file, tmp_path):
    """Also after an optimizer step of each; a side that lags a step behind is refused."""
    size = benchmark_file.Size(rows=2, tokens=40, anchors=8, block_size=4, layers=1)
    work = benchmark_file.make_work(size, dense_target(num_layers=9), MASK, range(50), tmp_path / "drafter")
    ours = benchmark_file.Ours(work, "float32", remat=True)
    theirs = benchmark_file.SpecForge(work, "float32", "eager", 128)
    result = benchmark_file.compare(ours, theirs, 16, "float32", 3)
    losses = result["ours"]["losses"]
    assert losses[0] > losses[1] > losses[2]
    assert result["specforge"]["losses"] == pytest.approx(losses, rel=1e-5)
    rates = [result[side]["anchors_per_second"] for side in ("ours", "specforge")]
    assert result["ratio"] == pytest.approx(rates[0] / rates[1], rel=0.02)
    ours.reset()
    with pytest.raises(DFlashError, match="not the same work"):
        benchmark_file.compare(ours, theirs, 16, "float32", 1)


@pytest.mark.one_cell
def test_without_specforge_it_says_what_to_install(benchmark_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"SpecForge cannot be imported .*make .venv-3.11/.oracle"):
        benchmark_file.main(["--steps", "1"])
