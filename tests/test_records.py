"""Text tokenized once: what is kept, when it is made again, and that nothing half written is used."""

import dataclasses
import gc
import json
import os

import numpy as np
import pytest
from test_data import TOKENIZER, assistant, fifty, over, user, write_lines
from tiny_run import files_of_at_most
from tiny_text import TEMPLATE, tiny_tokenizer

from dflash_jax import records
from dflash_jax.conversations import tokenize_conversation
from dflash_jax.errors import ConfigError, DataError
from dflash_jax.lock import only_process
from dflash_jax.records import MANIFEST, Record, open_records

pytestmark = pytest.mark.one_cell

VOCAB = TOKENIZER.vocab_size


@pytest.fixture
def counted(monkeypatch):
    """How many conversations have been tokenized."""
    calls = []

    def tokenize(*args):
        calls.append(args)
        return tokenize_conversation(*args)

    monkeypatch.setattr(records, "tokenize_conversation", tokenize)
    return calls


@pytest.mark.parametrize("length", [1, 8, 13])
def test_a_record_survives_bytes(length):
    random = np.random.default_rng(length)
    tokens, mask = random.integers(0, 2**31, length).astype(np.int32), random.integers(0, 2, length).astype(bool)
    name, *arrays = Record.from_bytes(Record(7, tokens, mask).to_bytes())
    assert name == 7
    for got, want in zip(arrays, (tokens, mask), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_text_is_tokenized_once(tmp_path, counted, monkeypatch):
    """Several shards, read at random; the next run reads them."""
    monkeypatch.setattr(records, "SHARD_BYTES", 2000)
    config = fifty(tmp_path)
    first = open_records(config, TOKENIZER, VOCAB)
    assert len(counted) == len(first) == 50
    again = open_records(config, TOKENIZER, VOCAB)
    assert len(counted) == 50
    assert again.folder == first.folder
    assert [path.name for path in (tmp_path / "records").iterdir()] == [first.folder.name], "nothing else is left"
    manifest = json.loads((first.folder / MANIFEST).read_text())
    assert len(manifest["shards"]) > 3
    assert sum(shard["rows"] for shard in manifest["shards"]) == 50
    assert manifest["report"] == again.report
    assert [entry["file"] for entry in manifest["made_from"]["files"]] == config.train
    places = [49, 3, 30, 3]
    counts_V = np.zeros(VOCAB, np.int64)
    for place in range(50):
        tokens, mask = tokenize_conversation(TOKENIZER, [user("a"), assistant("x" * (1 + (7 * place) % 70))])
        tokens, mask = tokens[:64], mask[:64]
        np.add.at(counts_V, tokens[mask], 1)
        assert (again.ids_N[place], again.lengths_N[place]) == (place, len(tokens))
        for record, asked in zip(again.read(places), places, strict=True):
            if asked == place:
                assert record.id == place
                np.testing.assert_array_equal(record.tokens_T, tokens)
                np.testing.assert_array_equal(record.mask_T, mask)
    np.testing.assert_array_equal(again.supervised_counts(), counts_V)


def test_what_decides_the_tokens_makes_them_again(tmp_path, counted):
    config = over(tmp_path, [{"messages": [user("a"), assistant("hello" * 10)]}])
    same = open_records(config, TOKENIZER, VOCAB)
    for change in ({"seed": 8}, {"packing": True}, {"batch_size": 1}, {"num_epochs": 9}):
        assert open_records(dataclasses.replace(config, **change), TOKENIZER, VOCAB).folder == same.folder
    assert len(counted) == 1
    bracketed = TEMPLATE.replace("+ message['content'] +", "+ (message['content']) +")  # another text, of the same effect
    changed = [
        open_records(dataclasses.replace(config, max_length=30), TOKENIZER, VOCAB),
        open_records(config, tiny_tokenizer(template=bracketed), VOCAB),
        open_records(config, tiny_tokenizer(pre="qwen2"), VOCAB),
        open_records(config, TOKENIZER, VOCAB + 1),
    ]
    folders = {same.folder, *(made.folder for made in changed)}
    assert (len(folders), len(counted)) == (5, 5)
    os.utime(config.train[0], ns=(1, 1))  # written anew
    assert open_records(config, TOKENIZER, VOCAB).folder not in folders


def test_what_a_killed_run_has_left_is_begun_again(tmp_path):
    """A broken line stops the first try as a kill would: after some records, before the manifest."""
    good = {"messages": [user("a"), assistant("hello")]}
    config = over(tmp_path, [good] * 20 + [{"massages": good["messages"]}])
    stamp = os.stat(config.train[0])
    with pytest.raises(DataError, match=r"t\.jsonl:21"):
        open_records(config, TOKENIZER, VOCAB)
    (left,) = (tmp_path / "records").iterdir()
    assert left.name.endswith(".partial")
    assert list(left.iterdir())
    (left / "records-00007.arrayrecord").write_bytes(b"of an older try")
    write_lines(tmp_path / "t.jsonl", [good] * 21)  # mended: of the same size, and with the date below the same folder
    os.utime(config.train[0], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    found = open_records(config, TOKENIZER, VOCAB)
    assert found.folder.name == left.name.removesuffix(".partial")
    assert not left.exists()
    assert sorted(path.name for path in found.folder.iterdir()) == [
        "index.npy", MANIFEST, "records-00000.arrayrecord", "supervised.npy",
    ]  # fmt: skip


def test_two_runs_do_not_write_the_same_records(tmp_path):
    config = over(tmp_path, [{"messages": [user("a"), assistant("hello")]}])
    folder = open_records(config, TOKENIZER, VOCAB).folder
    partial = folder.rename(folder.with_name(f"{folder.name}.partial"))
    with only_process(partial), pytest.raises(ConfigError, match=r"\.partial is being written by another process: wait for it"):
        open_records(config, TOKENIZER, VOCAB)


DAMAGE = {
    "records-00000.arrayrecord": [b"", b"x" * 100, None],
    "manifest.json": [b"", b"{}", b"[1]", None],
    "index.npy": [b"", b"x" * 100, None],
    "supervised.npy": [b"", None],
}


def test_damaged_records_are_refused(tmp_path):
    """Every file of them, cut, exchanged or gone, and an index of fewer rows: the mend is always the same."""
    config = over(tmp_path, [{"messages": [user(text), assistant("hello")]} for text in "ab"])
    folder = open_records(config, TOKENIZER, VOCAB).folder
    whole = np.load(folder / "index.npy")
    for name, contents in DAMAGE.items():
        kept = (folder / name).read_bytes()
        for content in contents:
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content)
            with pytest.raises(DataError, match=r"the records in .* are damaged \(.*\): delete that folder, it is made again"):
                open_records(config, TOKENIZER, VOCAB)
        (folder / name).write_bytes(kept)
    np.save(folder / "index.npy", whole[:1])
    with pytest.raises(DataError, match=r"index\.npy has 1 rows, not the 2 written"):
        open_records(config, TOKENIZER, VOCAB)


def test_a_full_disk_is_named(tmp_path):
    config = over(tmp_path, [{"messages": [user("a"), assistant("hello")]}])
    message = r"arrayrecord cannot be written .*: free some space, or give another data\.records"
    with files_of_at_most(1000), pytest.raises(DataError, match=message):
        open_records(config, TOKENIZER, VOCAB)
    assert len(open_records(config, TOKENIZER, VOCAB)) == 1


def test_records_of_the_text_as_it_was_are_removed(tmp_path):
    """Unless a run still reads them; those of other text, or of the same as it is, stay, and so does what is no record folder."""
    config = over(tmp_path, [{"messages": [user("a"), assistant("hello")]}])
    root, other = tmp_path / "records", write_lines(tmp_path / "other.jsonl", [{"messages": [user("b"), assistant("hello")]}])
    (root / "notes.partial").mkdir(parents=True)
    (root / f"{0:016x}.partial").mkdir()  # of a killed run
    busy = root / f"{1:016x}.partial"
    busy.mkdir()

    def names():
        return {path.name for path in root.iterdir()}

    with only_process(busy):
        first = open_records(config, TOKENIZER, VOCAB)
        shorter = open_records(dataclasses.replace(config, max_length=30), TOKENIZER, VOCAB).folder.name
        apart = open_records(dataclasses.replace(config, train=[other]), TOKENIZER, VOCAB).folder.name
        assert names() == {"notes.partial", busy.name, first.folder.name, shorter, apart}

    def again(stamp):
        os.utime(config.train[0], ns=(stamp, stamp))  # written anew
        return open_records(config, TOKENIZER, VOCAB).folder.name

    second = again(1)
    assert names() == {"notes.partial", first.folder.name, apart, second}, "the first is still read"
    del first
    gc.collect()
    third = again(2)
    assert names() == {"notes.partial", apart, third}
