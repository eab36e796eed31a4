"""What the executor of a pipeline spends on a task, beside the programs that it runs.

    python -m bench.tasks

A model of many small parameters is cut into stages that are all on this worker, so no message is waited for. The time
is that of the processor, in the thread that runs the schedule. It has the work of a whole step in it: dividing the
batch, preparing the stages, the tasks, the reduction and the results. Of several steps, the least counts.

The columns:

    leaves       parameters of each stage. A backward pass is given these, the sums of their gradients, and what was
                 kept; it makes the sums
    programs_us  of a task, in the compiled programs: JAX's dispatch, and a computation as small as it can be
    own_us       of a task, all the rest: what jaxhetero adds
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import jaxhetero
from bench.errors import BenchError
from bench.harness.command import run_command
from bench.harness.report import format_columns
from jaxhetero.pipeline.programs import Program

_STAGES = 2
_WIDTH = 4


@dataclass(frozen=True)
class Options:
    """The executor's own time."""

    leaves: tuple[int, ...] = (10, 100)
    """Parameters of a stage."""
    microbatches: int = 32
    """Of a step."""
    steps: int = 10
    """That are measured."""
    parted: bool = False
    """With gradients of parameters as tasks of their own, in one stage."""

    def __post_init__(self) -> None:
        if min(*self.leaves, self.microbatches, self.steps) < 1:
            raise BenchError("--leaves, --microbatches and --steps must be at least 1")


@dataclass(frozen=True)
class Row:
    """Of one task, on average."""

    leaves: int
    schedule: str
    programs_us: float
    own_us: float


class _Watch:
    """Adds up what compiled programs take in the thread that calls them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def compile(self, program: Program) -> Any:
        run = _compile(program)

        def timed(donated: list[Any], others: list[Any]) -> Any:
            begin = time.thread_time()
            results = run(donated, others)
            self.seconds += time.thread_time() - begin
            return results

        return timed


_compile = Program.compile


def measure(leaves: int, options: Options) -> Row:
    """Steps of a chain of layers, each with one small parameter."""
    stages = 1 if options.parted else _STAGES
    schedule: Any = "zero_bubble" if options.parted else "breadth_first"

    def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for scale in params:
            x = x * scale
        return jnp.mean(x)

    params = [jnp.ones(_WIDTH)] * (leaves * stages)
    batch = jnp.ones((options.microbatches, _WIDTH))
    watch = _Watch()
    Program.compile = lambda self: watch.compile(self)  # type: ignore[method-assign]
    try:
        grad_fn = jaxhetero.pipeline.value_and_grad(
            loss_fn, microbatches=options.microbatches, schedule=schedule, stages_per_worker=stages
        )
        task_count = len(grad_fn.cut(params, batch).schedule.tasks[0])
        jax.block_until_ready(grad_fn(params, batch))
    finally:
        Program.compile = _compile  # type: ignore[method-assign]
    best = (float("inf"), 0.0)
    for _ in range(options.steps):
        watch.seconds = 0.0
        begin = time.thread_time()
        results = grad_fn(params, batch)
        best = min(best, (time.thread_time() - begin - watch.seconds, watch.seconds))
        jax.block_until_ready(results)
    own_s, programs_s = best
    return Row(leaves, schedule, programs_s / task_count * 1e6, own_s / task_count * 1e6)


def run(options: Options) -> list[Row]:
    jaxhetero.initialize(alone=True)
    rows = [measure(leaves, options) for leaves in options.leaves]
    lines = [["leaves", "schedule", "programs_us", "own_us"]]
    lines += [[str(row.leaves), row.schedule, f"{row.programs_us:.0f}", f"{row.own_us:.0f}"] for row in rows]
    print(format_columns(lines), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.tasks", args=arguments, description=__doc__))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
