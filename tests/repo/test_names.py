"""What prose names is there: files, modules and names of the code, wherever inline code says one of them."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.cluster import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "notebook").rglob("*.md"))]
PAGES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")]  # CHANGELOG.md is history
FOLDERS = ("bazel", "bench", "deploy", "docs", "jaxhetero", "lab", "models", "notebook", "tests", "xla_ffi", ".ci")
SOURCES = (".py", ".pyi", ".cc", ".h", ".json", ".yaml", ".yml", ".toml")

# Names of JAX, Horovod, NCCL's tests, Linux, Prometheus and arithmetic, and what commands make.
NOT_OURS = {
    *("pmap_test.py", "shard_map_test.py", "check_tracer_leaks", "debug_nans", "ThunkExecutor"),
    *("allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "all_reduce_perf"),
    *("io_uring", "exported_job", "a_i", "f_i", ".venv/bin/activate"),
    *("build/docs", "build/fuzz/found", "build/fuzz/found/reducer", "build/fuzz/reducer", "jaxhetero-logs/DATE-TIME/"),
    *("bench/results/gpu-NAME.json", "global_norm"),
}


@cache
def files() -> list[Path]:
    """Without what was built."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return [*(path for path in ROOT.iterdir() if path.is_file() or path.name in FOLDERS), *inside]


@cache
def paths() -> set[str]:
    """Every end of a file's or folder's path: prose may leave out the folders that it speaks of."""
    return {"/".join(path.parts[index:]) for path in files() for index in range(len(ROOT.parts), len(path.parts))}


@cache
def code() -> dict[Path, set[str]]:
    """The words of every source, without its comments."""
    sources = [path for path in files() if path.suffix in SOURCES and path != Path(__file__)]
    return {path: set(re.findall(r"\w+", re.sub(r"(//|# ).*", "", path.read_text()))) for path in sources}


@cache
def words() -> set[str]:
    return set().union(*code().values())


def names(page: Path) -> Iterator[str]:
    """The words of inline code, without the arguments of a call; of a block what begins with a folder of ours."""
    block = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    for inline in re.findall(r"`([^`]+)`", block.sub("", page.read_text())):
        yield from (word.strip(",;") for word in re.sub(r"\(.*\)", "", inline).split())
    for found in block.findall(page.read_text()):
        yield from re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})[./][\w./-]*\w", found)


def is_there(name: str) -> bool:
    """Or none of what this test knows: a path, a module and what is in it, a name of C++, a name with an underscore."""
    if re.fullmatch(r"[\w.-]{2,}(/[\w.-]+)*/|[\w.-]{2,}(/[\w.-]+)+|\w+\.(py|cc|h)", name):
        return name.rstrip("/") in paths()
    if re.fullmatch(rf"({'|'.join(FOLDERS[:-1])})(\.\w+)+", name):
        return is_in_module(name.split("."))
    if re.fullmatch(r"\w+(::\w+)+", name):
        return any(set(name.split("::")) <= found for found in code().values())
    if re.fullmatch(r"_?[A-Z][a-z0-9]+([A-Z][a-z0-9]*)+|_[a-z]\w*|[a-z0-9]+(_[a-z0-9]+)+", name):
        return name in words() or name.removeprefix("jaxhetero_").removesuffix("_total") in words()  # a metric
    return True


def is_in_module(parts: list[str]) -> bool:
    """Whether the longest part of a dotted name that is a module has the name that follows."""
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        for module in (path.with_suffix(".py"), path.with_suffix(".pyi"), path / "__init__.py"):
            if module.exists():
                return set(parts[count : count + 1]) <= code()[module]
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert [name for name in names(page) if name not in NOT_OURS and not is_there(name)] == []


def test_the_files_that_code_names_are_there() -> None:
    """In its comments, its messages and its commands."""
    file = re.compile(rf"(?<![\w/.@{{}}$-])(?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|cc|h|md|json|yaml)\b")
    said = {(path, name) for path in code() for name in file.findall(path.read_text())}
    assert {(path, name) for path, name in said if name not in NOT_OURS | paths()} == set()


def test_the_list_of_what_is_not_ours_is_needed() -> None:
    said = {name for page in PAGES for name in names(page) if not is_there(name)}
    assert NOT_OURS - said == set()
