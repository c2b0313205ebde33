"""Training data: conversations, tokenized once, served by Grain as batches that resume exactly."""

import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import numpy as np
from jax.sharding import Mesh

from dflash_jax.config import Config, DataConfig
from dflash_jax.conversations import NO_ANSWER
from dflash_jax.errors import ConfigError
from dflash_jax.packing import FILLER_ID, OPEN_ROWS, Rows, one_a_row, pack, plan_epoch
from dflash_jax.records import CUT_AWAY, TOO_SHORT, open_records
from dflash_jax.sharding import process_rows
from dflash_jax.targets import DenseTarget
from dflash_jax.tokenizer import Tokenizer


class Plan(NamedTuple):
    """An epoch."""

    rows: Rows
    batches: list[tuple[int, np.ndarray]]
    """see `plan_epoch`"""


class ConversationDataset:
    """Tokenized conversations (`records`), as batches for one process of a run.

    JSONL lines hold `messages` and optionally `finish_reason` and `answer_tokens` (see `tokenize_conversation`). Conversations
    longer than `max_length` are cut, those with nothing to learn from dropped; `report` counts both.

    A batch is a dict of numpy arrays, its rows those of `batch_size` that `process_rows` names (None: all):
    tokens_BT int32 (padded with `pad_token_id`), loss_mask_BT bool (False on padding), length_B int32 (tokens), and id_B int32, the
    place of the row's first conversation among all lines read, from 0. With `packing` a row holds several conversations, and
    doc_BT int32 is that of every slot, -1 on padding. A filler row (id -1) has length 1 and no loss. T is one of `config.buckets`
    (the widest with `packing`), the same on all processes at a step.

    Raises `DataError` (file and line where there is one) and `ConfigError` for sizes that do not fit together.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        pad_token_id: int = 0,
        vocab_size: int | None = None,
        process_rows: np.ndarray | None = None,
    ) -> None:
        check_sizes(config)
        self.config, self.pad_token_id = config, pad_token_id
        self.process_rows = np.arange(config.batch_size) if process_rows is None else process_rows
        self.buckets = tuple(sorted(config.buckets))
        vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.records = open_records(config, tokenizer, vocab_size)
        self.report, self.lengths_N = self.records.report, self.records.lengths_N
        self.buckets_N = np.searchsorted(self.buckets, self.lengths_N)
        # threads of the iterator ask for neighbouring batches, which share a plan
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)
        self._ends: list[int] = []  # steps up to the end of each epoch that was asked for

    def __len__(self) -> int:
        """Conversations kept."""
        return len(self.records)

    def steps_in(self, epochs: int) -> int:
        """Batches of the first epochs. Packed ones differ a little in how many they have."""
        while len(self._ends) < epochs:
            self._ends.append(self.steps_in(len(self._ends)) + len(self._plan(len(self._ends)).batches))
        return self._ends[epochs - 1] if epochs else 0

    def widths(self) -> list[int]:
        """Slots a row of the first epoch's batches."""
        return [self.buckets[bucket] for bucket, _ in self._plan(0).batches]

    def iterator(
        self, steps: int | None = None, read: Callable[[Any], Any] = lambda batch: batch, prefetch: int = 8
    ) -> grain.DatasetIterator:
        """A Grain iterator over so many batches (None: those of the config's epochs), each epoch in its own order.
        `prefetch` of them are made ahead, with what `read` adds to them.

        `get_state()` is a small dict and `set_state()` continues exactly after the batch that was taken last.
        """
        source = _BatchSource(self, self.steps_in(self.config.num_epochs) if steps is None else steps)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        return iter(grain.MapDataset.source(source).map(read).to_iter_dataset(options))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of the rows and of what orders them: a resumed run can tell that its data changed."""
        packing = OPEN_ROWS if self.config.packing else 0
        order = f"{self.buckets} {self.config.batch_size} {self.config.seed} {packing} {self.records.digest}"
        return hashlib.sha256(order.encode()).hexdigest()[:16]

    def frequent_tokens(self, count: int) -> tuple[int, ...]:
        """The `count` token ids that are supervised most often, or all that are, ascending; of equals the lower id comes first."""
        seen_V = self.records.supervised_counts()
        frequent = np.argsort(-seen_V, kind="stable")[: min(count, np.count_nonzero(seen_V))]
        return tuple(sorted(frequent.tolist()))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step, counted from 0 over all epochs."""
        epoch = 0
        while step >= self.steps_in(epoch + 1):
            epoch += 1
        plan = self._plan(epoch)
        bucket, rows = plan.batches[step - self.steps_in(epoch)]
        return self._filled(plan.rows, rows[self.process_rows], bucket)

    def sample(self, count: int) -> dict[str, np.ndarray]:
        """At most `count` whole conversations, one a row, the same on every process: typical text to measure sizes on."""
        rows = one_a_row(len(self))
        bucket, chosen = self._batches(self.buckets_N, epoch=0)[0]
        batch = self._filled(rows, chosen[:count], bucket)
        batch.pop("doc_BT", None)
        return batch

    def summary(self) -> str:
        """What was read, what was dropped and why, and how full the rows are."""
        r, plan = self.report, self._plan(0)
        dropped = ", ".join(f"{r[reason]} {reason}" for reason in (NO_ANSWER, TOO_SHORT, CUT_AWAY) if r[reason]) or "none"
        slots = sum(self.buckets[bucket] * len(rows) for bucket, rows in plan.batches)
        return (
            f"{r['kept']} of {r['read']} conversations, {r['tokens']} tokens ({r['supervised_tokens']} supervised); "
            f"{r['cut']} cut at {self.config.max_length} tokens ({r['cut_tokens']} tokens); dropped: {dropped}\n"
            f"rows: {len(self) / (len(plan.rows.starts) - 1):.2f} conversations a row, {1 - r['tokens'] / slots:.1%} padding; "
            f"records in {self.records.folder}"
        )

    def _make_plan(self, epoch: int) -> Plan:
        config = self.config
        if not config.packing:
            return Plan(one_a_row(len(self)), self._batches(self.buckets_N, epoch))
        rows = pack(self.lengths_N, self.buckets[-1], config.seed, epoch)
        widest_R = np.full(len(rows.starts) - 1, len(self.buckets) - 1)  # one shape: few rows would gain from a narrower one
        return Plan(rows, self._batches(widest_R, epoch))

    def _batches(self, buckets_R: np.ndarray, epoch: int) -> list[tuple[int, np.ndarray]]:
        return plan_epoch(buckets_R, len(self.buckets), self.config.batch_size, self.config.seed, epoch)

    def _filled(self, rows: Rows, chosen: np.ndarray, bucket: int) -> dict[str, np.ndarray]:
        shape = (len(chosen), self.buckets[bucket])
        batch = {
            "tokens_BT": np.full(shape, self.pad_token_id, dtype=np.int32),
            "loss_mask_BT": np.zeros(shape, dtype=np.bool_),
            "length_B": np.ones(len(chosen), dtype=np.int32),  # a filler keeps one token, so that no row attends to nothing
            "id_B": np.full(len(chosen), FILLER_ID, dtype=np.int32),
        }
        if self.config.packing:
            batch["doc_BT"] = np.full(shape, FILLER_ID, dtype=np.int32)
        places = [rows.documents(row).tolist() if row != FILLER_ID else [] for row in chosen.tolist()]
        records = iter(self.records.read([document for row in places for document in row]))
        for row, documents in enumerate(places):
            start = 0
            for record in (next(records) for _ in documents):
                slots = slice(start, start := start + len(record.tokens_T))
                batch["tokens_BT"][row, slots], batch["loss_mask_BT"][row, slots] = record.tokens_T, record.mask_T
                if self.config.packing:
                    batch["doc_BT"][row, slots] = record.id
                if slots.start == 0:
                    batch["id_B"][row] = record.id
                batch["length_B"][row] = start
        return batch


def training_data(config: Config, target: DenseTarget, mesh: Mesh) -> ConversationDataset:
    """The text of a run as this process reads it. Raises `ConfigError` also for rows that the target has no positions for."""
    pad, most = target.config.pad_token_id, target.config.max_position
    dataset = ConversationDataset(
        config.data,
        target.tokenizer,
        pad if pad is not None and 0 <= pad < target.config.vocab_size else 0,
        target.config.vocab_size,
        process_rows(mesh, config.data.batch_size),
    )
    longest = int(dataset.lengths_N.max())
    if longest > most:
        raise ConfigError(
            f"data.max_length is {config.data.max_length} and there are rows of {longest} tokens, but the target's context has "
            f"{most}: lower it"
        )
    return dataset


class _BatchSource:
    """What Grain reads from: the batch of an index."""

    def __init__(self, dataset: ConversationDataset, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return self._dataset.batch(int(index))


def check_sizes(config: DataConfig) -> None:
    """Raises `ConfigError` for lengths, buckets and batches that do not fit together."""
    if not config.buckets or min(config.buckets) < 2:
        raise ConfigError(f"data.buckets is {config.buckets}: give padded row lengths of at least 2")
    if config.max_length > max(config.buckets):
        raise ConfigError(f"data.max_length {config.max_length} exceeds the widest of data.buckets {config.buckets}: add a bucket")
    if config.batch_size < 1:
        raise ConfigError(f"data.batch_size is {config.batch_size}: it must be at least 1")
