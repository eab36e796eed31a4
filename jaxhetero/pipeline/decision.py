"""Which schedule, and which cut: of several, the one whose simulated step is the shortest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jaxhetero._collectives.wire_dtypes import sum_dtype
from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.costs import BACKWARD
from jaxhetero.pipeline.operations import Operations
from jaxhetero.pipeline.partition import Fits, Partition, cut
from jaxhetero.pipeline.schedules import NAMES, Schedule, ScheduleName, Task, TaskKind, make_schedule
from jaxhetero.pipeline.simulation import Interconnect, Simulation, simulate

# By how much the largest stage may be larger than it has to be, so that fewer bytes travel.
_SLACKS = (0.0, 0.02, 0.05, 0.1, 0.2)
_SEVERAL = (2, 4)
# Of equal steps the first is taken, so those that keep fewer activations come first.
_AUTOMATIC: tuple[ScheduleName, ...] = ("interleaved", "zero_bubble", "virtual", "breadth_first")


@dataclass(frozen=True)
class Wishes:
    """What the user has said.

    Attributes:
      stages: workers in a pipeline; None to choose.
      microbatches: of a step.
      schedule: its name; None to choose.
      stages_per_worker: None to choose.
      memory_bytes: that a stage may need; None for any.
      network: between the workers.
    """

    stages: int | None
    microbatches: int
    schedule: ScheduleName | None = None
    stages_per_worker: int | None = None
    memory_bytes: float | None = None
    network: Interconnect = field(default_factory=Interconnect)


@dataclass(frozen=True)
class Decision:
    """A schedule and a partition, with the step that they make."""

    schedule: Schedule
    partition: Partition
    simulation: Simulation


def decide(operations: Operations, wishes: Wishes, worker_count: int) -> Decision:
    """The best decision that the wishes allow.

    Raises:
      ConfigError: there is none, and why.
    """
    partitions = _Partitions(operations, wishes.memory_bytes)
    best: Decision | None = None
    best_s = 0.0  # for as many examples: a replica's batch is given, and fewer stages make more replicas
    failures: list[ConfigError] = []
    tried = False
    for name, places, several in _candidates(wishes, worker_count):
        try:
            schedule = make_schedule(name, places, several, wishes.microbatches)
        except ConfigError as error:
            failures.append(error)
            continue
        if schedule.stage_count > len(operations.equations):
            failures.append(
                ConfigError(
                    f"pipeline: the loss has {len(operations.equations)} operations, which is too few for "
                    f"{schedule.stage_count} stages"
                )
            )
            continue
        tried = True
        for partition in partitions.for_schedule(schedule):
            simulation = simulate_step(operations, schedule, partition, wishes.network, worker_count // places)
            if best is None or simulation.step_s * places < best_s * (1 - 1e-6):
                best = Decision(schedule, partition, simulation)
                best_s = simulation.step_s * places
    if best is not None:
        return best
    if tried and wishes.memory_bytes is not None:
        raise ConfigError(
            f"pipeline: no cut into stages of at most {wishes.memory_bytes:.3g} bytes was found; use more stages, more "
            "microbatches of fewer examples, or the schedule 'interleaved', which keeps the fewest activations"
        )
    raise failures[0] if failures else ConfigError(f"pipeline: {worker_count} workers cannot be divided into pipelines")


def _candidates(wishes: Wishes, worker_count: int) -> Iterator[tuple[ScheduleName, int, int]]:
    names = _AUTOMATIC if wishes.schedule is None else (wishes.schedule,)
    divisors = [count for count in range(1, worker_count + 1) if worker_count % count == 0]
    for places in divisors if wishes.stages is None else [wishes.stages]:
        for name in names:
            for several in _stages_per_worker(name, wishes):
                yield name, places, several


def _stages_per_worker(name: ScheduleName, wishes: Wishes) -> Sequence[int]:
    if wishes.stages_per_worker is not None:
        return (wishes.stages_per_worker,)
    if name in ("virtual", "breadth_first"):
        return _SEVERAL
    assert name in NAMES
    return (1,)


class _Partitions:
    """The partitions to try, of one loss."""

    def __init__(self, operations: Operations, memory_bytes: float | None) -> None:
        self._operations = operations
        self._memory_bytes = memory_bytes
        self._chain = operations.chain()
        self._known: dict[int, list[Partition]] = {}  # by the number of stages, where memory does not matter

    def for_schedule(self, schedule: Schedule) -> list[Partition]:
        """Those into the stages of a schedule, with more and more unequal stages."""
        if self._memory_bytes is not None:
            return self._search(schedule.stage_count, _room(self._operations, schedule, self._memory_bytes))
        if schedule.stage_count not in self._known:
            self._known[schedule.stage_count] = self._search(schedule.stage_count, None)
        return self._known[schedule.stage_count]

    def _search(self, stage_count: int, fits: Fits | None) -> list[Partition]:
        found = (cut(self._chain, stage_count, slack=slack, fits=fits) for slack in _SLACKS)
        return list({partition.edges: partition for partition in found if partition is not None}.values())


def simulate_step(
    operations: Operations, schedule: Schedule, partition: Partition, network: Interconnect, replicas: int
) -> Simulation:
    """A step with these stages, their gradients reduced over so many replicas."""
    forward_s = [float(operations.costs[begin:end].sum()) for begin, end in pairwise(partition.edges)]

    def task_s(task: Task) -> float:
        if task.kind is TaskKind.FORWARD:
            return forward_s[task.stage]
        backward_s = BACKWARD * forward_s[task.stage]
        return backward_s / 2 if schedule.is_parted else backward_s

    sizes = _gradient_bytes(operations, partition)
    reduce_s: Callable[[int], float] | None = None
    if replicas > 1:
        rate = network.reduced_bytes_per_s or network.bytes_per_s
        reduce_s = lambda stage: sizes[stage] / rate + network.latency_s  # noqa: E731
    return simulate(schedule, task_s, _transfers(operations, partition), network, reduce_s)


def _transfers(operations: Operations, partition: Partition) -> dict[tuple[int, int], float]:
    """The bytes of a microbatch between any two stages."""
    home = _homes(partition)
    found: dict[tuple[int, int], float] = {}
    for value, position in operations.position.items():
        source, users = home[position], operations.uses.get(value)
        if users is None or home[users[-1]] == source:  # nearly all values stay in their stage
            continue
        for target in {home[user] for user in users} - {source}:
            found[source, target] = found.get((source, target), 0.0) + value.bytes
    return found


def _gradient_bytes(operations: Operations, partition: Partition) -> list[float]:
    """For each stage, the bytes of the gradients of its parameters."""
    home = _homes(partition)
    sizes = [0.0] * (len(partition.edges) - 1)
    for number in operations.roles.params:
        value = operations.graph.inputs[number]
        for stage in {home[user] for user in operations.uses.get(value, ())}:
            sizes[stage] += _sum_bytes(value)
    return sizes


def _homes(partition: Partition) -> list[int]:
    return [stage for stage, (begin, end) in enumerate(pairwise(partition.edges)) for _ in range(begin, end)]


def _sum_bytes(value: object) -> float:
    aval = value.aval  # type: ignore[attr-defined]
    item: int = sum_dtype(aval.dtype).itemsize
    return float(aval.size * item)


def _room(operations: Operations, schedule: Schedule, memory_bytes: float) -> Fits:
    """Whether a stage's parameters, their gradients and the activations that it keeps have room."""
    held = schedule.held()
    params = {operations.graph.inputs[number] for number in operations.roles.params}
    used = [[value for value in operations.needs(equation) if value in params] for equation in operations.equations]
    made = [sum(value.bytes for value in equation.outputs if value.is_float) for equation in operations.equations]

    def fits(stage: int, begin: int, end: int) -> bool:
        own = {value for values in used[begin:end] for value in values}
        weights = sum(value.bytes + _sum_bytes(value) for value in own)
        return weights + held[stage] * sum(made[begin:end]) <= memory_bytes / schedule.stages_per_place

    return fits
