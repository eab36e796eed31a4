"""The C++ core is listed twice, for CMake (the wheel) and for Bazel (layers, tests); the lists must agree."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "xla_ffi"
# nanobind's own CMake functions compile it.
CMAKE_ONLY = {"module.cc", "simulator/module.cc"}

Target = dict[str, list[str]]


def read_targets(build: Path) -> dict[str, Target]:
    """The targets of a BUILD file by label, with files as paths from the root. BUILD files are Python to the eye."""
    package = build.parent.relative_to(ROOT)
    targets = {}
    for node in ast.parse(build.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            given = {word.arg: word.value for word in node.value.keywords}
            if "name" in given:
                found = {key: ast.literal_eval(given[key]) if key in given else [] for key in ("srcs", "hdrs", "deps")}
                targets[f"//{package}:{ast.literal_eval(given['name'])}"] = {
                    "srcs": [f"{package}/{name}" for name in found["srcs"]],
                    "hdrs": [f"{package}/{name}" for name in found["hdrs"]],
                    "deps": [f"//{package}{dep}" if dep.startswith(":") else dep for dep in found["deps"]],
                }
    return targets


def cmake_sources() -> list[str]:
    text = re.sub(r"#.*", "", (CORE / "CMakeLists.txt").read_text(encoding="utf-8"))
    return [f"xla_ffi/{name}" for name in re.findall(r"[\w/]+\.(?:cc|h)\b", text)]


def core_sources() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in CORE.rglob("*") if path.suffix in {".cc", ".h"})


def quoted_includes(source: str) -> set[str]:
    """The project's own headers that a file includes."""
    return set(re.findall(r'^#include "(.*)"', (ROOT / source).read_text(encoding="utf-8"), re.MULTILINE))


LAYERS = {name: target for build in CORE.rglob("BUILD") for name, target in read_targets(build).items()}
TESTS = read_targets(ROOT / "tests" / "cc" / "BUILD")


def test_bazel_and_cmake_list_the_same_sources() -> None:
    bazel = [name for layer in LAYERS.values() for name in layer["srcs"] + layer["hdrs"]]
    cmake = cmake_sources()
    assert len(bazel) == len(set(bazel)), "a file is in two Bazel targets"
    assert len(cmake) == len(set(cmake)), "a file is listed twice in CMakeLists.txt"
    assert set(cmake) == set(bazel) | {f"xla_ffi/{name}" for name in CMAKE_ONLY}


def test_every_source_is_listed() -> None:
    assert core_sources() == sorted(cmake_sources())


def test_every_cc_test_is_listed() -> None:
    listed = {Path(name).name for target in TESTS.values() for name in target["srcs"] + target["hdrs"]}
    assert {path.name for path in (ROOT / "tests" / "cc").iterdir() if path.suffix in {".cc", ".h"}} == listed


@pytest.mark.parametrize("name", LAYERS)
def test_layer_includes_only_its_deps(name: str) -> None:
    """Bazel's sandbox shows a layer the headers of its deps and, alas, of theirs; here each include needs a dep."""
    layer = LAYERS[name]
    allowed = set(layer["hdrs"])
    for dep in layer["deps"]:
        if dep in LAYERS:
            allowed.update(LAYERS[dep]["hdrs"])
    for source in layer["srcs"] + layer["hdrs"]:
        own = {include for include in quoted_includes(source) if not include.startswith("xla/")}
        assert own <= allowed, f"{source} includes what {name} has no dep on"


def test_only_handlers_see_xla_only_module_sees_python_and_none_the_environment() -> None:
    handlers = {name for name, layer in LAYERS.items() if "@xla_headers//:ffi" in layer["deps"]}
    allowed = {source for name in handlers for source in LAYERS[name]["srcs"] + LAYERS[name]["hdrs"]}
    assert {Path(source).stem for source in allowed} <= {
        *("call_site", "handlers", "cuda_handlers"),
        *("host_handler", "cuda_handler", "exchange_handler", "state_call"),
    }
    for source in core_sources():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source not in allowed:
            assert '#include "xla/' not in text, source
        if Path(source).name != "module.cc":
            assert "nanobind/" not in text, source
            assert "Python.h" not in text, source
        assert not re.search(r"\bgetenv\b", text), source
