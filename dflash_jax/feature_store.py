"""Target features on disk: those of every conversation once, in shards that are whole or count for nothing.

A folder of `features.folder` holds one cache; its name is a hash of what decides the features. `made_from.json` says what that is,
in which rows they were computed, and for int8 the usual size of every number. A shard (`00000120-0of2.features`: from batch 120 on,
the rows of process 0 of 2) holds conversations one after the other: codes [T, M], then for int8 scales float32 [T, N]. Its seal
(`00000120-0of2.json`, written last) has the batches, and id, tokens and CRC-32 of each conversation. Nothing is compressed: such
numbers gain little, and a conversation is one read at a known place.
"""

import hashlib
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int8

from dflash_jax.config import FeatureDtype, FeaturesConfig
from dflash_jax.errors import DataError

FORMAT = 1
"""raise it when other bytes would be made from the same target and text"""
MADE_FROM = "made_from.json"
OTHER_BYTES = "other bytes than were written"
MAKE = "`python -m dflash_jax cache` with the options of this run"


class Layout(NamedTuple):
    """How a token's features are kept."""

    parts: int
    """N: taps, and the final hidden state where the loss reads it"""
    width: int
    """numbers of each part"""
    dtype: FeatureDtype

    @property
    def numbers(self) -> int:
        """M: numbers of a token."""
        return self.parts * self.width

    @property
    def token_bytes(self) -> int:
        return self.parts * (2 * self.width if self.dtype == "bfloat16" else self.width + 4)

    def arrays(self, data: bytes) -> tuple[np.ndarray, np.ndarray | None]:
        """Codes [T, M] and scales float32 [T, N] (None for bfloat16) of a conversation's bytes."""
        length = len(data) // self.token_bytes
        if self.dtype == "bfloat16":
            return np.frombuffer(data, ml_dtypes.bfloat16).reshape(length, -1), None
        codes = np.frombuffer(data, np.int8, length * self.parts * self.width)
        return codes.reshape(length, -1), np.frombuffer(data, np.float32, offset=codes.nbytes).reshape(length, self.parts)


def encode(
    features_BTM: Float[Array, "B T M"], layout: Layout, sizes_M: Float[Array, " M"] | None
) -> tuple[Float[Array, "B T M"] | Int8[Array, "B T M"], Float[Array, "B T N"] | None]:
    """Features as they are kept: bfloat16, or int8 codes with one float scale a token and part.

    Some dimensions of a tap are a hundred times the others, at every token. One step for all of a tap would round the others away,
    so each number is first divided by its dimension's usual size `sizes_M`.
    """
    if layout.dtype == "bfloat16":
        return features_BTM.astype(jnp.bfloat16), None
    assert sizes_M is not None
    even_BTND = (features_BTM / sizes_M[None, None]).reshape(*features_BTM.shape[:2], layout.parts, layout.width)
    scales_BTN = jnp.maximum(jnp.abs(even_BTND).max(-1), 1e-30) / 127.0
    codes_BTND = jnp.round(even_BTND / scales_BTN[..., None]).astype(jnp.int8)
    return codes_BTND.reshape(features_BTM.shape), scales_BTN


def decode(
    codes_BTM: Int8[Array, "B T M"], scales_BTN: Float[Array, "B T N"], sizes_M: Float[Array, " M"]
) -> Float[Array, "B T M"]:
    """The features of int8 codes, bfloat16: off by half a scale times the dimension's size, and bfloat16's rounding."""
    codes_BTND = codes_BTM.reshape(*scales_BTN.shape, -1).astype(jnp.float32)
    even_BTM = (codes_BTND * scales_BTN[..., None]).reshape(codes_BTM.shape)
    return (even_BTM * sizes_M[None, None]).astype(jnp.bfloat16)


class Shard(NamedTuple):
    """A sealed shard."""

    name: str
    first: int
    """its batches are first..end - 1 of the run that wrote them"""
    end: int
    ids: list[int]
    lengths: list[int]
    """tokens"""
    crcs: list[int]


class ShardWriter:
    """A shard on its way, a context manager: without `seal` it counts for nothing. Raises `DataError` when it cannot be written."""

    def __init__(self, folder: Path, layout: Layout, first: int, process: int, processes: int) -> None:
        self.path = folder / f"{first:08d}-{process}of{processes}.features"
        self._layout, self._first = layout, first
        self._documents: list[tuple[int, int, int]] = []

    def __enter__(self) -> "ShardWriter":
        with written(self.path):
            self.path.with_suffix(".json").unlink(missing_ok=True)  # of a shard that is made again
            self._file = open(self.path, "wb")
        return self

    def write(self, name: int, codes_TM: np.ndarray, scales_TN: np.ndarray | None) -> None:
        """Append the features of the conversation with this id."""
        data = codes_TM.tobytes() + (b"" if scales_TN is None else scales_TN.tobytes())
        with written(self.path):
            self._file.write(data)
        self._documents.append((name, len(codes_TM), _crc(name, data)))

    def seal(self, end: int) -> None:
        """Say that the shard is whole, up to the batch before `end`."""
        ids, lengths, crcs = zip(*self._documents, strict=True) if self._documents else ((), (), ())
        seal = {"first": self._first, "end": end, "ids": ids, "lengths": lengths, "crcs": crcs}
        with written(self.path):
            self._file.close()
            write_whole(self.path.with_suffix(".json"), seal)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what could not be written was said
            self._file.close()


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raises `DataError` where the system cannot write this file of a cache."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}): free some space and give the same command again, or give another "
            "features.folder"
        ) from None


def write_whole(path: Path, content: Any) -> None:
    """A JSON file with its own CRC-32 that appears whole or not at all."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"crc": zlib.crc32(json.dumps(content).encode()), "content": content}) + "\n", encoding="utf-8")
    beside.rename(path)


def read_whole(path: Path) -> Any:
    """The content of such a file. Raises `OSError`, or `ValueError` when it is not what was written."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or zlib.crc32(json.dumps(found.get("content")).encode()) != found.get("crc"):
        raise ValueError(OTHER_BYTES)
    return found["content"]


def sealed(folder: Path, layout: Layout) -> tuple[list[Shard], dict[str, str]]:
    """The whole shards of a folder, and what is wrong with others that have a seal, by their name. Files are not read."""
    whole: dict[tuple[str, int], list[Shard]] = {}
    faults = {}
    for seal in sorted(folder.glob("*.json")):
        named = re.fullmatch(r"(\d+)-\d+of(\d+)\.json", seal.name)
        if not named:
            continue
        path = seal.with_suffix(".features")
        try:
            shard = Shard(path.name, **read_whole(seal))
            have, want = path.stat().st_size, sum(shard.lengths) * layout.token_bytes
            if have != want:
                raise ValueError(f"{have} bytes, not the {want} written")
            if shard.first != int(named[1]):
                raise ValueError("it is another shard, copied")
        except FileNotFoundError:
            faults[path.name] = "it is missing"
        except (OSError, ValueError) as error:
            faults[path.name] = str(error)
        except TypeError:  # what a seal holds, but not of a shard
            faults[path.name] = OTHER_BYTES
        else:
            whole.setdefault((named[1], int(named[2])), []).append(shard)
    together = [shards for (_, processes), shards in whole.items() if len(shards) == processes]
    return [shard for shards in together for shard in shards], faults


def read_shard(folder: Path, layout: Layout, shard: Shard) -> Iterator[bytes]:
    """The bytes of each conversation of a shard. Raises `DataError` for other bytes than were written."""
    start = 0
    for index, length in enumerate(shard.lengths):
        yield _document(folder, layout, shard, index, start)
        start += length


def _document(folder: Path, layout: Layout, shard: Shard, index: int, start: int) -> bytes:
    """Conversation `index` of a shard, which begins `start` tokens into it."""
    path, size = folder / shard.name, shard.lengths[index] * layout.token_bytes
    try:
        with open(path, "rb") as file:
            file.seek(start * layout.token_bytes)
            data = file.read(size)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {MAKE} makes it again if it is gone") from None
    if _crc(shard.ids[index], data) != shard.crcs[index]:
        raise DataError(f"{path} is damaged (conversation {shard.ids[index]}): {MAKE} and --check makes that shard again")
    return data


def _crc(name: int, data: bytes) -> int:
    """CRC-32 of a conversation's features and its id: those of another one are no good."""
    return zlib.crc32(data, name)


class FeatureStore:
    """A whole cache, to be read at random. Raises `DataError` when it is damaged or does not have all of `ids_N`."""

    def __init__(self, folder: Path, layout: Layout, ids_N: np.ndarray) -> None:
        self.folder, self.layout = folder, layout
        self.shards, faults = sealed(folder, layout)
        for name, fault in faults.items():
            raise DataError(f"{folder / name} is damaged ({fault}): {MAKE} makes that shard again")
        parts = [
            (shard.ids, [number] * len(shard.ids), range(len(shard.ids)), np.cumsum([0, *shard.lengths])[:-1])
            for number, shard in enumerate(self.shards)
        ]
        index_4N = np.concatenate([np.zeros((4, 0), np.int64), *(np.asarray(part, np.int64) for part in parts)], axis=1)
        self._index_4N = index_4N[:, np.argsort(index_4N[0])]
        if not np.array_equal(self._index_4N[0], ids_N):
            raise DataError(
                f"{folder} holds the features of {index_4N.shape[1]} of {len(ids_N)} conversations: {MAKE} goes on with it"
            )

    def read(self, names: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Codes and scales (`Layout.arrays`) of the conversations with these ids."""
        found = []
        for place in np.searchsorted(self._index_4N[0], names):
            _, shard, index, start = self._index_4N[:, place].tolist()
            found.append(self.layout.arrays(_document(self.folder, self.layout, self.shards[shard], index, start)))
        return found


def store_folder(config: FeaturesConfig, made_from: dict[str, Any]) -> Path:
    """Where the features that this decides are kept."""
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    return Path(config.folder) / key


def read_made_from(folder: Path) -> dict[str, Any]:
    """What `made_from.json` says. Raises `DataError` when it is damaged."""
    try:
        found: dict[str, Any] = read_whole(folder / MADE_FROM)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / MADE_FROM} is damaged ({error}): delete that folder, and {MAKE} makes it again") from None
    return found


def open_store(config: FeaturesConfig, made_from: dict[str, Any], layout: Layout, ids_N: np.ndarray) -> tuple[FeatureStore, Any]:
    """The whole cache that a run needs, and the sizes that its int8 codes are multiplied with (None for bfloat16).

    Raises `DataError` when there is none (`check_store`), or it is damaged or not all there.
    """
    folder = store_folder(config, made_from)
    if not (folder / MADE_FROM).exists():
        check_store(config, made_from)
    sizes = read_made_from(folder)["sizes"]
    return FeatureStore(folder, layout, ids_N), None if sizes is None else np.asarray(sizes, np.float32)


def check_store(config: FeaturesConfig, made_from: dict[str, Any]) -> None:
    """Raises `DataError` unless some cache there was made from this, which may be a part of what decides the features. It names
    what differs in the nearest one, and the command that makes it."""
    nearest: list[tuple[int, str]] = []
    damaged: list[DataError] = []
    for other in sorted(Path(config.folder).glob(f"*/{MADE_FROM}")):
        try:
            there = read_made_from(other.parent)["made_from"]
        except DataError as fault:
            damaged.append(fault)
            continue
        different = [
            f"{name}: {there.get(name)} there, {made_from[name]} now" for name in made_from if there.get(name) != made_from[name]
        ]
        if not different:
            return
        nearest.append((len(different), f"; the nearest, {other.parent}, differs ({', '.join(different)})"))
    for error in damaged:
        print(f"warning: {error}", file=sys.stderr)
    raise DataError(f"{config.folder} holds no target features for this run{min(nearest)[1] if nearest else ''}: {MAKE} makes them")
