"""Links that break, frames that are cut, clocks that jump: some cells of `python -m tests.fault_matrix`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from bench.netlab import missing
from tests.fault_matrix import Cell, Result, run_cell

CELLS = [
    Cell("down", "reducer", "shutdown"),
    Cell("down", "coordinator", "push"),
    Cell("slow", "coordinator", "return"),
    Cell("frames", "reducer", "push"),
    Cell("reset", "worker", "push"),
    Cell("clock", "coordinator", "push"),
]
# In CI the lab itself fails when there can be no namespaces.
needs_lab = pytest.mark.skipif(
    (missing() is not None or shutil.which("nft") is None) and os.environ.get("CI") != "true",
    reason=f"no lab, or no nftables: {missing()}",
)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[Cell, Future[Result]]]:
    with ThreadPoolExecutor(3) as pool:
        yield {cell: pool.submit(run_cell, cell) for cell in CELLS}


@needs_lab
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_fault_ends_as_promised(cell: Cell, results: dict[Cell, Future[Result]]) -> None:
    result = results[cell].result()
    assert not result.problems, result.logs
