"""The C++ core is listed twice, for CMake (the wheel) and for Bazel (layers, tests); the lists must agree."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "xla_ffi"
# nanobind's own CMake functions compile it.
CMAKE_ONLY = {"module.cc"}

Target = dict[str, list[str]]


def read_targets(build: Path) -> dict[str, Target]:
    """The targets of a BUILD file, each as its ``srcs``, ``hdrs`` and ``deps``. BUILD files are Python to the eye."""
    targets = {}
    for node in ast.parse(build.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            given = {word.arg: ast.literal_eval(word.value) for word in node.value.keywords}
            if "name" in given:
                targets[given["name"]] = {key: given.get(key, []) for key in ("srcs", "hdrs", "deps")}
    return targets


def cmake_sources() -> list[str]:
    text = re.sub(r"#.*", "", (CORE / "CMakeLists.txt").read_text(encoding="utf-8"))
    return re.findall(r"\b\w+\.(?:cc|h)\b", text)


def quoted_includes(source: Path) -> set[str]:
    """The project's own headers that a file includes, by file name."""
    found = re.findall(r'^#include "(?:xla_ffi/)?(\w+\.h)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    return set(found)


LAYERS = read_targets(CORE / "BUILD")
TESTS = read_targets(ROOT / "tests" / "cc" / "BUILD")


def test_bazel_and_cmake_list_the_same_sources() -> None:
    bazel = [name for layer in LAYERS.values() for name in layer["srcs"] + layer["hdrs"]]
    cmake = cmake_sources()
    assert len(bazel) == len(set(bazel)), "a file is in two Bazel targets"
    assert len(cmake) == len(set(cmake)), "a file is listed twice in CMakeLists.txt"
    assert set(cmake) == set(bazel) | CMAKE_ONLY


def test_every_source_is_listed() -> None:
    assert {path.name for path in CORE.iterdir() if path.suffix in {".cc", ".h"}} == set(cmake_sources())


def test_every_cc_test_is_listed() -> None:
    listed = {name for target in TESTS.values() for name in target["srcs"] + target["hdrs"]}
    assert {path.name for path in (ROOT / "tests" / "cc").iterdir() if path.suffix in {".cc", ".h"}} == listed


@pytest.mark.parametrize("name", LAYERS)
def test_layer_includes_only_its_deps(name: str) -> None:
    """Bazel's sandbox shows a layer the headers of its deps and, alas, of theirs; here each include needs a dep."""
    layer = LAYERS[name]
    allowed = set(layer["hdrs"])
    for dep in layer["deps"]:
        if dep.startswith(":"):
            allowed.update(LAYERS[dep[1:]]["hdrs"])
    for source in layer["srcs"] + layer["hdrs"]:
        assert quoted_includes(CORE / source) <= allowed, f"{source} includes what {name} has no dep on"


def test_only_handlers_see_xla_only_module_sees_python_and_none_the_environment() -> None:
    for path in CORE.iterdir():
        if path.suffix in {".cc", ".h"}:
            text = path.read_text(encoding="utf-8")
            if path.stem not in {"call_site", "handlers", "cuda_handlers"}:
                assert '#include "xla/' not in text, path.name
            if path.name != "module.cc":
                assert "nanobind/" not in text, path.name
                assert "Python.h" not in text, path.name
            assert not re.search(r"\bgetenv\b", text), path.name
