"""Our numbers equal z-lab's: logits, gradients, cached drafting and generated tokens, over folders that each side writes."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import dense_target
from tiny_zlab import (
    MASK,
    SLIDING,
    TARGET_LAYERS,
    VOCAB,
    answer,
    block_hidden,
    draw_cases,
    equal_gradients,
    load,
    make_drafter,
    randomise,
    save,
    teach,
    zlab,
)

import dflash_jax as dj
from dflash_jax.blocks import make_blocks
from dflash_jax.config import Config, TrainConfig
from dflash_jax.hf import load_drafter, load_target, save_drafter
from dflash_jax.train_step import block_loss

pytestmark = pytest.mark.oracle

CASES = draw_cases()
WITH_GRADIENTS = ["llama3, biases", "sliding layers causal", "sliding, none causal", "sliding, all causal, yarn"]
PROMPT, ROUNDS, CAPACITY = 12, 6, 128
TRAIN = Config(train=TrainConfig(anchor_chunk=1, logit_chunk=7))


@cache
def lender(width):
    """A target of ours whose embedding and head the drafters use; it computes nothing else here."""
    return dense_target(hidden_size=width, num_layers=TARGET_LAYERS)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A drafter that z-lab's class wrote and we loaded."""
    theirs = make_drafter(**CASES[request.param])
    folder = save(theirs, tmp_path_factory.mktemp("zlab") / "d")
    target = lender(theirs.config.hidden_size)
    return SimpleNamespace(theirs=theirs, target=target, ours=load_drafter(folder, target))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def table(x):
    return np.asarray(x[...])


def test_cases_hold_the_corners():
    """What the parity below speaks for."""
    cases = list(CASES.values())
    for name, values in {
        "num_hidden_layers": {1, 2, 3, 4, 5},
        "block_size": {2, 16},
        "layer_types": {"sliding_attention", "full_attention"},
    }.items():
        assert values <= set(np.ravel([value for case in cases for value in np.ravel(case[name])]).tolist()), name
    assert {1, 8} <= {len(case["dflash_config"]["target_layer_ids"]) for case in cases}
    assert {1, 2, 3, 4} <= {case["num_attention_heads"] // case["num_key_value_heads"] for case in cases}
    assert sum(case["head_dim"] * case["num_attention_heads"] != case["hidden_size"] for case in cases) >= 6


# ---------------------------------------------------------------------------------------------------------------------
# Drafting


@partial(jax.jit, static_argnames="drafter")
def extend_and_propose(params, cache, taps, positions, block, block_positions, drafter):
    cache = drafter.extend_context(params, taps, positions, cache)
    return drafter.propose(params, block, block_positions, cache), cache


def test_cached_drafting(case):
    """Round after round: the logits of every block over the context that random acceptance leaves, each row with its own.

    We write the features of rejected tokens too, as our decoder does: the next round writes over them before a block sees them.
    """
    drafter, config, head_VD = case.ours, case.ours.config, table(case.target.head_kernel(case.target.params))
    slots, width = config.block_size, len(config.target_layer_ids) * config.target_hidden_dim
    random = np.random.default_rng(0)
    caches = [zlab().model._make_cache(case.theirs.config) for _ in range(2)]
    cache, new = drafter.init_cache(2, CAPACITY), max(PROMPT, slots)
    taps_BTM, starts_B, committed_B = normal(1, 2, new, width), np.zeros(2, int), np.array([PROMPT, 1])
    patterns, seen = [[1, slots], [slots, 1], *random.integers(1, slots + 1, (ROUNDS, 2))], []
    for i, committed in enumerate(patterns):
        offered = committed_B if i == 0 else np.array([slots, slots])
        positions_BT = np.where(np.arange(new)[None] < offered[:, None], starts_B[:, None] + np.arange(new)[None], -1)
        starts_B = starts_B + committed_B
        block_BKD = normal((2, i), 2, slots, config.draft_hidden_dim)
        positions_BK = starts_B[:, None] + np.arange(slots)[None]
        placed = positions_BT.astype(np.int32), block_BKD, positions_BK.astype(np.int32)
        got_BKD, cache = extend_and_propose(drafter.params, cache, taps_BTM, *placed, drafter=drafter)
        for row, their_cache in enumerate(caches):
            with zlab().torch.inference_mode():
                context = taps_BTM[row, : committed_B[row]]
                want = block_hidden(case.theirs, context, block_BKD[row], starts_B[row], their_cache).numpy()
                zlab().model._crop_to(their_cache, starts_B[row])
            seen.append(want @ head_VD.T)
            np.testing.assert_allclose(np.asarray(got_BKD[row]) @ head_VD.T, seen[-1], atol=1e-4, rtol=0, err_msg=f"round {i}")
        taps_BTM, committed_B = normal((3, i), 2, new, width), np.asarray(committed)
    assert np.std(seen) > 0.5, "logits so flat that the comparison says little"


def test_ours_loads_in_their_class_and_drafts_the_same(case, tmp_path):
    """What we write of what they wrote: no complaint of their loader, the same tensors bit for bit, the same logits."""
    save_drafter(case.ours, tmp_path / "d", dtype="float32")
    again, complaints = load(tmp_path / "d")
    assert not complaints
    for (name, wrote), (_, read) in zip(case.theirs.state_dict().items(), again.state_dict().items(), strict=True):
        assert zlab().torch.equal(wrote, read), name
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        assert getattr(again, name) == getattr(case.theirs, name)
    taps = normal(1, PROMPT, len(again.target_layer_ids) * again.config.hidden_size)
    block = normal(2, again.block_size, again.config.hidden_size)
    with zlab().torch.inference_mode():
        was, now = (block_hidden(model, taps, block, PROMPT) for model in (case.theirs, again))
    assert zlab().torch.equal(was, now)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@partial(jax.jit, static_argnames=("drafter", "target"))
def loss_and_gradient(params, target_params, taps, blocks, drafter, target):
    def loss(params):
        sums, _ = block_loss(drafter, params, target, target_params, taps, blocks, jax.random.key(0), TRAIN)
        return sums.loss

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("case", WITH_GRADIENTS, indirect=True)
def test_gradients(case, tmp_path):
    """The loss of one block a row through a shared head, and its gradient towards every parameter, as a checkpoint names them."""
    torch, drafter, target, config = zlab().torch, case.ours, case.target, case.ours.config
    slots, length = config.block_size, PROMPT + config.block_size
    taps_BTM = normal(1, 2, length, len(config.target_layer_ids) * config.target_hidden_dim)  # those after an anchor are unseen
    tokens_BT = np.random.default_rng(2).integers(0, VOCAB, (2, length)).astype(np.int32)
    anchors = [PROMPT - 1, 3]
    ones = jnp.ones((2, 1), bool)
    blocks = make_blocks(jnp.asarray(tokens_BT), jnp.ones((2, length), bool), jnp.asarray(anchors, jnp.int32)[:, None], ones, slots)
    got, grads = loss_and_gradient(drafter.params, target.params, taps_BTM, blocks, drafter=drafter, target=target)

    case.theirs.zero_grad()
    head, embedding = (torch.tensor(table(x)) for x in (target.head_kernel(target.params), target.params["embed_tokens"]))
    weights, nats = torch.exp(-torch.arange(slots - 1) / config.loss_decay_gamma), 0.0
    for row, anchor in enumerate(anchors):
        tokens = torch.tensor(tokens_BT[row, anchor : anchor + slots]).long()
        block = embedding[torch.where(torch.arange(slots) == 0, tokens, MASK)]
        hidden = block_hidden(case.theirs, taps_BTM[row, :anchor], block, anchor)
        nats += (weights * torch.nn.functional.cross_entropy(hidden[1:] @ head.T, tokens[1:], reduction="none")).sum()
    want = nats / (2 * weights.sum())
    want.backward()

    assert float(got) == pytest.approx(want.item(), rel=1e-5)
    equal_gradients(config, grads, case.theirs, tmp_path / "grads")


# ---------------------------------------------------------------------------------------------------------------------
# Decoding

NEW, SLOTS = 40, 5
PROMPTS = [np.random.default_rng(length).integers(0, VOCAB, length).tolist() for length in (1, 5, 9, 16)]


@pytest.fixture(scope="module", params=["full", "sliding"])
def pair(request, tmp_path_factory):
    """A target and a half-taught drafter of theirs, and what we load from their folders."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    target = randomise(zlab().Target(zlab().Config(**common, num_hidden_layers=4, head_dim=12, eos_token_id=[MASK])), 1)
    layers = SLIDING | {"layer_types": SLIDING["layer_types"][:2]} if request.param == "sliding" else {}
    special = {"mask_token_id": 3, "target_layer_ids": [2, 0]}
    shape = {"num_hidden_layers": 2, "head_dim": 16, "num_target_layers": 4, "block_size": SLOTS}
    drafter = make_drafter(2, **common, **shape, **layers, dflash_config=special)
    teach(target, drafter, [(p + answer(target, drafter, p, NEW, ())[0])[: NEW + 1] for p in PROMPTS], steps=100)
    folder = tmp_path_factory.mktemp("pair")
    ours = load_target(save(target, folder / "target"), "float32")
    return SimpleNamespace(target=target, drafter=drafter, our_target=ours, ours=load_drafter(save(drafter, folder / "d"), ours))


def test_generate(pair):
    """Greedy tokens of a batch, and how many each verify pass gives; to the length cap, and to a token inside the answers."""
    whole = dj.generate(pair.our_target, pair.ours, PROMPTS, NEW, stop_token_ids=())
    inside = (whole.tokens[0][NEW // 2], whole.tokens[2][NEW // 3])
    cut, seen = dj.generate(pair.our_target, pair.ours, PROMPTS, NEW, stop_token_ids=inside), []
    for out, stops in ((whole, ()), (cut, inside)):
        for row, prompt in enumerate(PROMPTS):
            tokens, lengths = answer(pair.target, pair.drafter, prompt, NEW, stops)
            assert out.tokens[row] == tokens
            stats = out.stats.rows[row]
            assert (stats.rounds, stats.emitted) == (len(lengths), sum(lengths))
            seen += lengths
            if lengths:  # the last pass may be cut among its drafted tokens, and so emit no bonus token
                last = stats.accepted_histogram - np.bincount(np.array(lengths[:-1], int) - 1, minlength=SLOTS)
                assert sorted(last) == [0] * (SLOTS - 1) + [1]
                assert np.argmax(last) in (lengths[-1] - 1, lengths[-1])
        assert ("stop" in out.finish_reason) == bool(stops)
    assert set(seen) == set(range(1, SLOTS + 1)), "drafts are accepted, in part and whole"
