"""What a cut is like: a table of its stages, and a picture of its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

from jaxhetero.pipeline.schedules import Schedule, TaskKind
from jaxhetero.pipeline.simulation import Simulation

_LETTERS = {TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.WEIGHTS: "W"}
_COLUMNS = 100


@dataclass(frozen=True)
class StageReport:
    """One stage.

    Attributes:
      cost: the share of the whole forward pass that it computes.
      parameter_count: elements of its parameters.
      parameter_bytes: their size.
      sum_bytes: of the sums of their gradients.
      prepared_bytes: what it makes of the parameters once a step.
      received_bytes: of activations, in each microbatch.
      fixed_bytes: of its parameters, the sums of their gradients, and what it makes of them once a step.
      kept_bytes: what a microbatch keeps between its forward and its backward pass.
      kept_for_weights_bytes: and from there until the gradients of the parameters, if these are tasks of their own.
      microbatches: how many of them keep one of these at most at a time.
      largest: the operation that costs most, and where it is in the program.
      largest_cost: its share of the whole forward pass.
    """

    cost: float
    parameter_count: int
    parameter_bytes: int
    sum_bytes: int
    prepared_bytes: int
    received_bytes: int
    fixed_bytes: int
    kept_bytes: int
    kept_for_weights_bytes: int
    microbatches: int
    largest: str
    largest_cost: float


@dataclass(frozen=True)
class Report:
    """A cut. ``str`` of it, and ``print``, show the table and the picture.

    Attributes:
      schedule: the tasks of each worker.
      stages: the parts of the model.
      balance: the cost of the largest stage, divided by the mean.
      operation_count: operations between which the model could be cut.
      simulation: a step, with the costs and the network that the cut was made for.
    """

    schedule: Schedule
    stages: tuple[StageReport, ...]
    balance: float
    operation_count: int
    simulation: Simulation

    def memory_bytes(self, worker: int) -> int:
        """The most that a worker of a pipeline holds at a time: what is fixed, and what microbatches keep.

        Not in it: the optimizer's state, the batch, what a running program needs beside its operands and results, and
        the messages on their way, of which up to three of each kind wait at a worker.
        """
        schedule = self.schedule
        own = range(worker, schedule.stage_count, schedule.places)
        kept = {stage: self.stages[stage].kept_bytes for stage in own}
        kept_for_weights = {stage: self.stages[stage].kept_for_weights_bytes for stage in own}
        return sum(self.stages[stage].fixed_bytes for stage in own) + schedule.most_kept(worker, kept, kept_for_weights)

    def __str__(self) -> str:
        text = StringIO()
        console = Console(file=text, width=_COLUMNS + 30, highlight=False)
        console.print(self._table())
        console.print(self._limit())
        console.print(self.picture())
        return text.getvalue()

    def _table(self) -> Table:
        schedule = self.schedule
        table = Table(
            title=f"{schedule.stage_count} stages on {schedule.places} workers, {schedule.microbatches} microbatches, "
            f"schedule {schedule.name}"
        )
        for name in ("stage", "worker", "cost", "parameters", "received", "fixed", "kept", "times"):
            table.add_column(name, justify="right")
        for number, stage in enumerate(self.stages):
            table.add_row(
                str(number),
                str(schedule.place_of(number)),
                f"{stage.cost:.1%}",
                f"{stage.parameter_count:,}",
                _size(stage.received_bytes),
                _size(stage.fixed_bytes),
                _size(max(stage.kept_bytes, stage.kept_for_weights_bytes)),
                str(stage.microbatches),
            )
        return table

    def _limit(self) -> str:
        largest = max(self.stages, key=lambda stage: stage.cost)
        bubble = self.simulation.bubble
        return (
            f"balance {self.balance:.3f} (largest stage / mean), workers idle {bubble:.1%} of a step. The largest "
            f"operation of the largest stage has {largest.largest_cost:.1%} of all: {largest.largest}"
        )

    def picture(self) -> str:
        """A line for each worker: its memory, and its step from begin to end: forward, backward, weights, idle."""
        lines = []
        step_s = self.simulation.compute_s
        for place, tasks in enumerate(self.schedule.tasks):
            line = ["."] * _COLUMNS
            previous = 0.0
            for task in tasks:
                end = self.simulation.ended_s[task]
                seconds = self.simulation.task_s(task)
                begin = max(end - seconds, previous)
                for column in range(round(begin / step_s * _COLUMNS), round(end / step_s * _COLUMNS)):
                    line[column] = _LETTERS[task.kind]
                previous = end
            lines.append(f"worker {place:3d} {_size(self.memory_bytes(place)):>7} {''.join(line)}")
        return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def balance(costs: Sequence[float]) -> float:
    """The largest, divided by the mean."""
    return max(costs) * len(costs) / sum(costs)
