"""Rules that no single module can keep: who imports whom, what runs at import, file lengths, and configs without dead fields."""

import ast
import functools
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dflash_jax"
ENTRY_POINTS = [path for path in (ROOT / "train.py", ROOT / "serve.py") if path.exists()]
MAX_LINES = 400

# A module imports only modules of the rows above its own, so a new import between neighbours needs a new row.
# A folder is one name: its files may import each other.
LAYERS = [
    ["errors", "topics", "exercises", "program"],
    ["model_config", "lock"],
    ["config"],
    ["distributed", "layers", "cache", "sampling", "sharding", "audit", "packing"],
    ["attention", "blocks"],
    ["targets", "drafter", "objectives"],
    ["loss", "verify", "tokenizer", "hf_fields", "hf_weights", "prompts", "cli"],
    ["hf_config", "hf_layouts"],
    ["gguf", "decode", "conversations", "optim"],
    ["hf_drafter", "rows", "widths", "records", "feature_store"],
    ["hf_parts"],
    ["hf", "data", "generate", "divergence", "train_step", "metrics"],
    ["checkpoint", "features", "heldout", "warm_start", "bench", "regenerate", "invariants", "chat", "export", "wiring", "request"],
    ["first_drafter", "findings", "slots", "progress", "stop"],
    ["preflight"],
    ["trainer", "precompute", "doctor", "engine", "aot"],
    ["__init__"],
    ["__main__", "train", "serve"],
]
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
TEST_ONLY = {"torch", "transformers", "dflash", "speculators", "specforge"}


def module_name(path: Path) -> str:
    """The name that LAYERS knows a file by: its stem, or the first folder inside the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") if path.is_relative_to(PACKAGE) else path.stem


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> set[str]:
    """Dotted names of all imports, those inside functions too; `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write dflash_jax.{node.module or ''} in full, not a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_modules(tree: ast.AST) -> set[str]:
    """Names of LAYERS that a module imports; a name that is no module comes from the package's __init__."""
    inside = [name.split(".")[1:] for name in imports(tree) if name.split(".")[0] == "dflash_jax"]
    modules = {module_name(path) for path in PACKAGE_FILES}
    return {parts[0] if parts and parts[0] in modules else "__init__" for parts in inside}


PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
FILES = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in PACKAGE_FILES + ENTRY_POINTS]


@pytest.mark.parametrize("path", FILES)
def test_imports_point_down(path):
    name = module_name(path)
    assert name in RANK, f"{name} is in no row of LAYERS: give it a rank"
    for other in imported_modules(parse(path)) - {name}:
        assert other in RANK, f"{name} imports {other}, which is in no row of LAYERS: give it a rank"
        assert RANK[other] < RANK[name], (
            f"{name} (row {RANK[name]}) must not import {other} (row {RANK[other]}): imports point down"
        )


@pytest.mark.parametrize("path", FILES)
def test_file_length(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: a file this long holds two nouns, split it"


def is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING")


def runs_at_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        # Docstrings, and the one call that has no decorator form: f.defvjp(forward, backward).
        call = isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute) and node.value.func.attr
        return not isinstance(node.value, ast.Constant) and call not in ("defvjp", "defjvp")
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    return not isinstance(node, definitions) and not is_main_guard(node)


@pytest.mark.parametrize("path", FILES)
def test_modules_only_define(path):
    running = [f"line {node.lineno}: {ast.unparse(node)[:80]}" for node in parse(path).body if runs_at_import(node)]
    assert not running, f"statements that run at import: {running}"


def test_import_touches_no_device_and_no_oracle():
    """Import every module where no backend can start: an array made at import would fail, and would cost every user a start."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE_FILES if path.stem != "__main__"]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"found = {TEST_ONLY!r} & set(sys.modules)\n"
        f"assert not found, f'imported test oracles: {{found}}'\n"
    )
    env = os.environ | {"JAX_PLATFORMS": "no_such_backend"}
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == "", "importing prints"


def distributions(modules: set[str]) -> set[str]:
    """Installed distributions (normalized names) that provide third-party modules; an unknown module stands for itself."""
    known = importlib.metadata.packages_distributions()
    outside = modules - set(sys.stdlib_module_names) - {"dflash_jax"}
    return {name.lower().replace("_", "-") for module in outside for name in known.get(module, [module])}


def requirement_name(requirement: str) -> str:
    name = "".join(c if c.isalnum() or c in "-_." else " " for c in requirement).split()[0]
    return name.lower().replace("_", "-")


def top_level_imports(files: list[Path]) -> set[str]:
    return {name.split(".")[0] for path in files for name in imports(parse(path))}


def declared() -> tuple[set[str], set[str]]:
    """Core dependencies, and what the extras for users add."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {requirement_name(r) for r in project["dependencies"]}
    extras = project["optional-dependencies"]
    return core, {requirement_name(r) for extra in extras.keys() - {"test", "dev", "oracle"} for r in extras[extra]}


USED = top_level_imports(PACKAGE_FILES + ENTRY_POINTS)


def test_package_never_imports_an_oracle():
    assert not USED & TEST_ONLY, "the package imports a test oracle"


def test_what_is_imported_is_declared():
    missing = distributions(USED - TEST_ONLY) - set.union(*declared())
    assert not missing, f"pyproject.toml declares these neither as dependency nor in an extra: {missing}"


def test_what_is_declared_is_imported():
    unused = declared()[0] - distributions(USED)
    assert not unused, f"dependencies that nothing imports: {unused}"


def dataclass_fields(tree: ast.Module) -> dict[str, list[str]]:
    """Fields of every class decorated as a dataclass."""
    return {
        node.name: [item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    }


def attribute_reads(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


CONFIGS = [PACKAGE / "config.py", PACKAGE / "model_config.py"]
CONFIG_FIELDS = {name: fields for path in CONFIGS for name, fields in dataclass_fields(parse(path)).items()}


def test_every_config_field_is_read():
    """A field read only where it is checked does nothing, so the configs' own classes do not count; their functions do."""
    trees: list[ast.AST] = [node for path in CONFIGS for node in parse(path).body if isinstance(node, ast.FunctionDef)]
    trees += [parse(path) for path in PACKAGE_FILES + ENTRY_POINTS if path not in CONFIGS]
    read = set().union(*(attribute_reads(tree) for tree in trees))
    dead = [f"{name}.{field}" for name, fields in CONFIG_FIELDS.items() for field in fields if field not in read]
    assert CONFIG_FIELDS
    assert not dead, f"fields that nothing reads: {dead}"


PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_preset(path):
    """A preset starts with its command, cost and result, and names only fields that exist."""
    from dflash_jax.cli import parse_config
    from dflash_jax.config import Config

    text = path.read_text(encoding="utf-8")
    comment = text[: text.index("\ntarget:")]
    assert all(line.startswith("#") for line in comment.splitlines()), "a preset starts with a comment"
    assert all(word in comment for word in ("dflash_jax regenerate", "Cost:", "Result")), "the comment has command, cost, result"
    assert isinstance(parse_config(["--config", str(path)]), Config)
