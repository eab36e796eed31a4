"""How much faster an all-reduce is with more cores: for a machine of many cores. Needs no network lab.

    python -m bench.cores
    python -m bench.cores --strands 1,2,4,8 --size 256MiB --json cores.json

Workers and reducers run on this machine, and all-reduce with each number of strands in turn: once over sockets of the
loopback network, and once through shared memory. The columns:

    GB/s         the payload / median time
    efficiency   how many times faster than one strand / strands
    worker_s/GB  CPU seconds of one worker per GB all-reduced; reducer_s/GB: of one reducer

With L strands, a job of n workers and k reducers keeps (n + k) L cores busy: no number of strands helps beyond the
cores that there are.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from bench.engines.pattern import itemsize
from bench.engines.specs import EngineSpec, parse_size
from bench.harness.command import check_at_least, check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.job import Job, measure_conditions
from bench.harness.measure import Payload, Sample, measure
from bench.harness.report import make_rows, write_json
from bench.harness.team import start_teams
from lab.netlab import Lab

_WAYS = {"sockets": "+shared_memory=0", "shared memory": ""}


@dataclass(frozen=True)
class Options:
    """Measures all-reduces with several numbers of strands, on the cores of this machine."""

    strands: str = "1,2,4,8"
    """Numbers of strands, which take turns."""
    workers: int = 2
    """Worker processes."""
    reducers: int = 2
    """Reducer processes."""
    size: str = "64MiB"
    """Bytes of float32 that every worker contributes, in place."""
    failover: bool = True
    """Whether the workers keep what they contribute."""
    rounds: int = 5
    """Turns that every number of strands gets."""
    batch: int | None = None
    """Measured all-reduces in a turn. Default: by the size."""
    json: Path | None = None
    """Write all figures to this file."""

    def __post_init__(self) -> None:
        check_at_least(self, workers=2, reducers=1, rounds=1, batch=1)

    def counts(self) -> list[int]:
        """The numbers of strands."""
        try:
            counts = [int(word) for word in self.strands.split(",")]
        except ValueError:
            raise BenchError(f"--strands is {self.strands!r}; it must be numbers, as in 1,2,4") from None
        if not all(1 <= count <= 32 for count in counts) or len(set(counts)) < len(counts):
            raise BenchError(f"--strands is {self.strands}; it must be different numbers from 1 to 32")
        return counts

    def specs(self) -> list[EngineSpec]:
        """An engine for each number of strands and each way of the bytes."""
        more = "" if self.failover else "+failover=0"
        return [
            EngineSpec.parse(f"jaxhetero:strands={count}{more}{way}")
            for way in _WAYS.values()
            for count in self.counts()
        ]


def run(options: Options) -> int:
    """Measure, and show the table. Returns 1 if a sum was wrong."""
    specs, size_bytes = options.specs(), parse_size(options.size)
    check_folders(options.json)
    job = Job(options.workers, options.reducers, 0, None)
    payload = Payload(size_bytes, size_bytes // itemsize("float32"), "float32", in_place=True)
    with Lab(job.hosts(), loopback=True) as lab, ExitStack() as stack:
        print(f"# {len(os.sched_getaffinity(0))} cores for {job.worker_count} workers and {job.reducer_count} reducers")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        teams = start_teams(specs, lab, job, folder, stack)
        samples = measure(teams, lab, [payload], options.rounds, 2, options.batch)
        for team in teams:
            team.stop()
        show(samples, options, Console())
        if options.json is not None:
            conditions = measure_conditions(job, lab)
            write_json(options.json, "cores", make_rows(samples, conditions), conditions, options, lab.description)
    return 1 if any(sample.wrong_count for sample in samples) else 0


def show(samples: Sequence[Sample], options: Options, console: Console) -> None:
    """A table of the samples, which are those of ``options.specs()``."""
    table = Table("bytes through", "strands", "GB/s", "efficiency", "worker_s/GB", "reducer_s/GB")
    counts = options.counts()
    for index, sample in enumerate(samples):
        way, count = list(_WAYS)[index // len(counts)], counts[index % len(counts)]
        first = samples[index - index % len(counts)]
        times = [statistics.median(each.times_s) for each in (sample, first)]
        moved_gb = sample.payload.bytes * sample.operation_count / 1e9
        table.add_row(
            way,
            str(count),
            f"{sample.payload.bytes / times[0] / 1e9:.2f}",
            f"{times[1] / times[0] * counts[0] / count:.2f}",
            f"{sample.worker_cpu_s / options.workers / moved_gb:.2f}",
            f"{sample.reducer_cpu_s / options.reducers / moved_gb:.2f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    return run_command(
        lambda: run(tyro.cli(Options, prog="python -m bench.cores", args=arguments, description=__doc__))
    )


if __name__ == "__main__":
    sys.exit(main())
