"""Target features on disk: they train as those of the step do, survive kills, and are refused where they are not the run's."""

import dataclasses
import json
import re
import shutil
import signal
from collections import namedtuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_run
from test_trainer import ctrl_c_is_heard, final_state, metrics_of  # noqa: F401, a fixture

import dflash_jax.__main__ as commands
from dflash_jax import feature_store, precompute, preflight, trainer
from dflash_jax.config import to_json
from dflash_jax.data import training_data
from dflash_jax.errors import CheckpointError, ConfigError, DataError
from dflash_jax.feature_store import Layout, decode, encode
from dflash_jax.features import Cached, fingerprint, open_features
from dflash_jax.hf import load_target
from dflash_jax.lock import only_process
from dflash_jax.packing import documents
from dflash_jax.sharding import place_rows
from dflash_jax.train_step import place_batch, target_features

pytestmark = pytest.mark.one_cell

TAPS = (0, 2)
RUN = {
    "target__dtype": "bfloat16", "drafter__dtype": "bfloat16", "train__init": "random", "train__loss": "kl", "train__log_every": 1,
    "data__packing": True, "data__buckets": [96], "data__batch_size": 2,
}  # fmt: skip
TIMES = {"anchors_per_second", "tokens_per_second", "data_wait_share", "flops_per_second"}
"""of metrics.jsonl, and what they are made from"""


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    for module in (preflight, precompute):
        monkeypatch.setattr(module, "make_mesh", lambda config: tiny_run.mesh())


@pytest.fixture(scope="module")
def target():
    return load_target(tiny_run.target_folder(), dtype="bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Caches of several kinds, made by the command."""
    folder = tmp_path_factory.mktemp("features")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute, "make_mesh", lambda config: tiny_run.mesh())
        for dtype in ("bfloat16", "int8"):
            (folder / "config.yaml").write_text(to_json(config_of(folder, features__dtype=dtype)))
            assert commands.main(["cache", "--config", str(folder / "config.yaml")]) == 0
    return folder


@pytest.fixture(scope="module")
def online(tmp_path_factory):
    """Two epochs of two steps whose features are computed by the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "make_mesh", lambda config: tiny_run.mesh())
        run_dir = tmp_path_factory.mktemp("online") / "r"
        assert trainer.fit(config_of(None, run_dir)) == 0
    return run_dir


def config_of(folder, run_dir="unused", **changes):
    return tiny_run.tiny_run(run_dir, **RUN | {"features__folder": str(folder)} | changes)


def lines_of(run_dir):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics_of(run_dir)]


def contents(folder):
    """The bytes of every file of the one cache in a folder."""
    (cache,) = folder.iterdir()
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir())}


# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def tap_like(random, shape):
    """Two parts of sizes 3 and 27; dimension 5 of each is a hundred times the others, and the first token thrice that."""
    sizes = np.repeat([3.0, 27.0], shape[-1] // 2)
    sizes[[5, shape[-1] // 2 + 5]] *= 100
    features = random.normal(size=shape) * sizes
    features[:, 0] *= 3
    return features.astype(np.float32), sizes.astype(np.float32)


def test_int8_is_its_twin_and_keeps_small_dimensions():
    """Codes and scales by loops; what comes back is off by half a step; one step for all dimensions would lose the small ones."""
    features_BTM, sizes_M = tap_like(np.random.default_rng(0), (2, 5, 64))
    layout = Layout(2, 32, "int8")
    codes_BTM, scales_BTN = (np.asarray(x) for x in encode(jnp.asarray(features_BTM), layout, jnp.asarray(sizes_M)))
    back_BTM = np.asarray(decode(jnp.asarray(codes_BTM), jnp.asarray(scales_BTN), jnp.asarray(sizes_M))).astype(np.float32)
    assert (codes_BTM.dtype, scales_BTN.dtype) == (np.int8, np.float32)
    plain_BTM = np.zeros_like(features_BTM)
    for b, t, n in np.ndindex(2, 5, 2):
        part = slice(32 * n, 32 * n + 32)
        even = features_BTM[b, t, part] / sizes_M[part]
        scale = np.abs(even).max() / 127
        assert scales_BTN[b, t, n] == pytest.approx(scale, rel=1e-6)
        assert np.abs(codes_BTM[b, t, part] - even / scale).max() <= 0.5001
        step = scale * sizes_M[part]
        off = np.abs(back_BTM[b, t, part] - features_BTM[b, t, part])
        assert (off <= 0.5001 * step + 2**-8 * np.abs(features_BTM[b, t, part])).all()
        plain = np.abs(features_BTM[b, t, part]).max() / 127
        plain_BTM[b, t, part] = np.round(features_BTM[b, t, part] / plain) * plain
    small = sizes_M < 100
    error, plain_error = (np.sqrt(np.square((x - features_BTM)[..., small] / sizes_M[small]).mean()) for x in (back_BTM, plain_BTM))
    assert error < 0.02 < 0.1 < plain_error


def test_a_layout_is_bytes_and_back():
    random = np.random.default_rng(1)
    codes_TM, scales_TN = random.integers(-127, 128, (7, 6)).astype(np.int8), random.random((7, 2)).astype(np.float32)
    for layout, arrays in (
        (Layout(2, 3, "int8"), (codes_TM, scales_TN)),
        (Layout(2, 3, "bfloat16"), (codes_TM.astype(ml_dtypes.bfloat16), None)),
    ):
        data = b"".join(x.tobytes() for x in arrays if x is not None)
        assert len(data) == 7 * layout.token_bytes
        for ours, theirs in zip(layout.arrays(data), arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_target_is_known_by_its_weights(target):
    """Wherever it lies and on whatever mesh, but not with one bit changed, two rows exchanged, or another epsilon."""
    own = fingerprint(target)
    spread = load_target(tiny_run.target_folder(), dtype="bfloat16", mesh=tiny_run.mesh(data=2, fsdp=2, tensor=2))
    assert fingerprint(spread) == own
    others = {own, fingerprint(dataclasses.replace(target, config=dataclasses.replace(target.config, rms_norm_eps=1e-5)))}
    changed = jax.tree.map(lambda x: x, target.params)
    norm = changed["layers"][1]["input_layernorm"]["scale"]
    before = np.asarray(norm[...])
    bit, swapped = before.copy(), before.copy()
    bit[3] = np.nextafter(bit[3], np.float32(9)) if bit.dtype == np.float32 else bit[3] * 2
    swapped[[0, 1]] = [1, 2]
    for value in (bit, swapped, np.concatenate([swapped[[1, 0]], swapped[2:]])):
        norm.set_value(jnp.asarray(value))
        others.add(fingerprint(dataclasses.replace(target, params=changed)))
    norm.set_value(jnp.asarray(before))
    assert len(others) == 5


# ---------------------------------------------------------------------------------------------------------------------
# Training on it


def test_cached_training_is_online_training(tmp_path, folder, online):
    """bfloat16 features of a bfloat16 target and drafter: the same bits in the rows that they were computed in, the first epoch's,
    gradients and update too. Later rows are packed otherwise, which changes roundings of the target."""
    assert trainer.fit(config_of(folder, tmp_path / "r", train__features="cache")) == 0
    ours, theirs = lines_of(tmp_path / "r"), lines_of(online)
    assert len(ours) == 4
    assert ours[:2] == theirs[:2]
    for step in (2, 3):
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], rel=1e-3)
    kept, computed = (final_state(run, 2) for run in (tmp_path / "r", online))
    for name, value in computed.items():
        np.testing.assert_array_equal(kept[name], value, err_msg=name)


def test_int8_trains_nearly_the_same_and_is_another_run(tmp_path, folder, online):
    changes = {"train__features": "cache", "features__dtype": "int8"}
    assert trainer.fit(config_of(folder, tmp_path / "r", **changes)) == 0
    for ours, theirs in zip(lines_of(tmp_path / "r"), lines_of(online), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-3)
        assert ours["loss"] != theirs["loss"]
    with pytest.raises(CheckpointError, match=r"features: '\w{16}' there, '\w{16}' now"):
        trainer.fit(config_of(folder, tmp_path / "r", train__features="cache", train__resume=True))


def test_rows_of_one_conversation_read_the_same_cache(folder, target):
    """Features are kept a conversation, so other rows, batches and orders share them. Only the rows of this process are read."""
    mesh, rows = tiny_run.mesh(), {"data__packing": False, "data__buckets": [32, 64], "data__batch_size": 4}
    dataset = training_data(config_of(folder, **rows), target, mesh)
    raw = dataset.batch(1)
    compute = jax.jit(lambda params, batch: target_features(target, params, batch, TAPS, last=True))
    want_BTM = np.asarray(compute(target.params, place_batch(raw, mesh)))
    for dtype, error in (("bfloat16", 0.01), ("int8", 0.03)):
        features = open_features(
            config_of(folder, train__features="cache", features__dtype=dtype, **rows), mesh, target, TAPS, dataset
        )
        kept_BTM = np.asarray(features(features.read(raw))).astype(np.float32)
        for row, start, length, _ in documents(raw):
            slots = slice(start, start + length)
            size = np.sqrt(np.square(want_BTM[row, slots]).mean())
            np.testing.assert_allclose(kept_BTM[row, slots], want_BTM[row, slots], atol=error * size, rtol=0.02, err_msg=dtype)
            assert not kept_BTM[row, length:].any()
    whole, read, asked = features.read(raw), features.store.read, []
    dataset.process_rows, features.store.read = np.asarray([1, 3]), lambda names: asked.append(names) or read(names)
    np.testing.assert_array_equal(features.read(dataset.batch(1))["codes_BTM"], whole["codes_BTM"][[1, 3]])
    assert asked == [raw["id_B"][[1, 3]].tolist()]


def test_features_kept_in_memory_are_of_one_process(tmp_path, monkeypatch):
    """Said before anything is loaded or written."""
    monkeypatch.setattr(trainer, "load_text_target", lambda *_, **__: pytest.fail("a target was loaded"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"train\.features memory works in one process only: use online, or cache"):
        trainer.fit(config_of(tmp_path, tmp_path / "r", train__features="memory"))
    assert not (tmp_path / "r").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Writing it


@pytest.fixture
def computed(monkeypatch):
    """The conversations of every batch that the target reads. A batch is one row, and a shard one batch."""
    monkeypatch.setattr(precompute, "SHARD_BYTES", 1)
    batches = []

    def watched(raw, mesh):
        batches.append([name for *_, name in documents(raw)])
        return place_batch(raw, mesh)

    monkeypatch.setattr(precompute, "place_batch", watched)
    return batches


def make(folder, check=False, **changes):
    return precompute.precompute(config_of(folder, **{"data__batch_size": 1} | changes), check)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of a cache of several shards, made without a break."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute, "make_mesh", lambda config: tiny_run.mesh())
        patch.setattr(precompute, "SHARD_BYTES", 1)
        assert make(folder) == 0
    assert len(list(folder.glob("*/*.features"))) > 3
    return folder


class Killed(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize(("method", "call", "again"), [("write_whole", 0, 4), ("write", 4, 3), ("seal", 1, 3)])
def test_killed_and_continued(tmp_path, monkeypatch, computed, whole, method, call, again):
    """Before anything is said of the cache, within its second shard, and before that shard's seal: sealed shards are kept, and the
    files are in the end those of a run without a break."""
    owner = precompute if method == "write_whole" else feature_store.ShardWriter
    real, calls = getattr(owner, method), []

    def counted(*args):
        calls.append(args)
        if len(calls) > call:
            raise Killed
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, counted)
        with pytest.raises(Killed):
            make(tmp_path)
    computed.clear()
    assert make(tmp_path) == 0
    assert len(computed) == again
    assert contents(tmp_path) == contents(whole)


def test_ctrl_c_seals_what_was_computed(tmp_path, monkeypatch, computed, whole, capsys):
    """In the third batch of a shard of four."""
    monkeypatch.setattr(precompute, "SHARD_BYTES", 1 << 30)
    bar_update = precompute.tqdm.update

    def update(self, *args):
        bar_update(self, *args)
        if self.n == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(precompute.tqdm, "update", update)
    assert make(tmp_path) == 130
    said = capsys.readouterr()
    assert "stopped; what was computed is in" in said.out
    assert len(list(tmp_path.glob("*/*.json"))) == 2
    computed.clear()
    assert make(tmp_path) == 0
    assert len(computed) == 2
    assert make(tmp_path) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert len(computed) == 2
    assert b"".join(v for k, v in contents(tmp_path).items() if k.endswith("features")) == b"".join(
        v for k, v in contents(whole).items() if k.endswith("features")
    )


def test_ctrl_c_elsewhere_is_no_accident_either(tmp_path, monkeypatch, capsys):
    """While the text or weights are read, or another process is waited for: until all have written, none says that it is done."""

    def interrupted(name):
        if name == "written":
            raise KeyboardInterrupt

    monkeypatch.setattr(precompute, "wait_for_all", interrupted)
    (tmp_path / "config.yaml").write_text(to_json(config_of(tmp_path / "f")))
    assert commands.main(["cache", "--config", str(tmp_path / "config.yaml")]) == 130
    said = capsys.readouterr().out
    assert "stopped; the shards that are whole are kept, and the same command continues" in said
    assert "written to" not in said


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def another(path):
    for end in (".features", ".json"):
        shutil.copy(path.with_name("00000000-0of1").with_suffix(end), path.with_suffix(end))


DAMAGE = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), False, r"\d+ bytes, not the \d+ written"),
    "gone": (lambda path: path.unlink(), False, "it is missing"),
    "seal": (lambda path: path.with_suffix(".json").write_text("{}"), False, "other bytes than were written"),
    "seal of something else": (
        lambda path: feature_store.write_whole(path.with_suffix(".json"), {"a": 1}),
        False,
        "other bytes than were written",
    ),
    "another's": (another, False, "it is another shard, copied"),
    "flipped": (flipped, True, "other bytes than were written"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_is_named_and_made_again(tmp_path, computed, whole, target, capsys, kind):
    damage, check, said = DAMAGE[kind]
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (cache,) = tmp_path.iterdir()
    shard = cache / "00000001-0of1.features"
    damage(shard)
    config = config_of(tmp_path, train__features="cache")
    dataset = training_data(config, target, tiny_run.mesh())

    def read():
        features = Cached(config, tiny_run.mesh(), target, TAPS, dataset)
        return list(dataset.iterator(2, features.read, features.prefetch))

    with pytest.raises(
        DataError, match=r"00000001-0of1\.features is damaged .*`python -m dflash_jax cache` .* makes that shard again"
    ):
        read()
    assert make(tmp_path, check) == 0
    assert len(computed) == 1, "the other shards are kept"
    (warning,) = re.findall("warning: .*", capsys.readouterr().err)
    assert re.search(rf"00000001-0of1\.features is damaged \(.*{said}.*\): it is made again", warning)
    assert contents(tmp_path) == contents(whole)


def test_shards_that_nothing_describes_are_made_again_aloud(tmp_path, computed, whole, capsys):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (cache,) = tmp_path.iterdir()
    (cache / "made_from.json").unlink()
    assert make(tmp_path) == 0
    assert len(computed) > 1
    assert re.search(r"warning: \S+made_from\.json is missing: all shards there are made again", capsys.readouterr().err)


def test_what_does_not_fit_the_run_is_refused(tmp_path, folder, target, monkeypatch):
    """Each difference by name, the nearest cache, and how it is made; also what is only half there, before anything is written.
    All but other weights is told before weights are read. A cache made again with other sizes is another."""
    mesh = tiny_run.mesh()

    def refusal(folder, target=target, taps=TAPS, **changes):
        config = config_of(folder, train__features="cache", **changes)
        with pytest.raises(DataError) as refused:
            open_features(config, mesh, target, taps, training_data(config, target, mesh))
        assert "`python -m dflash_jax cache` with the options of this run" in str(refused.value)
        return str(refused.value)

    assert "holds no target features for this run: " in refusal(tmp_path)
    assert "differs (drafter.target_layer_ids: [0, 2] there, [0, 1] now)" in refusal(folder, taps=(0, 1))
    assert "differs (train.loss (reads final hidden states): True there, False now)" in refusal(folder, train__loss="ce")
    assert "differs (data.train, data.max_length (tokens): " in refusal(folder, data__max_length=24)
    other = dataclasses.replace(target, params=jax.tree.map(lambda x: x * 2, target.params))
    assert "differs (target.path (weights and config): " in refusal(folder, other)
    (int8,) = (path.parent for path in folder.glob("*/*.json") if json.loads(path.read_text())["content"].get("sizes"))
    shutil.copytree(int8, tmp_path / int8.name)
    assert "differs (features.dtype: int8 there, bfloat16 now)" in refusal(tmp_path)
    config = config_of(tmp_path, train__features="cache", features__dtype="int8")
    dataset, identities = training_data(config, target, mesh), []
    for factor in (1.0, 1.001):
        described = feature_store.read_made_from(tmp_path / int8.name)
        sizes = [size * factor for size in described["sizes"]]
        feature_store.write_whole(tmp_path / int8.name / "made_from.json", described | {"sizes": sizes})
        identities.append(open_features(config, mesh, target, TAPS, dataset).identity)
    assert identities[0].keys() == identities[1].keys()
    assert {name for name, value in identities[0].items() if value != identities[1][name]} == {"features.sizes"}
    (tmp_path / int8.name / "00000000-0of1.json").unlink()
    assert "holds the features of 0 of 12 conversations" in refusal(tmp_path, features__dtype="int8")
    (tmp_path / int8.name / "made_from.json").write_text("{}")
    assert "made_from.json is damaged (other bytes than were written): delete that folder" in refusal(
        tmp_path, features__dtype="int8"
    )
    with pytest.raises(DataError, match=r"made_from\.json is damaged"):
        make(tmp_path, features__dtype="int8")
    monkeypatch.setattr(trainer, "load_text_target", lambda *_, **__: pytest.fail("a target was loaded"))
    with pytest.raises(DataError, match=r"differs \(data\.train, data\.max_length \(tokens\): "):
        trainer.fit(config_of(folder, tmp_path / "r", train__features="cache", data__max_length=24))
    assert not (tmp_path / "r").exists()


def test_a_cache_is_not_begun_where_it_cannot_end(tmp_path, monkeypatch, computed, whole, capsys):
    """A disk that is too small, a folder that is no folder, one that another process writes, one begun with other rows."""
    usage = namedtuple("usage", "free")
    with monkeypatch.context() as patch:
        patch.setattr(precompute.shutil, "disk_usage", lambda path: usage(1000))
        message = r"the features need 0\.00 GiB and .* has 0\.00: features\.dtype int8 takes 0\.00 GiB; free some space"
        with pytest.raises(ConfigError, match=message):
            make(tmp_path / "all" / "of" / "them")
    assert not any(tmp_path.iterdir())
    tokens = sum(sum(json.loads(path.read_text())["content"]["lengths"]) for path in whole.glob("*/0*.json"))
    assert f"features: {tokens} tokens of 192 bytes (3 x 32 numbers, bfloat16): 0.00 GiB, 0.00 of them" in capsys.readouterr().out
    assert tokens * 192 == sum(path.stat().st_size for path in whole.glob("*/*.features"))
    with (
        tiny_run.files_of_at_most(100),
        pytest.raises(DataError, match=r"made_from\.json cannot be written \(.*\): free some space"),
    ):
        make(tmp_path)
    with tiny_run.files_of_at_most(5000), pytest.raises(DataError, match=r"\.features cannot be written \(.*\): free some space"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"features\.folder is gs://x: give a folder that is mounted"):
        make("gs://x")
    (cache,) = tmp_path.iterdir()
    with only_process(cache), pytest.raises(ConfigError, match="is being written by another process"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"begun with other rows \(data\.batch_size 1 there, 2 now\): give the same values"):
        make(tmp_path, data__batch_size=2)
    assert make(tmp_path) == 0
    assert contents(tmp_path) == contents(whole)


def test_the_rows_of_every_device_come_back():
    """On a mesh whose devices share rows: what was placed is what is written, each row once."""
    mesh, rows = tiny_run.mesh(data=2, fsdp=2, tensor=2), np.arange(24.0).reshape(8, 3)
    np.testing.assert_array_equal(precompute.here(place_rows(rows, mesh)), rows)
    assert precompute.consecutive([0, 1, 2, 3, 4, 6, 7, 9], 3) == [[0, 1, 2], [3, 4], [6, 7], [9]]
