"""How long it takes to cut a large model, and how much memory.

    python -m bench.planning

Decoders of about 3 and 100 billion parameters are traced on their shapes and cut for a job of many workers, with
``stages="auto"`` and ``schedule="auto"``: ``jaxhetero.pipeline.value_and_grad(...).cut(...)``, as a user calls it.
Nothing is computed, and no parameter is allocated. Each cut is made in a fresh process. Of several, the one with the
least time of the processor is shown.

The columns:

    seconds     until ``.cut(...)`` returns its report
    cpu         of this, seconds of the processor: what other programs on the machine disturb less
    peak_mb     the most memory that the process has had meanwhile, beyond what it had after the imports
    operations  between which the model could be cut
    cut         stages x stages of a worker, and the schedule
    balance     the cost of the largest stage / the mean
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

import jaxhetero
from bench.decoders import DECODERS
from bench.errors import BenchError
from bench.harness.command import run_command
from bench.harness.report import format_columns
from jaxhetero._job import world
from jaxhetero.config import Config


@dataclass(frozen=True)
class Options:
    """Cuts of large models."""

    models: str = "3 B,100 B"
    """Which of them."""
    workers: int = 8
    """Of the job that they are cut for."""
    microbatches: int = 32
    """Of one sequence each."""
    length: int = 2048
    """Of a sequence."""
    turns: int = 3
    """How often each is cut."""

    def __post_init__(self) -> None:
        unknown = set(self.names()) - DECODERS.keys()
        if unknown:
            raise BenchError(f"--models has {', '.join(sorted(unknown))}; there are {', '.join(DECODERS)}")
        if min(self.workers, self.microbatches, self.length, self.turns) < 1:
            raise BenchError("--workers, --microbatches, --length and --turns must be at least 1")

    def names(self) -> list[str]:
        return [name.strip() for name in self.models.split(",")]


@dataclass(frozen=True)
class Row:
    """What one cut took."""

    model: str
    parameter_count: int
    seconds: float
    cpu_s: float
    peak_bytes: int
    operation_count: int
    places: int
    stages_per_place: int
    schedule: str
    balance: float


def measure(name: str, options: Options) -> Row:
    """Cut a model in this process, which has done nothing before."""
    decoder = DECODERS[name]
    shapes = decoder.shapes()
    tokens = jax.ShapeDtypeStruct((options.microbatches, options.length), jnp.int32)
    _enter_world(options.workers)
    grad_fn = jaxhetero.pipeline.value_and_grad(decoder.loss, microbatches=options.microbatches)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    begin, cpu_begin = time.perf_counter(), time.process_time()
    report = grad_fn.cut(shapes, tokens, tokens)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    schedule = report.schedule
    return Row(
        name,
        decoder.parameter_count(),
        seconds,
        cpu_s,
        _memory("VmHWM") - before,
        report.operation_count,
        schedule.places,
        schedule.stages_per_place,
        schedule.name,
        report.balance,
    )


def _enter_world(worker_count: int) -> None:
    """A job of which only rank 0 is here. A cut talks to the others only to compare what they have traced."""
    config = Config(rank=0, worker_count=worker_count, coordinator="localhost:1", token="not used")
    world._current.world = world.World(config)


def _memory(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def run(options: Options) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    rows = []
    for name in options.names():
        with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
            turns = [pool.submit(measure, name, options).result() for _ in range(options.turns)]
        rows.append(min(turns, key=lambda row: row.cpu_s))
    print(_table(rows), flush=True)
    return rows


def _table(rows: Sequence[Row]) -> str:
    lines = [["model", "parameters", "seconds", "cpu", "peak_mb", "operations", "cut", "balance"]]
    lines += [
        [
            row.model.replace(" ", "_"),
            f"{row.parameter_count / 1e9:.2f}e9",
            f"{row.seconds:.2f}",
            f"{row.cpu_s:.2f}",
            f"{row.peak_bytes / 1e6:.1f}",
            str(row.operation_count),
            f"{row.places}x{row.stages_per_place}_{row.schedule}",
            f"{row.balance:.3f}",
        ]
        for row in rows
    ]
    return format_columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.planning", args=arguments, description=__doc__))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
