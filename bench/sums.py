"""How fast one core sums, against how fast it copies memory.

    python -m bench.sums

For each element type and number of workers, the reducer's own arithmetic sums chunks that lie in memory, one of each
worker, and writes the total over the first. Between the sums the same core copies one half of the same memory to the
other half, in pieces of the same size, with the C library's ``memcpy``: what a cache holds of it when it comes is the
same for both. Each is a median over turns in alternation. ``--region-mib`` says how much memory they go through.

The columns:

    sums GB/s    bytes that the core reads and writes: a chunk of each worker, and the total
    copies GB/s  bytes that the copy reads and writes
    ratio        of the two
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.engines.build_native import build
from bench.harness.command import check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.report import describe_machine, write_result

_SOURCE = Path(__file__).with_suffix(".cc")
_ROOT = _SOURCE.parents[1]
# As in xla_ffi/sum/reduce.h.
_TYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}


@dataclass(frozen=True)
class Options:
    """Sums and copies of one core."""

    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    """How many chunks make a total."""
    types: tuple[str, ...] = tuple(_TYPES)
    """Element types."""
    chunk_kib: int = 128
    """The size of a chunk."""
    region_mib: int = 32
    """How much memory each worker's chunks lie in, one after the other."""
    turns: int = 5
    """How often each is measured."""
    seconds: float = 0.1
    """How long one measurement takes."""
    json: Path | None = None
    """A file for the results."""


@dataclass(frozen=True)
class Row:
    """Medians over turns, in bytes a second."""

    type: str
    workers: int
    sum_bytes_per_s: float
    copy_bytes_per_s: float

    @property
    def ratio(self) -> float:
        """How fast the sum is against the copy."""
        return self.sum_bytes_per_s / self.copy_bytes_per_s


def measure(options: Options, library: ctypes.CDLL) -> list[Row]:
    """Every type and number of workers, on one core."""
    library.sum_bytes_per_s.restype = library.copy_bytes_per_s.restype = ctypes.c_double
    region_bytes, chunk_bytes = options.region_mib << 20, options.chunk_kib << 10
    memory = np.ones(max(2, *options.workers) * region_bytes, np.uint8)
    start, chunk = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(chunk_bytes)
    seconds = ctypes.c_double(options.seconds)
    rows = []
    for name in options.types:
        for workers in options.workers:
            sums, copies = [], []
            dtype, count = ctypes.c_uint8(_TYPES[name]), ctypes.c_size_t(workers)
            region, half = ctypes.c_size_t(region_bytes), ctypes.c_size_t(max(2, workers) * region_bytes // 2)
            for _ in range(options.turns):
                total = library.sum_bytes_per_s(dtype, count, start, region, chunk, seconds)
                sums.append((workers + 1) * total)
                copies.append(2 * library.copy_bytes_per_s(start, half, chunk, seconds))
            rows.append(Row(name, workers, statistics.median(sums), statistics.median(copies)))
    return rows


def show(rows: Sequence[Row], console: Console) -> None:
    """A table of the rows."""
    table = Table("type", "workers", "sums GB/s", "copies GB/s", "ratio")
    for row in rows:
        rates = (f"{rate / 1e9:.1f}" for rate in (row.sum_bytes_per_s, row.copy_bytes_per_s))
        table.add_row(row.type, str(row.workers), *rates, f"{row.ratio:.2f}")
    console.print(table)


def run(options: Options) -> int:
    """Measure on one of the cores that this process may use, and show the table."""
    if unknown := set(options.types) - _TYPES.keys():
        raise BenchError(f"there is no type {', '.join(sorted(unknown))}; there are {', '.join(_TYPES)}")
    if options.chunk_kib < 1 or options.region_mib << 10 < options.chunk_kib or min(options.workers, default=0) < 1:
        raise BenchError("a chunk must have at least 1 KiB and fit in a region, and there must be a worker")
    check_folders(options.json)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        more = ["-O3", "-ffp-contract=off", f"-I{_ROOT}", str(_ROOT / "xla_ffi/sum/reduce.cc")]
        rows = measure(options, ctypes.CDLL(str(build(_SOURCE, Path(folder), more=more))))
    show(rows, Console())
    if options.json is not None:
        content = {
            "machine": describe_machine(),
            "options": asdict(options) | {"json": None},
            "rows": [asdict(row) for row in rows],
        }
        write_result(options.json, content)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    return run_command(lambda: run(tyro.cli(Options, args=arguments, description=__doc__)))


if __name__ == "__main__":
    sys.exit(main())
