"""The order of an epoch: which documents share a row, and which rows a batch. Pure functions of lengths, seed and epoch."""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

FILLER_ID = -1
OPEN_ROWS = 64
"""rows that first-fit looks at: more fill rows a little better, and take longer"""


class Rows(NamedTuple):
    """Rows of documents: row r holds `documents_N[starts[r] : starts[r + 1]]`."""

    documents_N: np.ndarray
    starts: np.ndarray

    def documents(self, row: int) -> np.ndarray:
        return self.documents_N[self.starts[row] : self.starts[row + 1]]


def one_a_row(count: int) -> Rows:
    """Each document in a row of its own."""
    return Rows(np.arange(count), np.arange(count + 1))


def pack(lengths_N: np.ndarray, capacity: int, seed: int, epoch: int) -> Rows:
    """All documents in rows of at most `capacity` tokens, by first-fit over the `OPEN_ROWS` rows that still have room.

    The documents come in a random order of (seed, epoch). When none of the open rows has room, the fullest one is closed.
    Raises nothing: every length is at most `capacity`.
    """
    order = np.random.default_rng([seed, epoch, 1]).permutation(len(lengths_N))
    shortest = int(lengths_N.min())
    room: list[int] = []
    rows: list[list[int]] = []
    closed: list[list[int]] = []

    def close(place: int) -> None:
        closed.append(rows.pop(place))
        del room[place]

    for document, length in zip(order.tolist(), lengths_N[order].tolist(), strict=True):
        place = next((place for place, left in enumerate(room) if left >= length), len(room))
        if place == len(room):
            if place == OPEN_ROWS:
                close(room.index(min(room)))
            place = len(room)
            room.append(capacity)
            rows.append([])
        rows[place].append(document)
        room[place] -= length
        if room[place] < shortest:
            close(place)
    closed += rows
    sizes = [len(row) for row in closed]
    return Rows(np.asarray([document for row in closed for document in row]), np.concatenate([[0], np.cumsum(sizes)]))


def plan_epoch(buckets_N: np.ndarray, num_buckets: int, batch_size: int, seed: int, epoch: int) -> list[tuple[int, np.ndarray]]:
    """The batches of an epoch as (bucket, row indices [batch_size]), a pure function of its arguments.

    Rows are shuffled, grouped by bucket, and the full batches are shuffled again. Rows that do not fill a batch move to the next
    wider bucket, and the last batch is filled with `FILLER_ID`: every row comes exactly once.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(buckets_N))
    batches: list[tuple[int, np.ndarray]] = []
    rest = order[:0]
    for bucket in range(num_buckets):
        rows = np.concatenate([rest, order[buckets_N[order] == bucket]])
        full = len(rows) // batch_size * batch_size
        batches += [(bucket, chunk) for chunk in rows[:full].reshape(-1, batch_size)]
        rest = rows[full:]
    if len(rest):
        filler = np.full(batch_size - len(rest), FILLER_ID, dtype=rest.dtype)
        batches.append((int(buckets_N[rest].max()), np.concatenate([rest, filler])))
    return [batches[i] for i in random.permutation(len(batches))]


def documents(batch: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, int, int]]:
    """(row, first slot, tokens, id) of every document of a batch, packed or not."""
    if "doc_BT" not in batch:
        for row, (name, length) in enumerate(zip(batch["id_B"].tolist(), batch["length_B"].tolist(), strict=True)):
            if name != FILLER_ID:
                yield row, 0, length, name
        return
    for row, doc_T in enumerate(batch["doc_BT"]):
        edges = [0, *(np.flatnonzero(np.diff(doc_T)) + 1).tolist(), len(doc_T)]
        for start, end in itertools.pairwise(edges):
            if doc_T[start] != FILLER_ID:
                yield row, start, end - start, int(doc_T[start])
