"""The drafter against float64 formulas, and the kinds of drafter there are. (Its two verbs: test_train_equals_decode.)"""

import dataclasses
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny_models import BLOCK, DRAFTER, HIDDEN, MASK, TAPS, VOCAB, dense_drafter, dense_target

from dflash_jax.drafter import Drafter, DraftLayer, Execution

pytestmark = pytest.mark.one_cell

B, T, C = 2, 14, 16
# Neighbours, the first position, blocks over the end of the context.
ANCHORS = np.array([[0, 1, 4, 5, 9], [2, 3, 7, 12, 14]], np.int32)
VARIANTS = {
    "plain": {},
    "windows, causal, biases": {"sliding_window": (4, None), "causal": (True, False), "attention_bias": True},
    "own tables, another width": {
        "draft_hidden_dim": 8,
        "own_embedding": True,
        "own_head": True,
        "sliding_window": (None, 3),
        "num_heads": 2,
        "head_dim": 12,
    },
}


def normal(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(drafter, length=T):
    width = drafter.config.draft_hidden_dim
    return normal(1, (B, length, len(TAPS) * HIDDEN)), normal(2, (B, ANCHORS.shape[1], BLOCK, width))


@partial(jax.jit, static_argnames=("drafter", "chunk", "remat"))
def forward(params, taps, anchors, block, key, drafter, chunk, remat):
    return drafter.forward(params, taps, anchors, block, Execution(chunk, remat, key))


def run(drafter, taps, block, *, key=None, chunk=None, remat=False):
    return forward(drafter.params, taps, jnp.asarray(ANCHORS), block, key, drafter=drafter, chunk=chunk, remat=remat)


@partial(jax.jit, static_argnames="drafter")
def verbs(params, taps, extend_positions, block, positions, cache, drafter):
    for part in (slice(0, 5), slice(5, T)):  # as decoding does: piece by piece
        cache = drafter.extend_context(params, taps[:, part], extend_positions[:, part], cache)
    return drafter.propose(params, block, positions, cache)


@pytest.mark.parametrize("name", VARIANTS)
def test_training_pass_equals_formulas(name):
    drafter = dense_drafter(**VARIANTS[name])
    taps, block = inputs(drafter)
    hidden, entropies = jax.tree.map(np.asarray, run(drafter, taps, block))
    for b, a in np.ndindex(*ANCHORS.shape):
        wanted = reference.draft_hidden(drafter.params, drafter.config, taps[b], int(ANCHORS[b, a]), block[b, a])
        np.testing.assert_allclose(hidden[b, a], wanted, rtol=1e-3, atol=1e-4, err_msg=f"anchor {ANCHORS[b, a]}")
    assert len(entropies) == 2
    assert all(e.shape == ANCHORS.shape and (np.asarray(e) > 0).all() for e in entropies)


def test_how_it_is_run_does_not_change_the_result():
    """Chunks, remat, padding of the row after the last anchor."""
    drafter = dense_drafter()
    taps, block = inputs(drafter)
    wanted, wanted_entropies = run(drafter, taps, block)
    padded = np.concatenate([taps, np.float32(1e3) * normal(9, (B, 3, taps.shape[-1]))], axis=1)
    for got in (run(drafter, taps, block, chunk=2, remat=True), run(drafter, padded, block)):
        np.testing.assert_allclose(got[0], wanted, rtol=1e-4, atol=1e-5)
        for g, w in zip(got[1], wanted_entropies, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_positions_make_slots_differ():
    """Mask slots have equal inputs, so at one position they would draft one token; at their own positions they do not."""
    drafter = dense_drafter()
    taps, _ = inputs(drafter)
    block = np.broadcast_to(normal(5, (1, 1, HIDDEN)), (B, BLOCK, HIDDEN))
    context = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    cache, own = drafter.init_cache(B, C), np.broadcast_to(np.arange(9, 9 + BLOCK, dtype=np.int32), (B, BLOCK))

    def between(positions):
        hidden = np.asarray(verbs(drafter.params, taps, context, block, positions, cache, drafter=drafter))
        return min(np.abs(hidden[:, i] - hidden[:, j]).max() for i in range(BLOCK) for j in range(i))

    assert between(own) > 1e-2
    assert between(np.full((B, BLOCK), 9, np.int32)) < 1e-5


def test_block_inputs():
    """[anchor, mask, ..., mask] from the target's table, from an own table, and with a learned mask."""
    table = normal(6, (VOCAB, HIDDEN))
    anchors = np.asarray([[3, 7], [0, MASK]], np.int32)

    def check(drafter, rows, mask):
        embed = jax.jit(lambda params, ids: drafter.embed_block(params, ids, BLOCK, lambda tokens: jnp.asarray(table)[tokens]))
        block = np.asarray(embed(drafter.params, anchors))
        assert block.shape == (2, 2, BLOCK, rows.shape[1])
        np.testing.assert_array_equal(block[:, :, 0], rows[anchors])
        np.testing.assert_array_equal(block[:, :, 1:], np.broadcast_to(mask, block[:, :, 1:].shape))

    check(dense_drafter(), table, table[MASK])
    own = dense_drafter(own_embedding=True, own_head=True, draft_hidden_dim=8)
    rows = np.asarray(own.params["embed_tokens"][...])
    check(own, rows, rows[MASK])
    learned = dense_drafter(learned_mask_embedding=True, mask_token_id=None)
    assert learned.params["mask_embedding"][...].shape == (HIDDEN,)
    check(learned, table, learned.params["mask_embedding"][...])


def logits(drafter, hidden, target, target_params):
    compute = lambda params, hidden, target_params: drafter.unembed(
        hidden, drafter.head(params, target, target_params), target, target_params
    )
    return np.asarray(jax.jit(compute)(drafter.params, hidden, target_params))


def test_head():
    hidden = normal(7, (2, BLOCK, HIDDEN))
    target, borrowed, own = dense_target(), dense_drafter(), dense_drafter(own_head=True)
    lent = logits(borrowed, hidden, target, target.params)
    np.testing.assert_array_equal(lent, jax.jit(target.unembed)(target.params, hidden))
    wanted = np.asarray(hidden, np.float64) @ np.asarray(own.params["lm_head"][...], np.float64).T
    np.testing.assert_allclose(logits(own, hidden, None, None), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own_head", [False, True])
def test_draft_vocabulary(own_head):
    """The logits of the named tokens and no others, also from a target that has no head to cut."""
    hidden = normal(7, (2, BLOCK, HIDDEN))
    ids = (0, 3, 4, VOCAB - 1)
    target, whole = dense_target(), dense_drafter(own_head=own_head)
    cut = Drafter(dataclasses.replace(whole.config, draft_token_ids=ids), whole.params)
    no_head = types.SimpleNamespace(unembed=target.unembed)
    wanted = logits(whole, hidden, target, target.params)[..., list(ids)]
    for lender in (target, no_head):
        np.testing.assert_allclose(logits(cut, hidden, lender, target.params), wanted, rtol=1e-5, atol=1e-6)
    places = jnp.asarray([[0, 3], [1, 1]], jnp.int32)
    np.testing.assert_array_equal(cut.token_ids(places), [[0, VOCAB - 1], [3, 3]])
    np.testing.assert_array_equal(whole.token_ids(places), places)


def test_only_what_the_config_owns_exists():
    assert {"embed_tokens", "lm_head", "mask_embedding"}.isdisjoint(dense_drafter().params.keys())
    assert {"embed_tokens", "lm_head"} <= dense_drafter(own_embedding=True, own_head=True).params.keys()


def test_dropout():
    """Off without a key; with one, drawn anew for every key, layer and place, and of mean one."""
    drafter = dense_drafter(dropout=0.4)
    taps, block = inputs(drafter)
    wanted, _ = run(dense_drafter(), taps, block)
    anything = jnp.asarray(taps)
    assert drafter.model(drafter.params).layers[0]._drop(anything, Execution(), 0) is anything
    first, again, other = (run(drafter, taps, block, key=jax.random.key(i))[0] for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.asarray(first) - wanted).max() > 0.1
    assert np.abs(np.asarray(first) - other).max() > 0.1

    @jax.jit
    def dropped(key):
        layer = drafter.model(drafter.params).layers[0]
        return [layer._drop(jnp.ones((4000,)), Execution(dropout_key=key), place) for place in range(4)]

    draws = [np.asarray(x) for x in dropped(jax.random.key(0))]
    for i, x in enumerate(draws):
        np.testing.assert_allclose(np.unique(x), [0, 1 / 0.6], rtol=1e-6)
        assert abs(x.mean() - 1) < 0.07
        assert all((x != y).mean() > 0.3 for y in draws[:i])


def test_every_layer_drops_in_places_of_its_own(monkeypatch):
    """Place p in place of a mask multiplies by 1 + p, which is what other output kernels would do."""
    drafter = dense_drafter()
    taps, block = inputs(drafter)

    def scaled(path, x):
        name = jax.tree_util.keystr(path)
        layer, part = "['layers'][1]" in name, ["'o_proj'" in name, "'down_proj'" in name]
        return x * (1 + 2 * layer + part.index(True)) if any(part) else x

    wanted, _ = run(Drafter(drafter.config, jax.tree_util.tree_map_with_path(scaled, drafter.params)), taps, block)
    monkeypatch.setattr(DraftLayer, "_drop", lambda self, x, execution, place: x * jnp.asarray(1 + place, jnp.float32))
    jitted = jax.jit(lambda params, *rows: drafter.forward(params, *rows, Execution())[0])
    np.testing.assert_allclose(jitted(drafter.params, taps, ANCHORS, block), wanted, rtol=1e-4, atol=1e-5)


def test_as_a_static_argument_it_stands_for_its_config():
    one, other = dense_drafter(1), dense_drafter(2)
    assert one == other
    assert hash(one) == hash(other)
    assert one != dense_drafter(temperature=0.5)
    assert dense_drafter() != object()


def test_random_parameters_have_the_shapes_of_the_abstract_module():
    own = {"own_embedding": True, "own_head": True, "learned_mask_embedding": True}
    made = jax.eval_shape(lambda: Drafter.random(jax.random.key(0), dataclasses.replace(DRAFTER, **own)).params)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, dense_drafter(**own).params)
