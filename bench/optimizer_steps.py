"""Steps of AdamW that the reducers run, beside a sum of the same gradients, between hosts whose network has a rate.

    python -m bench.optimizer_steps --size 16MiB

Every host is a network namespace with an interface of that rate (bench/netlab; needs root). S is the size of the
weights in float32. Gradients and weights are float32 and bfloat16 in turn, and are there at once. The columns:

    step_ms   the median step: from the first worker's begin to the last worker's end
    S/B       that, over the time that S takes with the goodput B of one interface
    sent/S    bytes that a worker sent in a step; recv/S: received
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

from bench.engines.optimizer import PLACES
from bench.engines.specs import EngineSpec, parse_size
from bench.harness.command import check_folders, run_command
from bench.harness.job import Job, measure_conditions
from bench.harness.report import format_columns, write_json
from bench.harness.team import start_teams
from bench.netlab import Lab
from bench.train_step import from_first_begin_to_last_end

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Options:
    """Steps of AdamW that the reducers run."""

    workers: int = 8
    """Each on a host of its own."""
    reducers: int = 8
    """Dedicated ones, likewise."""
    size: str = "16MiB"
    """Of the weights in float32."""
    rate: str = "200mbit"
    """Rate of every host's network interface, each way."""
    engine: str = "jaxhetero"
    """Or with settings: ``jaxhetero:32768x4``."""
    rounds: int = 3
    """Turns that everything gets."""
    batch: int = 5
    """Steps in a turn."""
    json: Path | None = None
    """Write all figures to this file."""

    def __post_init__(self) -> None:
        check_folders(self.json)


@dataclass(frozen=True)
class Row:
    """The figures of one place of the optimizer, with one dtype."""

    place: str
    dtype: str
    step_s: float
    of_limit: float
    sent: float
    received: float


def run(options: Options) -> list[Row]:
    """Measure, and show the table."""
    job = Job(options.workers, options.reducers, 0, options.rate)
    size = parse_size(options.size)
    with Lab(job.hosts()) as lab:
        print(f"# {lab.description}", flush=True)
        conditions = measure_conditions(job, lab)
        print(f"# {conditions.describe()}", flush=True)
        cases = [(place, dtype) for dtype in _DTYPES for place in PLACES]
        times_s: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        answers = {}
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            (team,) = start_teams([EngineSpec.parse(options.engine)], lab, job, folder, stack)
            for place, dtype in cases:
                team.request("prepare_optimizer", place=place, count=size // 4, dtype=dtype)
            for _ in range(options.rounds):
                for number, case in enumerate(cases):
                    answers[case] = team.request("measure_optimizer", number=number, count=options.batch)
                    times_s[case] += from_first_begin_to_last_end(answers[case])
            team.stop()
    rows = [
        Row(
            *case,
            median(times_s[case]),
            median(times_s[case]) * conditions.goodput_bytes_per_s / size,
            max(answer["sent"] for answer in answers[case]),
            max(answer["received"] for answer in answers[case]),
        )
        for case in cases
    ]
    if options.json:
        write_json(options.json, "optimizer_steps", rows, conditions, options, lab.description)
    print(_table(rows), flush=True)
    return rows


def _table(rows: Sequence[Row]) -> str:
    lines = [["optimizer", "dtype", "step_ms", "S/B", "sent/S", "recv/S"]]
    for row in rows:
        figures = [f"{row.step_s * 1e3:.1f}", f"{row.of_limit:.3f}", f"{row.sent:.3f}", f"{row.received:.3f}"]
        lines.append([row.place, row.dtype, *figures])
    return format_columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""

    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.optimizer_steps", args=arguments, description=__doc__))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
