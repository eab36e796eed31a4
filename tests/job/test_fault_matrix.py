"""Links that break, frames that are cut, clocks that jump: some cells of `python -m tests.long.fault_matrix`."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from lab.netlab import missing
from tests.long.fault_matrix import Cell, Result, run_cell

CELLS = [
    Cell("down", "reducer", "shutdown"),
    Cell("down", "coordinator", "push"),
    Cell("slow", "coordinator", "return"),
    Cell("frames", "reducer", "push"),
    Cell("reset", "worker", "push"),
    Cell("clock", "coordinator", "push"),
    Cell("kill", "worker", "return", elastic=True),
    Cell("down", "worker", "push", elastic=True),
    Cell("stop", "coordinator", "push", elastic=True),
]
# In CI the lab itself fails when there can be no namespaces.
needs_lab = pytest.mark.skipif(
    (missing() is not None or shutil.which("nft") is None) and os.environ.get("CI") != "true",
    reason=f"no lab, or no nftables: {missing()}",
)


@pytest.fixture(scope="module")
def results() -> dict[Cell, Result]:
    """All cells have ended here: their processes must not see the variables that single tests are started with."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setenv("JAXHETERO_STRANDS", os.environ.get("JAXHETERO_STRANDS", "2"))
        return dict(zip(CELLS, pool.map(run_cell, CELLS), strict=True))


@needs_lab
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_fault_ends_as_promised(cell: Cell, results: dict[Cell, Result]) -> None:
    result = results[cell]
    assert not result.problems, result.logs
