"""Which module may import which: models/ and bench/ use the public package, and Python's layers point downwards."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxhetero

ROOT = Path(__file__).resolve().parents[2]
# What benchmarks import of the package's private modules.
MEASURED = ("jaxhetero._collectives.buckets", "jaxhetero._job.channels", "jaxhetero._job.ports", "jaxhetero._simulator")
USERS = sorted(path for folder in ("models", "bench") for path in (ROOT / folder).rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """All that a file imports, at its head and in its functions: ``jaxhetero.config``, ``jaxhetero.config.Config``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names.update({str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names})
    return names


def own_modules(path: Path) -> set[str]:
    """The modules of jaxhetero that a file imports, by their first name inside the package."""
    return {name.split(".")[1] for name in imported_names(path) if name.startswith("jaxhetero.")}


@pytest.mark.parametrize("path", USERS, ids=[str(path.relative_to(ROOT)) for path in USERS])
def test_models_and_bench_use_the_public_package(path: Path) -> None:
    """But for what a benchmark measures by itself, and a user has as a part of something else."""
    for name in imported_names(path):
        assert name.split(".")[0] != "tests", "the tests use the benchmarks, not the other way round"
        is_measured = path.is_relative_to(ROOT / "bench") and name.startswith(MEASURED)
        if name.split(".")[0] == "jaxhetero" and not is_measured:
            assert not any(part.startswith("_") and not part.endswith("__") for part in name.split(".")), name


@pytest.mark.parametrize("name", ["errors", "config"])
def test_the_lowest_layer_imports_errors_alone(name: str) -> None:
    assert own_modules(ROOT / "jaxhetero" / f"{name}.py") <= {"errors"}


@pytest.mark.parametrize("path", sorted((ROOT / "jaxhetero").rglob("*.py")), ids=lambda path: path.stem)
def test_only_compat_knows_what_is_private_to_jax(path: Path) -> None:
    is_compat = path.parent.name == "_compat"
    if is_compat:
        assert own_modules(path) <= {"_compat"}
    assert is_compat or not any(name.startswith(("jax._src", "jaxlib")) for name in imported_names(path))


def test_collectives_are_below_their_callers() -> None:
    for path in (ROOT / "jaxhetero" / "_collectives").glob("*.py"):
        below = {"_collectives", "_compat", "_job", "_native", "config", "errors"}
        assert own_modules(path) <= below, path.name


@pytest.mark.parametrize(
    "module", ["jaxhetero.cli", "jaxhetero.launch.reducer", "jaxhetero.launch", "jaxhetero.doctor"]
)
def test_commands_do_not_import_jax(module: str) -> None:
    """A reducer's host needs no JAX that works, and a launcher should start at once."""
    program = f"import sys, {module}; print(*({{'jax', 'jaxlib', 'numpy'}} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_every_public_name_is_declared_for_type_checkers() -> None:
    """The names that ``jaxhetero`` imports when they are used are the names that mypy is told."""
    tree = ast.parse((ROOT / "jaxhetero" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    declared = {alias.asname: node.module for node in imports for alias in node.names}
    homes = {name: f"jaxhetero.{home}" for name, home in jaxhetero._HOMES.items()}
    assert declared == homes | dict.fromkeys(jaxhetero._MODULES, "jaxhetero")
    for name in dir(jaxhetero):
        assert getattr(jaxhetero, name) is not None
