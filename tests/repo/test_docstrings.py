"""Examples in docstrings: every public name has one, and all of them give what they say, in a world of one worker."""

import doctest
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxhetero
import jaxhetero._collectives.buckets
import jaxhetero.config
import jaxhetero.doctor
import jaxhetero.errors
import jaxhetero.launch
import jaxhetero.optimizers

PACKAGE = Path(jaxhetero.__file__).parent
# The launcher forks, which a process with JAX's threads must not do.
IN_A_FRESH_PROCESS = "jaxhetero.launch.job"


def modules_with_examples() -> list[str]:
    """All but the package's own, which the others follow."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]
    paths.remove(PACKAGE / "__init__.py")
    return [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]


def public_names() -> dict[str, Any]:
    """Every public function and class by its name, but the exceptions: the module's docstring shows those."""
    found = {f"jaxhetero.{name}": getattr(jaxhetero, name) for name in jaxhetero.__all__}
    found["jaxhetero.config.Config"] = jaxhetero.config.Config
    for module in (jaxhetero.optimizers, jaxhetero.launch, jaxhetero.doctor, jaxhetero.errors):
        for name, thing in vars(module).items():
            if not name.startswith("_") and getattr(thing, "__module__", "").startswith("jaxhetero"):
                found[f"{module.__name__}.{name}"] = thing
    is_error = jaxhetero.errors.JaxheteroError
    return {
        name: thing
        for name, thing in found.items()
        if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, is_error))
    }


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What an example may use: the names of the example in the package's own docstring, which begins a world of one."""
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith(jaxhetero.config.ENV_PREFIX)]:
        monkeypatch.delenv(variable)
    beginning = doctest.DocTestParser().get_doctest(jaxhetero.__doc__ or "", {}, "jaxhetero", jaxhetero.__file__, 0)
    run(beginning)
    yield beginning.globs
    jaxhetero.shutdown()


def run(test: doctest.DocTest) -> None:
    """Run one docstring's examples, and leave in ``test.globs`` what they have defined."""
    outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False)
    assert outcome.attempted > 0
    assert outcome.failed == 0, f"{test.name}: see the output"


@pytest.mark.parametrize("module", [name for name in modules_with_examples() if name != IN_A_FRESH_PROCESS])
def test_examples(module: str, names: dict[str, Any]) -> None:
    if module.startswith("jaxhetero.cluster.ray."):
        pytest.importorskip("ray", reason="needs the extra [ray]")
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module), globs=dict(names)):
        if test.examples:
            run(test)


def test_examples_of_the_launcher(tmp_path: Path) -> None:
    program = f"import doctest, {IN_A_FRESH_PROCESS} as module; sys.exit(doctest.testmod(module).failed)"
    command = [sys.executable, "-c", f"import sys; {program}"]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_an_example(name: str) -> None:
    thing = public_names()[name]
    text = inspect.getdoc(thing) or ""
    assert text.strip(), f"{name} has no docstring"
    assert ">>>" in text, f"{name} has no example"
