"""Settings of every test run: eight fake CPU devices, strict promotion, float32 products, and honest words about the oracles."""

import gc
import importlib.util
import os
import sys
from pathlib import Path

# Read when jax starts its backend, so they come before the first use of jax.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

jax.config.update("jax_platforms", "cpu")  # a plugin may have imported jax before the variable was set
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "float32")

# Tests spend most of their time compiling, and the workers and files of a run share many programs. There is no lock without a size
# limit (with one, every write looks at all files), so a worker may read half of what another writes: it says so and compiles.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Tracing makes objects by the million, nearly all of which live: looking through them so often took a twentieth of the time.
gc.set_threshold(200_000, 50, 100)

# Tests run large programs a few times, so optimising them costs more than half of a test's time: most are compiled lightly. Some
# are compiled as users compile them, because the promise of equal tokens is about optimised programs; more of them in the second
# cell, which runs fewer tests.
OPTIMISED = {"test_decode", "test_sharded_program", "test_shipped_drafter"}
if sys.version_info < (3, 12):
    OPTIMISED |= {"test_engine", "test_generate", "test_sampling"}

ORACLES = ("torch", "transformers", "dflash", "speculators", "specforge")
MISSING_ORACLES = [name for name in ORACLES if importlib.util.find_spec(name) is None]
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Sharding tests must not pass because they ran on one device."""
    assert len(jax.devices()) >= 8, f"{len(jax.devices())} devices: XLA_FLAGS={os.environ['XLA_FLAGS']!r} was read too late"


@pytest.fixture(scope="module", autouse=True)
def light_compilation(request):
    light = request.module.__name__ not in OPTIMISED
    if light != jax.config.values["jax_disable_most_optimizations"]:
        jax.clear_caches()  # a compiled function does not remember how it was compiled
        jax.config.update("jax_disable_most_optimizations", light)


def pytest_collection_modifyitems(config, items):
    missing = [name for name, lacks in (("oracle", MISSING_ORACLES), ("libtpu", not HAS_LIBTPU)) if lacks]
    dropped = [item for item in items if any(item.get_closest_marker(name) for name in missing)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter):
    if MISSING_ORACLES:
        line = f"oracle tests NOT run: {', '.join(MISSING_ORACLES)} not installed (make test in the Python 3.11 cell runs them)"
    else:
        reports = [r for group in ("passed", "failed") for r in terminalreporter.stats.get(group, []) if r.when == "call"]
        line = f"oracle tests run: {sum('oracle' in r.keywords for r in reports)}"
    terminalreporter.write_line(line)
    if not HAS_LIBTPU:
        terminalreporter.write_line("TPU compiler test NOT run: libtpu not installed (make .venv-3.12/.libtpu)")
