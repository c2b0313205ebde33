"""Checkpoints: all of the state, all or nothing, only for the run that wrote them."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import files_of_at_most, leaves, mesh

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

    return jax.tree.map(fill, empty())._replace(step=jnp.int32(step))


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


def test_round_trip(checkpoints, tmp_path):
    """Parameters, moments, counters and data position, bit for bit, by another manager; the newest is taken."""
    for step in (2, 4):
        checkpoints.save(filled(step, seed=step), {"next_index": step}, IDENTITY, CONFIG)
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    state, data = again.restore(empty(), IDENTITY)
    again.close()
    equal(state, filled(4, seed=4))
    assert data == {"next_index": 4}
    assert again.newest == 4
    assert int(state.step) == 4
    assert [json.loads(path.read_text()) for path in (tmp_path / "checkpoints" / "4" / "config").glob("metadata")] == [CONFIG]


def test_restored_onto_another_mesh(checkpoints):
    checkpoints.save(filled(2), DATA, IDENTITY, CONFIG)
    like = empty(mesh(2, 2, 2))
    state, _ = checkpoints.restore(like, IDENTITY)
    equal(state, filled(2))
    for a, b in zip(jax.tree.leaves(like), jax.tree.leaves(state), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.one_cell
def test_only_the_newest_are_kept(checkpoints, tmp_path):
    for step in (1, 2, 3):
        checkpoints.save(filled(step), DATA, IDENTITY, CONFIG)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


@pytest.mark.one_cell
def test_saving_a_step_twice_is_no_error(checkpoints):
    checkpoints.save(filled(2, seed=1), DATA, IDENTITY, CONFIG)
    checkpoints.save(filled(2, seed=2), DATA, IDENTITY, CONFIG)
    equal(checkpoints.restore(empty(), IDENTITY)[0], filled(2, seed=1))


@pytest.mark.one_cell
def test_nothing_to_restore(checkpoints):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: start without --resume"):
        checkpoints.restore(empty(), IDENTITY)


@pytest.mark.one_cell
def test_another_config_is_refused_by_name(checkpoints):
    checkpoints.save(filled(2), DATA, IDENTITY, CONFIG)
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
    checkpoints.save(filled(2), DATA, IDENTITY, CONFIG)
    with (
        files_of_at_most(16384),
        pytest.raises(CheckpointError, match=r"checkpoint of step 3 could not be written .*newest whole checkpoint is step 2"),
    ):
        checkpoints.save(filled(3), DATA, IDENTITY, CONFIG)
    equal(checkpoints.restore(empty(), IDENTITY)[0], filled(2))
    again = Checkpoints(tmp_path / "checkpoints", keep=2)  # a new process, once there is room
    assert again.newest == 2
    again.save(filled(3, seed=3), DATA, IDENTITY, CONFIG)
    equal(again.restore(empty(), IDENTITY)[0], filled(3, seed=3))
    again.close()
    gc.collect()  # what is left of the failed save must not show in another test


@pytest.mark.one_cell
@pytest.mark.parametrize("part", ["data", "identity", "state"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damaged_checkpoints_are_named(checkpoints, tmp_path, part, how):
    for step in (1, 2):
        checkpoints.save(filled(step), DATA, IDENTITY, CONFIG)
    files = [path for path in (tmp_path / "checkpoints" / "2" / part).rglob("*") if path.is_file()]
    if how == "gone":
        shutil.rmtree(tmp_path / "checkpoints" / "2" / part)
    else:
        for path in files:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    with pytest.raises(CheckpointError, match=r"checkpoints/2 cannot be read .*--resume from the one before"):
        again.restore(empty(), IDENTITY)
    again.close()
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    before = Checkpoints(tmp_path / "checkpoints", keep=2)
    equal(before.restore(empty(), IDENTITY)[0], filled(1))
    before.close()
