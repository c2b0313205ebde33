"""Conversations as tokens on disk: written once as ArrayRecord shards with a manifest, then read at random.

A folder of `data.records` holds one set of records: `manifest.json` (what they were made from, counts, what was dropped and why),
shards of records, `index.npy` (id and length of each) and `supervised.npy` (how often each token is supervised). A record is int32:
the id (place of the line among all lines read), the number of tokens T, T token ids; then the loss mask as ceil(T / 8) bytes.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from tqdm import tqdm

from dflash_jax.config import DataConfig
from dflash_jax.conversations import NO_ANSWER, check_messages, expand_files, read_jsonl, tokenize_conversation
from dflash_jax.distributed import check_shared, is_main, text_from_main, wait_for_main
from dflash_jax.errors import ConfigError, DataError, DFlashError
from dflash_jax.lock import keep_for_reading, only_process
from dflash_jax.tokenizer import Tokenizer

FORMAT = 1
"""raise it when other records would be made from the same files"""
MANIFEST = "manifest.json"
SHARD_BYTES = 1 << 28
TOO_SHORT = "no two supervised tokens in a row"
CUT_AWAY = "answer lies past max_length"


class Record(NamedTuple):
    """A conversation as tokens."""

    id: int
    tokens_T: np.ndarray
    mask_T: np.ndarray
    """True on what the assistant wrote"""

    def to_bytes(self) -> bytes:
        header = np.asarray([self.id, len(self.tokens_T)], np.int32)
        return header.tobytes() + self.tokens_T.astype(np.int32).tobytes() + np.packbits(self.mask_T).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Record":
        place, length = (int(x) for x in np.frombuffer(data, np.int32, 2))
        tokens_T = np.frombuffer(data, np.int32, length, offset=8)
        mask_T = np.unpackbits(np.frombuffer(data, np.uint8, offset=8 + 4 * length), count=length).astype(bool)
        return cls(place, tokens_T, mask_T)


class Records:
    """The records of a folder, which is kept from being cleaned meanwhile. Only ids and lengths are in memory.

    Raises `DataError` when the folder is not what its manifest says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            keep_for_reading(folder, self)
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            self.report: dict[str, int] = manifest["report"]
            self.digest: str = manifest["digest"]
            for shard in manifest["shards"]:
                size = (folder / shard["name"]).stat().st_size
                if size != shard["bytes"]:
                    raise ValueError(f"{shard['name']} has {size} bytes, not the {shard['bytes']} written")
            self.ids_N, self.lengths_N = np.load(folder / "index.npy").T
            self._supervised_V: np.ndarray = np.load(folder / "supervised.npy")
            if len(self.ids_N) != (rows := sum(shard["rows"] for shard in manifest["shards"])):
                raise ValueError(f"index.npy has {len(self.ids_N)} rows, not the {rows} written")
        except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(error) from None
        self._source = grain.sources.ArrayRecordDataSource([str(folder / shard["name"]) for shard in manifest["shards"]])

    def __len__(self) -> int:
        return len(self.ids_N)

    def read(self, places: Sequence[int]) -> list[Record]:
        """Records by their place, 0..len - 1."""
        try:
            return [Record.from_bytes(data) for data in self._source.__getitems__(places)] if len(places) else []
        except RuntimeError as error:  # a status of the library's C++ part
            raise self._damaged(str(error)[:200]) from None

    def supervised_counts(self) -> np.ndarray:
        """How often each token id is supervised, int64 [V]."""
        return self._supervised_V

    def _damaged(self, what: object) -> DataError:
        return DataError(f"the records in {self.folder} are damaged ({what}): delete that folder, it is made again")


def training_files(config: DataConfig) -> dict[str, os.stat_result]:
    """The files of `data.train`, and what the system says of them. Raises `ConfigError` or `DataError` when one is missing."""
    if not config.train:
        raise ConfigError("data.train names no file: write one with `python -m dflash_jax regenerate` and give its path")
    found = {}
    for name in expand_files(config.train, "data.train"):
        try:
            found[name] = os.stat(name)
        except OSError as error:
            raise DataError(f"{name} cannot be read ({error.strerror}): give the path of a JSONL file") from None
    return found


def open_records(config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> Records:
    """The records of `config.train`, written first where they are not there yet.

    The first process decides which they are, and writes them while the others wait: these need not even have the text. They are
    made again when a file (its path, size or date), the tokenizer, its template or `max_length` changes, and those of the files as
    they were go then, unless a run on this host still reads them. A folder appears whole or not at all; what a killed process has
    left is begun again. Raises `DataError` (file and line where there is one), and `ConfigError` where processes do not share
    `config.records`.
    """
    root, key = Path(config.records), ""
    if is_main():
        files = training_files(config)
        source = _description(files, tokenizer, vocab_size, config.max_length)
        key = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:16]
        partial = root / f"{key}.partial"
        if not (root / key).exists():
            partial.mkdir(parents=True, exist_ok=True)
            with only_process(partial):
                if not (root / key).exists():
                    _write(partial, list(files), tokenizer, source)
                    partial.rename(root / key)
            _clean(root, root / key, source)
    wait_for_main("records")
    check_shared(root, "data.records")
    return Records(root / text_from_main(key))


def _clean(root: Path, new: Path, source: Mapping[str, Any]) -> None:
    """Remove what killed runs have left, and records of the files of `new` as they were, where nobody writes or reads them."""
    names = [entry["file"] for entry in source["files"]]
    for folder in root.iterdir():
        if folder == new or not re.fullmatch(r"[0-9a-f]{16}(\.partial)?", folder.name):
            continue
        if folder.suffix != ".partial":
            try:
                made_from = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["made_from"]
                same_files = [entry["file"] for entry in made_from["files"]] == names and made_from["files"] != source["files"]
            except (OSError, KeyError, TypeError, ValueError):
                continue  # damaged: who opens it is told
            if not same_files:
                continue
        with contextlib.suppress(ConfigError, OSError), only_process(folder):  # it is in use, or somebody else's
            shutil.rmtree(folder)


def _description(files: Mapping[str, os.stat_result], tokenizer: Tokenizer, vocab_size: int, max_length: int) -> dict[str, Any]:
    """All that decides the records."""
    inputs = [
        {"file": str(Path(name).resolve()), "bytes": found.st_size, "modified_ns": found.st_mtime_ns}
        for name, found in files.items()
    ]
    return {
        "format": FORMAT,
        "files": inputs,
        "tokenizer": hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
        "special_tokens": tokenizer.special_tokens,
        "stop_token_ids": sorted(tokenizer.stop_token_ids),
        "vocab_size": vocab_size,
        "max_length": max_length,
    }


def _write(folder: Path, files: Sequence[str], tokenizer: Tokenizer, source: Mapping[str, Any]) -> None:
    """Tokenize the files into an empty folder; the manifest comes last."""
    for left in folder.iterdir():
        left.unlink()
    counts = ("read", "kept", "cut", NO_ANSWER, TOO_SHORT, CUT_AWAY, "tokens", "supervised_tokens", "cut_tokens")
    report = dict.fromkeys(counts, 0)
    shards, index, digest = _Shards(folder), array("i"), hashlib.sha256()
    supervised_V = np.zeros(source["vocab_size"], np.int64)
    sizes = [entry["bytes"] for entry in source["files"]]
    with tqdm(total=sum(sizes), desc="tokenizing", unit="B", unit_scale=True) as bar:
        for file, name in enumerate(files):

            def seen(place: int, before: int = sum(sizes[:file])) -> None:
                bar.update(before + place - bar.n)

            for number, row in read_jsonl(name, seen=seen):
                record = _tokenized(tokenizer, row, f"{name}:{number}", source, report)
                report["read"] += 1
                if record is not None:
                    data = record.to_bytes()
                    shards.write(data)
                    digest.update(data)
                    index.extend((record.id, len(record.tokens_T)))
                    np.add.at(supervised_V, record.tokens_T[record.mask_T], 1)
    shards.close()
    if not index:
        raise DataError(
            f"{', '.join(files)}: no conversation can be trained on ({report}): each needs an assistant turn within data.max_length"
        )
    np.save(folder / "index.npy", np.asarray(index, np.int32).reshape(-1, 2))
    np.save(folder / "supervised.npy", supervised_V)
    manifest = {"made_from": source, "report": report, "digest": digest.hexdigest(), "shards": shards.written}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Shards:
    """ArrayRecord files of about `SHARD_BYTES` (before compression) each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, list[dict[str, Any]]()
        self._writer: Any = None
        self._rows = self._bytes = 0

    def write(self, data: bytes) -> None:
        if self._writer is None:
            self._path = self.folder / f"records-{len(self.written):05d}.arrayrecord"
            self._writer = self._tried(lambda: ArrayRecordWriter(str(self._path), "group_size:1"))
        self._tried(lambda: self._writer.write(data))
        self._rows, self._bytes = self._rows + 1, self._bytes + len(data)
        if self._bytes >= SHARD_BYTES:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._tried(self._writer.close)
            self.written.append({"name": self._path.name, "rows": self._rows, "bytes": self._path.stat().st_size})
            self._writer, self._rows, self._bytes = None, 0, 0

    def _tried(self, act: Any) -> Any:
        try:
            return act()
        except RuntimeError as error:  # a status of the library's C++ part
            message = f"{self._path} cannot be written ({str(error)[:200]}): free some space, or give another data.records"
            raise DataError(message) from None


def _tokenized(
    tokenizer: Tokenizer, row: Mapping[str, Any], where: str, source: Mapping[str, Any], report: dict[str, int]
) -> Record | None:
    """The record of a line, or None for one with nothing to learn from; counted in the report."""
    messages = check_messages(row, where)
    if not any(message["role"] == "assistant" for message in messages):
        report[NO_ANSWER] += 1
        return None
    answer, known = row.get("answer_tokens"), range(source["vocab_size"])  # a target's: often more than its tokenizer has names for
    if answer is not None and not (isinstance(answer, list) and all(type(t) is int and t in known for t in answer)):
        raise DataError(f"{where}: answer_tokens must be a list of token ids in 0..{known[-1]}")
    try:
        tokens, mask = tokenize_conversation(tokenizer, messages, row.get("finish_reason"), answer)
    except DFlashError as error:
        raise DataError(f"{where}: {error}") from None
    if tokens.max(initial=0) not in known:
        raise DataError(f"{where}: the token id {tokens.max()} has no embedding, ids lie in 0..{known[-1]}: wrong tokenizer?")
    if not (mask[:-1] & mask[1:]).any():  # an anchor needs itself and its successor supervised
        report[TOO_SHORT] += 1
        return None
    cut = max(len(tokens) - source["max_length"], 0)
    report["cut"], report["cut_tokens"] = report["cut"] + (cut > 0), report["cut_tokens"] + cut
    tokens, mask = tokens[: source["max_length"]], mask[: source["max_length"]]
    if not (mask[:-1] & mask[1:]).any():
        report[CUT_AWAY] += 1
        return None
    report["kept"] += 1
    report["tokens"] += len(tokens)
    report["supervised_tokens"] += int(mask.sum())
    return Record(report["read"], tokens, mask)
