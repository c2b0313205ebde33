"""What a config refuses, and the defaults that other engines must agree with."""

import dataclasses

import pytest
from tiny_models import DRAFTER, TARGET

from dflash_jax.drafter import check_drafter_fits
from dflash_jax.errors import ConfigError
from dflash_jax.model_config import default_target_layer_ids, loss_decay_gamma


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5: half to even
        (28, 1, (14,)),
        (29, 1, (14,)),
        (28, 2, (1, 25)),
        (5, 2, (1, 2)),
    ],
)
def test_default_taps(layers, taps, ids):
    assert default_target_layer_ids(layers, taps) == ids
    assert dataclasses.replace(DRAFTER, num_target_layers=layers, target_layer_ids=ids).num_target_sampled_layers == taps


@pytest.mark.parametrize(("layers", "taps"), [(4, 2), (8, 6), (30, 0)])
def test_taps_that_do_not_fit(layers, taps):
    with pytest.raises(ConfigError, match=r"taps do not fit|at least one tap"):
        default_target_layer_ids(layers, taps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_layers": 0}, "num_draft_layers is 0: a drafter needs"),
        ({"block_size": 1}, "block_size is 1: a block holds its anchor"),
        ({"target_layer_ids": (1, 1)}, r"target_layer_ids \[1, 1\] name a layer twice"),
        ({"target_layer_ids": (0, 2)}, r"target_layer_ids \[0, 2\] must lie in 0\.\.1"),
        ({"sliding_window": (4,)}, "one entry for each of the 2 draft layers"),
        ({"causal": (True,)}, "one entry for each of the 2 draft layers"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0: it must be at least 1"),
        ({"mlp_dim": -4}, "mlp_dim is -4: it must be at least 1"),
        ({"head_dim": 7}, "head_dim is 7: positions rotate pairs of dimensions"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"loss_decay_gamma": 0.0}, r"loss_decay_gamma is 0\.0: it must be positive"),
        ({"dropout": 1.0}, r"dropout is 1\.0: it must lie in \[0, 1\)"),
        ({"temperature": -1.0}, r"temperature is -1\.0: it must not be negative"),
        ({"draft_token_ids": (3, 61)}, r"draft_token_ids must be different ids in 0\.\.60, ascending"),
        ({"draft_token_ids": (-1, 3)}, "draft_token_ids must be"),
        ({"draft_token_ids": (3, 3)}, "draft_token_ids must be"),
        ({"draft_token_ids": (4, 3)}, "draft_token_ids must be"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"mask_token_id": 61}, "mask_token_id 61 is outside the 61 embedding rows"),
        ({"draft_hidden_dim": 8}, "draft_hidden_dim 8 differs from target_hidden_dim 16"),
    ],
)
def test_refused_drafters(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DRAFTER, **changes)


def test_the_papers_decay_for_a_block_size():
    assert [loss_decay_gamma(size) for size in (4, 8, 10, 13, 16)] == [2, 4, 5, 6, 7]


def test_embeddings_must_be_scaled_alike():
    """Gemma and Granite multiply their embeddings; a drafter that reads them must have learned the same sizes."""
    gemma = dataclasses.replace(TARGET, embedding_scale=32**0.5)
    check_drafter_fits(dataclasses.replace(DRAFTER, input_embedding_scale=5.65625), gemma)  # as bfloat16 keeps the number
    own = {"draft_hidden_dim": 8, "own_embedding": True, "own_head": True}
    check_drafter_fits(dataclasses.replace(DRAFTER, **own), gemma)
    with pytest.raises(ConfigError, match=r"multiplies embeddings by 1\.0 .* but the target by 5\.65"):
        check_drafter_fits(DRAFTER, gemma)


@pytest.mark.parametrize("use", [{"stop_token_ids": (3, 60)}, {"pad_token_id": 60}])
def test_a_mask_token_with_another_use(use):
    check_drafter_fits(DRAFTER, TARGET)
    with pytest.raises(ConfigError, match="mask_token_id 60 is a stop or pad token of the target"):
        check_drafter_fits(DRAFTER, dataclasses.replace(TARGET, **use))
