"""Training data: conversations as JSONL, tokenized once, served by Grain as bucketed batches that resume exactly."""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from dflash_jax.config import DataConfig
from dflash_jax.conversations import NO_ANSWER, check_messages, read_jsonl, read_prompts, tokenize_conversation
from dflash_jax.errors import ConfigError, DataError, DFlashError
from dflash_jax.tokenizer import Tokenizer

__all__ = ["ConversationDataset", "plan_epoch", "read_jsonl", "read_prompts", "tokenize_conversation"]

TOO_SHORT = "no two supervised tokens in a row"
FILLER_ID = -1


def plan_epoch(buckets_N: np.ndarray, num_buckets: int, batch_size: int, seed: int, epoch: int) -> list[tuple[int, np.ndarray]]:
    """The batches of an epoch as (bucket, row indices [batch_size]), a pure function of its arguments.

    Rows are shuffled, grouped by bucket, and the full batches are shuffled again. Rows that do not fill a batch move to the next
    wider bucket, and the last batch is filled with `FILLER_ID`: every row comes exactly once, and all epochs have as many batches.
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


class ConversationDataset:
    """Tokenized conversations in memory, as batches for one process of a run.

    JSONL lines hold `messages` and optionally `finish_reason` and `answer_tokens` (see `tokenize_conversation`). Rows longer than
    `max_length` are cut, rows with nothing to learn from are dropped; `report` counts both.

    A batch is a dict of numpy arrays, its rows those of `batch_size` that `process_rows` names (None: this process's equal share):
    tokens_BT int32 (padded with `pad_token_id`), loss_mask_BT bool (False on padding), length_B int32, and id_B int32, the place of
    the row among all lines read, from 0. A filler row (id -1) has length 1 and no loss. T is one of `config.buckets`, the same on
    all processes at a step.

    Raises `DataError` (file and line where there is one) and `ConfigError` for sizes that do not fit together.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        pad_token_id: int = 0,
        process_index: int = 0,
        process_count: int = 1,
        vocab_size: int | None = None,
        process_rows: np.ndarray | None = None,
    ) -> None:
        _check(config, process_count)
        self.config, self.pad_token_id = config, pad_token_id
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        share = config.batch_size // process_count
        self.process_rows = np.arange(share) + process_index * share if process_rows is None else process_rows
        self.buckets = tuple(sorted(config.buckets))
        self.report = dict.fromkeys(("read", "kept", "cut", NO_ANSWER, TOO_SHORT, "tokens", "supervised_tokens"), 0)
        self._tokens: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        ids: list[int] = []
        for path in config.train:
            for number, row in read_jsonl(path):
                if self._add(tokenizer, row, f"{path}:{number}"):
                    ids.append(self.report["read"])
                self.report["read"] += 1
        if not ids:
            files = ", ".join(config.train)
            raise DataError(f"{files}: no conversation can be trained on ({self.report}): each needs an assistant turn")
        self.ids_N = np.asarray(ids, dtype=np.int32)
        self.lengths_N = np.asarray([len(tokens) for tokens in self._tokens], dtype=np.int32)
        self.buckets_N = np.searchsorted(self.buckets, self.lengths_N).astype(np.int32)
        self.batches_per_epoch = len(self._plan(0))
        # threads of the iterator ask for neighbouring batches, which share a plan
        self._cached_plan = functools.lru_cache(maxsize=2)(self._plan)

    def __len__(self) -> int:
        """Rows kept."""
        return len(self._tokens)

    def iterator(self, num_epochs: int | None = None) -> grain.DatasetIterator:
        """A Grain iterator over the batches of `num_epochs` (None: the config's), each epoch in its own order.

        `get_state()` is a small dict and `set_state()` continues exactly after the batch that was taken last.
        """
        epochs = self.config.num_epochs if num_epochs is None else num_epochs
        source = _BatchSource(self, epochs * self.batches_per_epoch)
        return iter(grain.MapDataset.source(source).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of the rows and of what orders them: a resumed run can tell that its data changed."""
        digest = hashlib.sha256(f"{self.buckets} {self.config.batch_size} {self.config.seed}".encode())
        for tokens, mask in zip(self._tokens, self._masks, strict=True):
            digest.update(tokens.tobytes() + mask.tobytes())
        return digest.hexdigest()[:16]

    def frequent_tokens(self, count: int) -> tuple[int, ...]:
        """The `count` token ids that are supervised most often, or all that are, ascending; of equals the lower id comes first."""
        seen_V = np.zeros(self.vocab_size, np.int64)
        for tokens, mask in zip(self._tokens, self._masks, strict=True):
            seen_V += np.bincount(tokens[mask], minlength=self.vocab_size)
        frequent = np.argsort(-seen_V, kind="stable")[: min(count, np.count_nonzero(seen_V))]
        return tuple(sorted(frequent.tolist()))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step, counted from 0 over all epochs."""
        epoch, index = divmod(step, self.batches_per_epoch)
        bucket, rows = self._cached_plan(epoch)[index]
        return self._padded(rows[self.process_rows], self.buckets[bucket])

    def sample(self) -> dict[str, np.ndarray]:
        """The rows of the first batch, all of them on every process: typical text to measure sizes on."""
        bucket, rows = self._cached_plan(0)[0]
        return self._padded(rows, self.buckets[bucket])

    def _padded(self, rows: np.ndarray, width: int) -> dict[str, np.ndarray]:
        shape = (len(rows), width)
        batch = {
            "tokens_BT": np.full(shape, self.pad_token_id, dtype=np.int32),
            "loss_mask_BT": np.zeros(shape, dtype=np.bool_),
            "length_B": np.ones(len(rows), dtype=np.int32),  # a filler keeps one token, so that no row attends to nothing
            "id_B": np.full(len(rows), FILLER_ID, dtype=np.int32),
        }
        for place, row in enumerate(rows):
            if row != FILLER_ID:
                length = self.lengths_N[row]
                batch["tokens_BT"][place, :length] = self._tokens[row]
                batch["loss_mask_BT"][place, :length] = self._masks[row]
                batch["length_B"][place], batch["id_B"][place] = length, self.ids_N[row]
        return batch

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        return plan_epoch(self.buckets_N, len(self.buckets), self.config.batch_size, self.config.seed, epoch)

    def _add(self, tokenizer: Tokenizer, row: Mapping[str, Any], where: str) -> bool:
        messages = check_messages(row, where)
        if not any(message["role"] == "assistant" for message in messages):
            self.report[NO_ANSWER] += 1
            return False
        answer = row.get("answer_tokens")
        known = range(self.vocab_size)  # a target's rows: often more than its tokenizer has names for
        if answer is not None and not (isinstance(answer, list) and all(type(t) is int and t in known for t in answer)):
            raise DataError(f"{where}: answer_tokens must be a list of token ids in 0..{self.vocab_size - 1}")
        try:
            tokens, mask = tokenize_conversation(tokenizer, messages, row.get("finish_reason"), answer)
        except DFlashError as error:
            raise DataError(f"{where}: {error}") from None
        if tokens.max(initial=0) >= self.vocab_size:
            raise DataError(
                f"{where}: the token id {tokens.max()} has no embedding, ids lie in 0..{self.vocab_size - 1}: wrong tokenizer?"
            )
        if len(tokens) > self.config.max_length:
            self.report["cut"] += 1
            tokens, mask = tokens[: self.config.max_length], mask[: self.config.max_length]
        if not (mask[:-1] & mask[1:]).any():  # an anchor needs itself and its successor supervised
            self.report[TOO_SHORT] += 1
            return False
        self._tokens.append(tokens)
        self._masks.append(mask)
        self.report["kept"] += 1
        self.report["tokens"] += len(tokens)
        self.report["supervised_tokens"] += int(mask.sum())
        return True


class _BatchSource:
    """What Grain reads from: the batch of an index."""

    def __init__(self, dataset: ConversationDataset, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return self._dataset.batch(int(index))


def _check(config: DataConfig, process_count: int) -> None:
    if not config.train:
        raise ConfigError(
            "data.train names no file: give JSONL files of conversations (`python -m dflash_jax regenerate` writes them)"
        )
    if not config.buckets or min(config.buckets) < 2:
        raise ConfigError(f"data.buckets is {config.buckets}: give padded row lengths of at least 2")
    if config.max_length > max(config.buckets):
        raise ConfigError(f"data.max_length {config.max_length} exceeds the widest of data.buckets {config.buckets}: add a bucket")
    if config.batch_size < 1 or config.batch_size % process_count:
        raise ConfigError(f"data.batch_size {config.batch_size} cannot be shared by {process_count} processes: make it a multiple")
