"""The C++ core is a folder a floor, for CMake (the wheel) and for Bazel (floors, tests)."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "xla_ffi"
FLOORS = sorted(build.parent.name for build in CORE.glob("*/BUILD"))


def sources_of(floor: str) -> list[Path]:
    """The files of a folder that Bazel compiles."""
    files = [path for path in (CORE / floor).iterdir() if path.suffix in {".cc", ".h"}]
    return [path for path in files if path.name != "module.cc"]


def test_bazel_and_cmake_build_the_same_folders() -> None:
    (listed,) = re.findall(r"^foreach\(folder ([\w ]+)\)", (CORE / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert sorted(listed.split()) == FLOORS
    assert {path.parent.name for path in CORE.glob("*/*.cc")} <= set(FLOORS)


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_includes_only_its_deps(floor: str) -> None:
    """Bazel's sandbox shows a floor the headers of its deps and, alas, of theirs; here each include needs a dep."""
    deps = set(re.findall(r'"//xla_ffi/(\w+)"', (CORE / floor / "BUILD").read_text()))
    for path in sources_of(floor):
        included = set(re.findall(r'^#include "xla_ffi/(\w+)/', path.read_text(), re.MULTILINE)) - {floor}
        assert included <= deps, f"{path} includes what {floor} has no dep on"


def test_only_handlers_see_xla_only_module_sees_python_and_none_the_environment() -> None:
    for path in CORE.rglob("*"):
        if path.suffix in {".cc", ".h"}:
            text = path.read_text()
            assert path.parent.name == "ffi" or '#include "xla/' not in text, path
            assert path.name == "module.cc" or not re.search(r"nanobind/|Python\.h", text), path
            assert not re.search(r"\bgetenv\b", text), path
