"""Packed = separate: a document trains the same among others in a row as alone in its own, and sees nothing of them."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import BLOCK, VOCAB, dense_drafter, dense_target, table_target
from tiny_run import leaves

from dflash_jax import drafter as drafter_module
from dflash_jax.blocks import document_starts, make_blocks, sample_anchors
from dflash_jax.config import Config, TrainConfig
from dflash_jax.errors import ConfigError
from dflash_jax.layers import rope_frequencies
from dflash_jax.targets import dense as dense_module
from dflash_jax.train_step import Batch, block_loss, target_features

pytestmark = pytest.mark.one_cell

ROWS, LENGTH = 3, 24
CONFIG = Config(train=TrainConfig(anchor_chunk=10, logit_chunk=512))


def squared_angles(rope, head_dim, positions):
    """Rotary tables that also tell pairs of the same distance apart: with the real ones a row's offset would not show."""
    frequencies = jnp.asarray(rope_frequencies(rope, head_dim))
    angles = jnp.square(positions.astype(jnp.float32))[..., None] * frequencies.reshape((1,) * positions.ndim + frequencies.shape)
    return jnp.cos(angles), jnp.sin(angles)


def random_documents(random):
    """Rows of documents (tokens, mask) of 2 to 12 tokens, with padding at the end of some rows."""
    rows = []
    for _ in range(ROWS):
        lengths, left = [], LENGTH - int(random.integers(0, 3))
        while left > 1:
            lengths.append(min(int(random.integers(2, 13)), left))
            left -= lengths[-1]
        # many begin supervised, so that neighbours make pairs across the border
        rows.append([(random.integers(0, VOCAB, n), np.arange(n) >= random.choice([0, n // 3])) for n in lengths])
    return rows


def as_batch(rows):
    """Documents of each row side by side; a document's id is its place among all."""
    tokens, mask = np.zeros((len(rows), LENGTH), np.int32), np.zeros((len(rows), LENGTH), bool)
    doc, count = np.full((len(rows), LENGTH), -1, np.int32), 0
    for row, documents in enumerate(rows):
        start = 0
        for document, supervised in documents:
            place = slice(start, start := start + len(document))
            tokens[row, place], mask[row, place], doc[row, place], count = document, supervised, count, count + 1
    return tokens, mask, doc


def packed_and_separate(seed):
    print(f"seed {seed}")  # shown when a test fails
    rows = random_documents(np.random.default_rng(seed))
    return as_batch(rows), as_batch([[document] for row in rows for document in row])


def losses(target, drafter):
    """Jitted: (tokens, mask, doc or None) -> loss sums and the gradient of every drafter parameter. Every anchor counts."""

    @jax.jit
    def run(params, tokens_BT, mask_BT, doc_BT, length_B):
        starts_BT = None if doc_BT is None else document_starts(doc_BT)
        anchors_BA, valid_BA = sample_anchors(jax.random.key(0), mask_BT, LENGTH, starts_BT)
        blocks = make_blocks(tokens_BT, mask_BT, anchors_BA, valid_BA, BLOCK, starts_BT)
        taps_BTM = target_features(target, target.params, Batch(tokens_BT, mask_BT, length_B, doc_BT), (0, 1))

        def loss(params):
            sums, _ = block_loss(drafter, params, target, target.params, taps_BTM, blocks, jax.random.key(0), CONFIG)
            return sums.weighted, sums

        return jax.grad(loss, has_aux=True)(params)

    def sums_and_gradients(tokens, mask, doc, packed):
        length_B = (doc >= 0).sum(1).astype(np.int32)
        return run(drafter.params, *(jnp.asarray(x) for x in (tokens, mask)), jnp.asarray(doc) if packed else None, length_B)

    return sums_and_gradients


def test_packed_equals_separate(monkeypatch):
    """Loss and the gradient of every parameter, with layers that see all and layers with windows, in chunks of anchors."""
    monkeypatch.setattr(drafter_module, "rope_tables", squared_angles)
    monkeypatch.setattr(dense_module, "rope_tables", squared_angles)
    run = losses(dense_target(sliding_window=(3, None)), dense_drafter(num_draft_layers=1, sliding_window=(4,), causal=(False,)))
    packed, separate = packed_and_separate(seed=time.time_ns())
    (got_grads, got), (want_grads, want) = run(*packed, True), run(*separate, False)
    assert want.blocks > 2 * ROWS
    assert len(separate[0]) > ROWS, "several documents a row"
    assert want.slots > want.blocks
    for name, ours, theirs in zip(want._fields, got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)
    got_grads = leaves(got_grads)
    for name, theirs in leaves(want_grads).items():
        assert np.abs(theirs).max() > 1e-4, name
        np.testing.assert_allclose(got_grads[name], theirs, atol=3e-5 * np.abs(theirs).max(), rtol=0, err_msg=name)


def test_a_target_that_cannot_keep_documents_apart_is_refused():
    """Never silently wrong: its `extend` would let the second document of a row see the first."""
    tokens_BT, doc_BT = jnp.zeros((1, 4), jnp.int32), jnp.asarray([[0, 0, 1, 1]], jnp.int32)
    batch = Batch(tokens_BT, tokens_BT == 0, jnp.asarray([4], jnp.int32), doc_BT)
    target = table_target()
    with pytest.raises(ConfigError, match=r"TableTarget has no read_documents.*: set data\.packing false"):
        target_features(target, target.params, batch, (0,))
    alone = jax.eval_shape(lambda: target_features(target, target.params, batch._replace(doc_BT=None), (0,)))
    assert alone.shape == (1, 4, 16)


def test_layers_in_a_loop_equal_layers_one_by_one():
    """Bit for bit: runs of layers of four kinds, layers above the last tap, taps in any order."""
    target = dense_target(num_layers=7, sliding_window=(None, None, 3, 3, 3, None, None), layers_without_rope=(1,))
    tokens_BT, _, doc_BT = (jnp.asarray(x) for x in packed_and_separate(seed=time.time_ns())[0])
    starts_BT = document_starts(doc_BT)

    @jax.jit
    def read(params):
        return [
            target.read_documents(params, tokens_BT, starts_BT, (4, 0, 5), collect) for collect in (None, lambda params: params)
        ]

    (hidden, taps), (hidden_of_loop, taps_of_loop) = read(target.params)
    np.testing.assert_array_equal(hidden_of_loop, hidden)
    np.testing.assert_array_equal(taps_of_loop, taps)
    assert len({part.tobytes() for part in np.split(np.asarray(taps), 3, axis=-1)}) == 3
