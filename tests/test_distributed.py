"""Who the processes of a run are, and what each of them is asked to do."""

import signal
from pathlib import Path

import jax
import numpy as np
import pytest

import dflash_jax.distributed as distributed
from dflash_jax.cli import INTERRUPTED, TERMINATED, parse_config
from dflash_jax.config import DistributedConfig
from dflash_jax.distributed import check_shared, everyone, from_main, initialize, on_host, say, text_from_main, wait_for_main
from dflash_jax.errors import ConfigError
from dflash_jax.stop import StopRequests

pytestmark = pytest.mark.one_cell
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@pytest.fixture
def joined(monkeypatch):
    """What jax.distributed.initialize was called with."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **who: calls.append(who))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_one_process_joins_nobody(joined):
    initialize(DistributedConfig())
    assert joined == []


def test_config_and_variables_name_the_others(joined, monkeypatch):
    who = {"coordinator_address": "host:1", "num_processes": 3, "process_id": 2}
    initialize(DistributedConfig("host:1", 3, 2))
    for name, value in zip(VARIABLES, ("host:1", "3", "2"), strict=True):
        monkeypatch.setenv(name, value)
    initialize(DistributedConfig())
    initialize(DistributedConfig(process_index=0))
    assert joined == [who, who, who | {"process_id": 0}]


def test_the_cluster_is_asked_on_request(joined, monkeypatch):
    initialize(DistributedConfig(detect=True))
    assert joined == [{}]
    monkeypatch.setattr(jax.distributed, "initialize", lambda: (_ for _ in ()).throw(ValueError("no cluster")))
    with pytest.raises(ConfigError, match=r"does not say who the other processes are; name distributed\.coordinator .*no cluster"):
        initialize(DistributedConfig(detect=True))


def test_tpu_hosts_find_each_other(joined, monkeypatch, capsys):
    """And a host of its own goes on alone, and says so."""
    monkeypatch.setattr(distributed, "_has_tpu", lambda: True)
    initialize(DistributedConfig())
    assert joined == [{}]
    monkeypatch.setattr(jax.distributed, "initialize", lambda: (_ for _ in ()).throw(RuntimeError("no metadata")))
    initialize(DistributedConfig())
    assert "warning: no other TPU hosts were found (no metadata): this one goes on alone" in capsys.readouterr().err


@pytest.mark.parametrize(("platforms", "found"), [("", True), ("tpu", True), ("tpu,cpu", True), ("cpu", False)])
def test_where_tpus_may_be_used(monkeypatch, platforms, found):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "accel0"] if "accel" in pattern else []))
    assert distributed._has_tpu() == found


@pytest.mark.parametrize(
    ("config", "variables", "message"),
    [
        (DistributedConfig("host:1"), {}, r"num_processes None and process_index None: give how many processes there are"),
        (DistributedConfig("host:1", 2, 2), {}, r"num_processes 2 and process_index 2: give"),
        (DistributedConfig("host:1", 2, -1), {}, r"process_index -1"),
        (DistributedConfig(num_processes=2), {}, r"given without distributed\.coordinator: give host:port"),
        (DistributedConfig("host:1", 2), {"JAX_PROCESS_ID": "two"}, r"JAX_PROCESS_ID is 'two': make it a number"),
    ],
)
def test_refused(joined, monkeypatch, config, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        initialize(config)
    assert joined == []


def test_a_coordinator_that_is_not_there(joined, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **who: (_ for _ in ()).throw(RuntimeError("deadline")))
    with pytest.raises(ConfigError, match=r"the coordinator host:1 was not reached \(deadline\)"):
        initialize(DistributedConfig("host:1", 2, 0))


def test_options_of_the_command_line():
    argv = ["--distributed.coordinator=host:1", "--distributed.num_processes=2", "--distributed.process_index=1"]
    assert parse_config(argv).distributed == DistributedConfig("host:1", 2, 1)


def test_agreements_of_one_process(capsys, tmp_path):
    assert (everyone(True), everyone(False), from_main(7), text_from_main("é")) == (True, False, 7, "é")
    wait_for_main("itself")
    check_shared(tmp_path / "absent", "data.records")  # nobody to share it with
    whole = on_host({"a": jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x")))})
    np.testing.assert_array_equal(whole["a"], np.arange(8.0))
    say("once")
    assert capsys.readouterr().out == "once\n"


@pytest.mark.parametrize(("kind", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_signals_are_heard_between_steps(kind, status, capsys):
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with StopRequests() as stop:
            assert not stop.asked()
            signal.raise_signal(kind)
            assert stop.asked()
            assert stop.status == status
        assert "saving after this step" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handlers[signal.SIGINT])
