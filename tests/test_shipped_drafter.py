"""The drafter in assets/: its size and form, and that it is worth something on the real model without changing its text."""

from pathlib import Path

import pytest
from safetensors import safe_open

import dflash_jax as dj
from dflash_jax.generate import pool
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
    # each prompt greedy and sampled, in one batch: by `match` the texts are plain decoding's
    batch, options = [*encoded, *encoded], {"temperature": [0.0, 0.0, 0.7, 0.7], "seed": [0, 0, 1, 2], "max_new_tokens": 48}
    out = dj.generate(target, drafter, batch, block_size=4, **options)
    assert out.tokens == dj.generate(target, None, batch, **options).tokens
    assert out.tokens[:2] != out.tokens[2:]
    assert pool(out.stats.rows[:2]).acceptance_length > 1.4
    assert pool(out.stats.rows[2:]).acceptance_length > 1.2
