"""Checkpoints: all of the state, all or nothing, only for the run that wrote them."""

import concurrent.futures
import functools
import gc
import json
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import files_of_at_most, leaves, mesh

from dflash_jax import checkpoint
from dflash_jax.checkpoint import Checkpoints
from dflash_jax.config import OptimConfig
from dflash_jax.drafter import Drafter
from dflash_jax.errors import CheckpointError
from dflash_jax.model_config import DFlashConfig
from dflash_jax.optim import optimizer
from dflash_jax.train_step import init_state

DRAFTER = DFlashConfig(32, 32, 64, 4, 4.0, 4, 2, 8, 48, block_size=4, num_draft_layers=1, target_layer_ids=(1, 2), mask_token_id=3)
IDENTITY = {"optim.learning_rate": 1e-3, "drafter.causal": (False,), "steps": 4}
DATA = {"next_index": 7}
CONFIG = {"optim": {"learning_rate": 1e-3}}


def empty(on=None):
    """With a running mean, and the placeholders that Muon has for other parameters than its own."""
    tx = optimizer(OptimConfig(optimizer="muon"), 10)
    return init_state(Drafter.random(jax.random.key(0), DRAFTER), tx, on or mesh(), ema=True)


def filled(step, seed=1):
    """A state in which every number is different."""
    random = np.random.default_rng(seed)

    def fill(x):
        value = random.standard_normal(x.shape) if x.dtype == jnp.float32 else random.integers(1, 99, x.shape)
        return jax.device_put(jnp.asarray(value, x.dtype), x.sharding)

    return jax.tree.map(fill, like())._replace(step=jnp.int32(step))


@functools.cache
def like():
    return empty()


def equal(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield made
    made.close()


def save(checkpoints, *what):
    """Save, and wait for the seal."""
    checkpoints.save(*what)
    checkpoints.wait()


def test_round_trip(checkpoints, tmp_path):
    """Parameters, moments, counters and data position, bit for bit, by another manager; the newest is taken."""
    for step in (2, 4):
        save(checkpoints, filled(step, seed=step), {"next_index": step}, IDENTITY, CONFIG)
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    state, data = again.restore(empty(), IDENTITY)
    again.close()
    equal(state, filled(4, seed=4))
    assert data == {"next_index": 4}
    assert again.newest == 4
    assert int(state.step) == 4
    assert [json.loads(path.read_text()) for path in (tmp_path / "checkpoints" / "4" / "config").glob("metadata")] == [CONFIG]


def test_restored_onto_another_mesh(checkpoints):
    save(checkpoints, filled(2), DATA, IDENTITY, CONFIG)
    like = empty(mesh(2, 2, 2))
    state, _ = checkpoints.restore(like, IDENTITY)
    equal(state, filled(2))
    for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(state), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.one_cell
def test_only_the_newest_are_kept(checkpoints, tmp_path):
    for step in (1, 2, 3):
        save(checkpoints, filled(step), DATA, IDENTITY, CONFIG)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


@pytest.mark.one_cell
def test_saving_a_step_twice_is_no_error(checkpoints):
    save(checkpoints, filled(2, seed=1), DATA, IDENTITY, CONFIG)
    save(checkpoints, filled(2, seed=2), DATA, IDENTITY, CONFIG)
    equal(checkpoints.restore(empty(), IDENTITY)[0], filled(2, seed=1))


@pytest.mark.one_cell
def test_nothing_to_restore(checkpoints):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: start without --resume"):
        checkpoints.restore(empty(), IDENTITY)


@pytest.mark.one_cell
def test_another_config_is_refused_by_name(checkpoints):
    save(checkpoints, filled(2), DATA, IDENTITY, CONFIG)
    with pytest.raises(CheckpointError, match=r"another config \(optim\.learning_rate: 0\.001 there, 0\.1 now\)"):
        checkpoints.restore(empty(), IDENTITY | {"optim.learning_rate": 0.1})
    with pytest.raises(CheckpointError, match=r"new: None there, 1 now; steps: 4 there, 5 now\): give the same values"):
        checkpoints.restore(empty(), IDENTITY | {"steps": 5, "new": 1})
    equal(checkpoints.restore(empty(), IDENTITY)[0], filled(2))


@pytest.mark.one_cell
def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be used for checkpoints .* give another train\.run_dir"):
        Checkpoints(tmp_path / "f" / "checkpoints", keep=1)


@pytest.mark.one_cell
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # those of Orbax's writing threads
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_keeps_what_was_there(checkpoints, tmp_path):
    save(checkpoints, filled(2), DATA, IDENTITY, CONFIG)
    with (
        files_of_at_most(16384),
        pytest.raises(CheckpointError, match=r"checkpoint of step 3 could not be written .*newest whole checkpoint is step 2"),
    ):
        save(checkpoints, filled(3), DATA, IDENTITY, CONFIG)
    equal(checkpoints.restore(empty(), IDENTITY)[0], filled(2))
    again = Checkpoints(tmp_path / "checkpoints", keep=2)  # a new process, once there is room
    assert again.newest == 2
    save(again, filled(3, seed=3), DATA, IDENTITY, CONFIG)
    equal(again.restore(empty(), IDENTITY)[0], filled(3, seed=3))
    again.close()
    gc.collect()  # what is left of the failed save must not show in another test


def folder_of(checkpoints, step):
    return checkpoints.folder / str(step)


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1
    path.write_bytes(content)


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "a parameter file cut short": (lambda folder: half(largest(folder / "state")), r"has \d+ bytes, not \d+"),
    "one bit of a parameter": (lambda folder: flip(largest(folder / "state")), r"state/\S+ has other bytes than were written"),
    "a missing file": (lambda folder: (folder / "state" / "manifest.ocdbt").unlink(), r"state/manifest\.ocdbt is missing"),
    "a missing part": (lambda folder: shutil.rmtree(folder / "data"), r"data/\S+ is missing"),
    "an identity of zeros": (lambda folder: (folder / "identity" / "metadata").write_bytes(bytes(9)), r"identity/metadata has"),
    "a garbage seal": (lambda folder: (folder / "seal.json").write_text('{"files": {"a": 3}}'), r"seal\.json is not readable"),
    "an empty seal": (lambda folder: (folder / "seal.json").write_bytes(b""), r"seal\.json is not readable"),
}


@pytest.mark.one_cell
def test_damaged_checkpoints_are_set_aside(checkpoints, capsys):
    """Each kind of damage in turn: a warning names it, the one before is used, and the step can be saved again."""
    save(checkpoints, filled(1), DATA, IDENTITY, CONFIG)
    save(checkpoints, filled(2, seed=2), {"next_index": 2}, IDENTITY, CONFIG)
    whole = checkpoints.folder.parent / "whole"
    shutil.copytree(folder_of(checkpoints, 2), whole)
    for damage, message in DAMAGES.values():
        damage(folder_of(checkpoints, 2))
        state, data = checkpoints.restore(like(), IDENTITY)
        equal(state, filled(1))
        assert data == DATA
        said = capsys.readouterr().err
        assert re.search(rf"warning: the checkpoint \S+/2 is damaged \(.*{message}.*\): .* set aside as 2\.damaged", said), said
        assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["1", "2.damaged"]
        shutil.copytree(whole, folder_of(checkpoints, 2))
    equal(checkpoints.restore(like(), IDENTITY)[0], filled(2, seed=2))
    assert capsys.readouterr().err == ""
    flip(largest(folder_of(checkpoints, 2) / "state"))
    assert int(checkpoints.restore(like(), IDENTITY)[0].step) == 1
    save(checkpoints, filled(2, seed=3), DATA, IDENTITY, CONFIG)
    equal(checkpoints.restore(like(), IDENTITY)[0], filled(2, seed=3))


LEFTOVERS = {
    "an empty folder": lambda folder: shutil.rmtree(folder) or folder.mkdir(),
    "all but the seal": lambda folder: (folder / "seal.json").unlink(),
    "a half-written seal": lambda folder: (folder / "seal.json").rename(folder / "seal.json.new"),
    "no state yet": lambda folder: shutil.rmtree(folder / "state") or (folder / "seal.json").unlink(),
}


@pytest.mark.one_cell
def test_what_a_kill_leaves_is_skipped_and_written_over(checkpoints, capsys):
    (checkpoints.folder / "7.orbax-checkpoint-tmp").mkdir()  # of a save that a kill cut short
    for step in (1, 2):
        save(checkpoints, filled(step), DATA, IDENTITY, CONFIG)
    checkpoints.wait()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["1", "2"]
    for kill in LEFTOVERS.values():
        kill(folder_of(checkpoints, 2))
        assert checkpoints.newest == 1
        equal(checkpoints.restore(like(), IDENTITY)[0], filled(1))
        assert re.search(r"warning: the checkpoint \S+/2 is half-written: it is skipped", capsys.readouterr().err)
        save(checkpoints, filled(2, seed=2), DATA, IDENTITY, CONFIG)
        assert checkpoints.newest == 2
    equal(checkpoints.restore(like(), IDENTITY)[0], filled(2, seed=2))
    assert capsys.readouterr().err == ""


@pytest.mark.one_cell
def test_none_is_whole(checkpoints):
    save(checkpoints, filled(1), DATA, IDENTITY, CONFIG)
    flip(largest(folder_of(checkpoints, 1)))
    with pytest.raises(CheckpointError, match="holds no checkpoint: start without --resume"):
        checkpoints.restore(like(), IDENTITY)
    assert (checkpoints.folder / "1.damaged").is_dir(), "nothing is thrown away"


@pytest.mark.one_cell
def test_the_best_one_stays(checkpoints):
    """By acceptance length; of equals the later. It is not counted among the newest, and half-written older ones go."""
    for step, tau in ((1, 2.0), (2, 3.0), (3, 2.5), (4, None)):
        (checkpoints.folder / "0").mkdir(exist_ok=True)
        save(checkpoints, filled(step), DATA, IDENTITY, CONFIG, tau)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["2", "3", "4"]
    assert checkpoints.best == (2, 3.0)
    save(checkpoints, filled(5), DATA, IDENTITY, CONFIG, 3.0)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["4", "5"]
    again = Checkpoints(checkpoints.folder, keep=2)
    assert again.best == (5, 3.0)
    again.close()


@pytest.mark.one_cell
def test_the_best_is_of_what_is_measured_now(checkpoints):
    """Acceptance lengths of other prompts say nothing; without prompts of its own a run keeps the best of those before."""
    save(checkpoints, filled(1), DATA, IDENTITY, CONFIG, 2.0)
    for name, step, tau in (("a", 2, 3.0), ("a", 3, 2.5), ("b", 4, 1.5), ("b", 5, 1.25)):
        checkpoints.measured_on = name
        save(checkpoints, filled(step), DATA, IDENTITY, CONFIG, tau)
        if step == 3:
            assert (checkpoints.best, checkpoints.best_elsewhere) == ((2, 3.0), None), "the one by no name is gone"
            checkpoints.measured_on = "b"
            assert (checkpoints.best, checkpoints.best_elsewhere) == (None, 2)
    assert (checkpoints.best, checkpoints.best_elsewhere) == ((4, 1.5), None)
    checkpoints.measured_on = None
    save(checkpoints, filled(6), DATA, IDENTITY, CONFIG)
    save(checkpoints, filled(7), DATA, IDENTITY, CONFIG)
    assert (checkpoints.best, checkpoints.best_elsewhere) == ((4, 1.5), None)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["4", "6", "7"]


@pytest.mark.one_cell
def test_saves_go_on_in_the_background(checkpoints, monkeypatch):
    """A save takes the state as it is, though the next step gets its buffers; until it is sealed the one before is the newest; and
    what goes wrong is told at the next question."""
    save(checkpoints, filled(1), DATA, IDENTITY, CONFIG)
    state = filled(2)._replace(ema=jax.device_put(jnp.asarray(np.random.default_rng(0).standard_normal(1 << 24, np.float32))))
    wanted = jax.tree.map(np.array, state)
    go_on, crc = threading.Event(), checkpoint._crc

    def slowly(path):
        assert go_on.wait(60)
        return crc(path)

    monkeypatch.setattr(checkpoint, "_crc", slowly)
    checkpoints.save(state, DATA, IDENTITY, CONFIG)
    overwritten = jax.jit(lambda x: jax.tree.map(lambda x: x * 0, x), donate_argnums=0)(state)
    assert not checkpoints.saving[1].done()
    assert checkpoints._sealed() == {1}
    checkpoints.check()
    go_on.set()
    assert checkpoints.newest == 2
    equal(checkpoints.restore(overwritten, IDENTITY)[0], wanted)

    def full(path):
        raise OSError("no space")

    monkeypatch.setattr(checkpoint, "_crc", full)
    checkpoints.save(filled(3), DATA, IDENTITY, CONFIG)
    concurrent.futures.wait([checkpoints.saving[1]])
    with pytest.raises(CheckpointError, match=r"checkpoint of step 3 could not be written .*no space.* checkpoint is step 2"):
        checkpoints.check()
    monkeypatch.undo()
    save(checkpoints, filled(3, seed=3), DATA, IDENTITY, CONFIG)
    equal(checkpoints.restore(like(), IDENTITY)[0], filled(3, seed=3))
