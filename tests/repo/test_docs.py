"""The documentation: its programs run, its examples hold, its links lead somewhere. `.ci/docs` builds the site."""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxhetero
from jaxhetero import errors, optimizers
from jaxhetero.config import ENV_PREFIX, Config
from tests.support.cluster import ROOT
from tests.support.launcher import Run

DOCS = ROOT / "docs"
SITE_AND_NOTEBOOK = [*sorted(DOCS.rglob("*.md")), *sorted((ROOT / "notebook").glob("*.md"))]
PAGES = [
    *SITE_AND_NOTEBOOK,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")),
]
API = sorted((DOCS / "api").glob("*.md"))
TUTORIAL = DOCS / "tutorial" / "train_step.py"


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def programs() -> Iterator[tuple[Path, str]]:
    """Blocks that begin with an import are complete programs; the front page shows a piece of one."""
    for page in sorted(DOCS.rglob("*.md")):
        if page != DOCS / "index.md":
            yield from ((page, block) for block in python_blocks(page) if block.startswith("import "))


def run_job(launch: Run, *program: str, reducers: int = 1) -> str:
    """What two workers that run the program print."""
    arguments = ["--workers", "2", "--reducers", str(reducers), "--", sys.executable, *program]
    job = launch(*arguments, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)})
    assert job.returncode == 0, job.stdout + job.stderr
    return str(job.stdout)


def test_the_tutorial_trains(launch: Run) -> None:
    """To the losses that its page shows, in the order of its steps."""
    losses = re.findall(r"step \d+: loss \S+", run_job(launch, str(TUTORIAL), reducers=2))
    assert losses == re.findall(r"step \d+: loss \S+", (DOCS / "tutorial" / "train_step.md").read_text())
    values = [float(loss.split()[-1]) for loss in losses]
    assert values[-1] < values[0] / 2


@pytest.mark.parametrize(("page", "program"), [pytest.param(*each, id=each[0].stem) for each in programs()])
def test_a_program_of_a_page_runs(page: Path, program: str, launch: Run, tmp_path: Path) -> None:
    path = tmp_path / f"{page.stem}.py"
    path.write_text(program)
    run_job(launch, str(path))


@pytest.mark.parametrize("page", [page for page in API if ">>>" in page.read_text()], ids=lambda page: page.stem)
def test_the_examples_of_the_api_hold(page: Path, launch: Run) -> None:
    run_job(launch, "-m", "doctest", str(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_compiles(page: Path) -> None:
    for block in python_blocks(page):
        compile(block, str(page), "exec")


def public_names() -> Iterator[tuple[str, object]]:
    """Where they are documented, and they."""
    for name in jaxhetero.__all__:
        if name != "all_reduce_gradients":  # documented as one of the optimizers
            yield f"jaxhetero.{name}", getattr(jaxhetero, name)
    for module in (errors, optimizers):
        for name, value in vars(module).items():
            is_public = not name.startswith("_") and getattr(value, "__module__", "").startswith("jaxhetero.")
            if is_public and name not in ("from_status", "from_message"):
                yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize(("name", "value"), list(public_names()))
def test_the_api_has_every_public_name(name: str, value: object) -> None:
    """And an example of every function, on its page or in its docstring."""
    api = "".join(page.read_text() for page in API)
    found = re.search(
        rf"^\.\. auto\w+:: {re.escape(name)}(?:\(\))?$(.*?)(?=^\.\. auto|^```|\Z)", api, re.MULTILINE | re.DOTALL
    )
    assert found, f"no page of docs/api has {name}"
    if inspect.isfunction(value):
        assert ">>>" in found[1] + str(value.__doc__), f"{name} has no example"


def test_every_setting_is_in_the_how_to() -> None:
    page = (DOCS / "how_to" / "settings.md").read_text()
    names = [ENV_PREFIX + setting.name.upper() for setting in dataclasses.fields(Config)]
    assert [name for name in names if name not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not leads_somewhere(page, link)] == []


@pytest.mark.parametrize(
    ("root", "use"),
    [("xla_ffi", r'^#include "xla_ffi/(\w+)/'), ("jaxhetero", r"^ *from jaxhetero(?:\.| import )(\w+)")],
)
def test_a_folder_uses_only_folders_below_it_in_the_map(root: str, use: str) -> None:
    page = (DOCS / "architecture.md").read_text()
    table = page.partition(f"in `{root}/`**")[2].partition("\n\n|")[2].partition("\n\n")[0]
    order = re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)
    assert len(order) > 10
    for index, folder in enumerate(order):
        for path in (path for path in (ROOT / root / folder).rglob("*") if path.suffix in (".py", ".cc", ".h")):
            used = set(re.findall(use, path.read_text(), re.MULTILINE))
            assert not used & set(order[:index]), f"{path} uses what is above it"


def leads_somewhere(page: Path, link: str) -> bool:
    """To a file, and to a heading of it; links to other sites are not followed."""
    if re.match(r"[a-z]+:", link):
        return True
    path, _, heading = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not heading or heading in headings(target))


def headings(page: Path) -> set[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", SITE_AND_NOTEBOOK, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_at_most_120_columns(page: Path) -> None:
    """But for tables and for lines with a link, which cannot be broken."""
    lines = page.read_text().splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|") and "](" not in line] == []
