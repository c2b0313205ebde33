"""The drafter in assets/: its size and form, and that it is worth something on the real model without changing its text."""

from pathlib import Path

import pytest
from safetensors import safe_open

import dflash_jax as dj
from dflash_jax.divergence import first_divergence
from dflash_jax.generate import pool
from dflash_jax.prompts import packaged_prompts

FOLDER = Path(__file__).parents[1] / "assets" / "smollm2-135m-dflash"


def test_size_and_dtype():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 25e6
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.fixture(scope="module")
def target():
    return dj.load_target("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def encoded(target):
    asked = packaged_prompts("eval", limit=2)  # one of HumanEval and one of chat; the bench has the figures of all
    return [target.tokenizer.encode_chat([{"role": "user", "content": prompt["turns"][0]}]) for prompt in asked]


@pytest.mark.one_cell
def test_it_drafts_well_and_changes_nothing(target, encoded):
    """Greedy and sampled rows in one batch, one of them with a stop token: by `match` the texts are plain decoding's."""
    drafter = dj.load_drafter(FOLDER, target)
    batch = [*encoded, *encoded]
    options = {"temperature": [0.0, 0.0, 0.7, 1.3], "seed": [0, 0, 1, 2], "max_new_tokens": 48, "verify": "match"}
    plain = dj.generate(target, None, batch, **options, stop_token_ids=[]).tokens
    stop = next(token for token in plain[3][16:] if not any(token in text for text in (*plain[:3], plain[3][:16])))
    out = dj.generate(target, drafter, batch, block_size=4, **options, stop_token_ids=[stop])
    assert out.tokens == [*plain[:3], plain[3][: plain[3].index(stop) + 1]]
    assert out.finish_reason == ["length"] * 3 + ["stop"]
    assert out.tokens[0] != out.tokens[2]
    assert pool(out.stats.rows[:2]).acceptance_length > 1.4
    assert pool(out.stats.rows[2:]).acceptance_length > 1.15


@pytest.mark.one_cell
def test_bfloat16_texts_part_at_near_ties_only(target, encoded):
    """Passes of another width round otherwise. A text that is wrong is no near-tie."""
    fast_target = target.with_dtype("bfloat16")
    drafter = dj.load_drafter(FOLDER, fast_target, dtype="bfloat16")
    options = {"max_new_tokens": 48, "stop_token_ids": []}
    texts = dj.generate(fast_target, drafter, encoded, block_size=4, **options).tokens
    plain = dj.generate(fast_target, None, encoded, **options).tokens
    parted = [first_divergence(target, *each) for each in zip(encoded, texts, plain, strict=True)]
    assert all(place is None or place.near_tie for place in parted), parted
    wrong = [*texts[0][:9], 4321, *texts[0][10:]]
    assert not first_divergence(target, encoded[0], texts[0], wrong).near_tie
