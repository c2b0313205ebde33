"""Which documents share a row."""

import numpy as np
import pytest

from dflash_jax import packing
from dflash_jax.packing import pack


@pytest.mark.parametrize("seed", range(4))
def test_every_document_is_in_one_row_that_has_room(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 41, 500).astype(np.int32)
    rows = pack(lengths, 64, seed, epoch=seed)
    assert sorted(rows.documents_N.tolist()) == list(range(500))
    sizes = [int(lengths[rows.documents(row)].sum()) for row in range(len(rows.starts) - 1)]
    assert max(sizes) <= 64
    assert min(sizes) > 0
    assert sum(sizes) == lengths.sum()
    assert len(sizes) <= 1.06 * lengths.sum() / 64, "little room is left"


def test_against_first_fit_by_hand(monkeypatch):
    """Two rows of ten tokens are open at most: [5] [6], no room for 7, so the fuller one is closed; 3 goes to the first."""
    monkeypatch.setattr(packing, "OPEN_ROWS", 2)
    lengths = np.asarray([5, 6, 7, 3, 4], np.int32)
    monkeypatch.setattr(packing.np.random, "default_rng", lambda seed: type("Sorted", (), {"permutation": staticmethod(np.arange)}))
    rows = pack(lengths, 10, 0, 0)
    assert [rows.documents(row).tolist() for row in range(len(rows.starts) - 1)] == [[1], [0, 3], [2], [4]]


def test_the_order_follows_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(2, 30, 100).astype(np.int32)
    same, *others = (pack(lengths, 64, seed, epoch).documents_N.tolist() for seed, epoch in [(3, 1), (3, 2), (4, 1)])
    assert same == pack(lengths, 64, 3, 1).documents_N.tolist()
    assert same not in others
