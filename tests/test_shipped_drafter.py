"""The drafter in assets/: its size and form, and that it is worth something on the real model without changing its text."""

from pathlib import Path

import pytest
from safetensors import safe_open

import dflash_jax as dj
from dflash_jax.prompts import packaged_prompts

FOLDER = Path(__file__).parents[1] / "assets" / "smollm2-135m-dflash"


def test_size_and_dtype():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 25e6
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.one_cell
def test_it_drafts_well_and_changes_nothing():
    """One prompt of HumanEval and one of chat; the bench has the figures of all."""
    target = dj.load_target("smollm2-135m", dtype="float32")
    drafter = dj.load_drafter(FOLDER, target)
    asked = packaged_prompts("eval", limit=2)
    encoded = [target.tokenizer.encode_chat([{"role": "user", "content": prompt["turns"][0]}]) for prompt in asked]
    out = dj.generate(target, drafter, encoded, max_new_tokens=48, block_size=4)
    assert out.tokens == dj.generate(target, None, encoded, max_new_tokens=48).tokens
    assert out.stats.acceptance_length > 1.4
