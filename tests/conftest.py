"""Settings of every test run: eight fake CPU devices, strict promotion, float32 products, and honest words about the oracles."""

import importlib.util
import os
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

# Training steps are large programs that tests run a few times: optimising them costs more than half of a test's time. Decoding is
# tested as users compile it, because its promise of equal tokens is about optimised programs.
LIGHTLY_COMPILED = {
    "test_aot", "test_audit", "test_bench", "test_chat", "test_checkpoint", "test_cli", "test_divergence", "test_doctor",
    "test_drafter", "test_invariants", "test_loss", "test_packed_rows", "test_parity_specforge", "test_parity_zlab",
    "test_regenerate", "test_sharding", "test_sliding", "test_step_memory", "test_train_equals_decode", "test_train_step",
    "test_trainer", "test_vs_torch_trainers", "test_warm_start", "test_widths",
}  # fmt: skip

ORACLES = ("torch", "transformers", "dflash", "speculators", "specforge")
MISSING_ORACLES = [name for name in ORACLES if importlib.util.find_spec(name) is None]
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Sharding tests must not pass because they ran on one device."""
    assert len(jax.devices()) >= 8, f"{len(jax.devices())} devices: XLA_FLAGS={os.environ['XLA_FLAGS']!r} was read too late"


@pytest.fixture(scope="module", autouse=True)
def light_compilation(request):
    light = request.module.__name__ in LIGHTLY_COMPILED
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
        terminalreporter.write_line("TPU compiler test NOT run: libtpu not installed (pip install libtpu, then pytest -m libtpu)")
