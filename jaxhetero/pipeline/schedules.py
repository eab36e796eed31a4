"""Schedules: in which order each worker of a pipeline runs its tasks.

Stage ``s`` is on the place ``s % p`` of a pipeline of ``p`` workers. With several stages a worker, an activation passes
through the pipeline several times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

from jaxhetero.errors import ConfigError

ScheduleName = Literal["simple", "interleaved", "virtual", "breadth_first", "zero_bubble"]
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class TaskKind(Enum):
    """What a task computes."""

    FORWARD = "forward pass"
    BACKWARD = "backward pass"
    """With the gradients of the parameters, unless these are a task of their own."""
    WEIGHTS = "gradients of the parameters"


@dataclass(frozen=True, slots=True)
class Task:
    """One program of one stage, for one microbatch."""

    kind: TaskKind
    stage: int
    microbatch: int

    def describe(self) -> str:
        """For people."""
        return f"the {self.kind.value} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The tasks of every place of a pipeline."""

    name: ScheduleName
    places: int
    stages_per_place: int
    microbatches: int
    tasks: tuple[tuple[Task, ...], ...]

    @property
    def stage_count(self) -> int:
        """The stages of the model."""
        return self.places * self.stages_per_place

    @property
    def is_parted(self) -> bool:
        """Whether gradients of parameters are tasks of their own."""
        return self.name == "zero_bubble"

    def place_of(self, stage: int) -> int:
        """Where in the pipeline a stage is."""
        return stage % self.places

    def held(self) -> tuple[int, ...]:
        """For each stage, of how many microbatches it keeps activations at most at a time."""
        most = [0] * self.stage_count
        now = [0] * self.stage_count
        last = TaskKind.WEIGHTS if self.is_parted else TaskKind.BACKWARD
        for tasks in self.tasks:
            for task in tasks:
                now[task.stage] += (task.kind is TaskKind.FORWARD) - (task.kind is last)
                most[task.stage] = max(most[task.stage], now[task.stage])
        return tuple(most)

    def most_kept(self, place: int, kept: Mapping[int, int], kept_for_weights: Mapping[int, int]) -> int:
        """The most that a place keeps at a time.

        Args:
          kept: by stage, the bytes that a microbatch keeps from its forward to its backward pass.
          kept_for_weights: and from there until the gradients of parameters, if these are tasks of their own.
        """
        most = now = 0
        for task in self.tasks[place]:
            before, after = kept.get(task.stage, 0), kept_for_weights.get(task.stage, 0)
            now += {TaskKind.FORWARD: before, TaskKind.BACKWARD: after - before, TaskKind.WEIGHTS: -after}[task.kind]
            most = max(most, now)
        return most


def make_schedule(name: ScheduleName, places: int, stages_per_place: int, microbatches: int) -> Schedule:
    """The tasks of a pipeline.

    Args:
      name:
        ``simple`` (GPipe): all forward passes, then all backward passes.
        ``interleaved`` (1F1B): a backward pass as soon as there can be one, so that fewer activations are kept.
        ``virtual`` (interleaved 1F1B of Megatron): as ``interleaved``, with several stages on each worker.
        ``breadth_first``: as ``simple``, with several stages on each worker; each stage runs all microbatches in turn.
        ``zero_bubble`` (ZB-H1): as ``interleaved``; the gradients of parameters fill what would be idle.
      places: workers in the pipeline.
      stages_per_place: stages on each worker: 1 for ``interleaved``, ``simple`` and ``zero_bubble``.
      microbatches: of a step.

    Raises:
      ConfigError: the schedule is not for these numbers.
    """
    if name not in NAMES:
        raise ConfigError(f"pipeline: schedule is {name!r}; it must be one of {', '.join(NAMES)}")
    if name in ("simple", "interleaved", "zero_bubble") and stages_per_place > 1:
        raise ConfigError(
            f"pipeline: the schedule {name!r} has one stage a worker, and there are {stages_per_place}; for several, "
            "use 'virtual' or 'breadth_first'"
        )
    if name == "virtual" and microbatches % places and stages_per_place > 1:
        raise ConfigError(
            f"pipeline: the schedule 'virtual' needs a multiple of {places} microbatches, one for each worker of the "
            f"pipeline, and there are {microbatches}"
        )
    make = _MAKERS[name]
    tasks = tuple(tuple(make(place, places, stages_per_place, microbatches)) for place in range(places))
    return Schedule(name, places, stages_per_place, microbatches, tasks)


def _breadth_first(place: int, places: int, stages: int, microbatches: int) -> list[Task]:
    own = [turn * places + place for turn in range(stages)]
    forward = [Task(TaskKind.FORWARD, stage, number) for stage in own for number in range(microbatches)]
    backward = [Task(TaskKind.BACKWARD, stage, number) for stage in reversed(own) for number in range(microbatches)]
    return forward + backward


def _virtual(place: int, places: int, stages: int, microbatches: int) -> list[Task]:
    """Microbatches go in groups as large as the pipeline, each group through all stages of a worker."""
    total = microbatches * stages
    group = places if stages > 1 else microbatches

    def task(kind: TaskKind, number: int) -> Task:
        turn = number // group % stages
        turn = turn if kind is TaskKind.FORWARD else stages - 1 - turn
        return Task(kind, turn * places + place, number // (group * stages) * group + number % group)

    ahead = places - place - 1
    warm_up = ahead * 2 + (stages - 1) * places if stages > 1 else ahead
    return _alternate(total, warm_up, task)


def _alternate(total: int, warm_up: int, task: Callable[[TaskKind, int], Task]) -> list[Task]:
    """Forward passes to fill the pipeline, then one forward and one backward pass in turns."""
    warm_up = min(warm_up, total)
    tasks = [task(TaskKind.FORWARD, number) for number in range(warm_up)]
    for number in range(total):
        if number + warm_up < total:
            tasks.append(task(TaskKind.FORWARD, number + warm_up))
        tasks.append(task(TaskKind.BACKWARD, number))
    return tasks


def _zero_bubble(place: int, places: int, stages: int, microbatches: int) -> list[Task]:
    """As 1F1B. From the place's own delay on, a gradient of parameters follows each backward pass."""
    del stages
    forward_count = min(microbatches, places - place)
    tasks = [Task(TaskKind.FORWARD, place, number) for number in range(forward_count)]
    waiting: deque[int] = deque()
    for number in range(microbatches):
        tasks.append(Task(TaskKind.BACKWARD, place, number))
        waiting.append(number)
        if len(waiting) > place or forward_count == microbatches:
            tasks.append(Task(TaskKind.WEIGHTS, place, waiting.popleft()))
        if forward_count < microbatches:
            tasks.append(Task(TaskKind.FORWARD, place, forward_count))
            forward_count += 1
    return tasks + [Task(TaskKind.WEIGHTS, place, number) for number in waiting]


_MAKERS: dict[str, Callable[[int, int, int, int], list[Task]]] = {
    "simple": _breadth_first,
    "interleaved": _virtual,
    "virtual": _virtual,
    "breadth_first": _breadth_first,
    "zero_bubble": _zero_bubble,
}
