"""How long a step takes, without running it: tasks and transfers with the times that they are said to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.schedules import Schedule, Task, TaskKind

Transfers = Mapping[tuple[int, int], float]
"""Bytes of one microbatch from a stage to a later one. The gradients that come back have as many."""


@dataclass(frozen=True)
class Interconnect:
    """What lies between the workers of a pipeline.

    Attributes:
      bytes_per_s: that a worker sends, and at the same time receives.
      latency_s: from the last byte sent to the last byte received.
      reduced_bytes_per_s: of a worker's gradients, that are reduced over replicas. Default: ``bytes_per_s``, as with
        a reducer for each worker.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    reduced_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
      step_s: from its begin until the last task has ended and the last gradients are reduced.
      compute_s: the same without the reduction of gradients.
      busy_s: for each place, the time of its tasks.
      ended_s: when each task ends.
      task_s: how long a task takes.
    """

    step_s: float
    compute_s: float
    busy_s: tuple[float, ...]
    ended_s: dict[Task, float]
    task_s: Callable[[Task], float]

    @property
    def bubble(self) -> float:
        """The share of the compute time in which a worker is idle, on average."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.compute_s)


def simulate(
    schedule: Schedule,
    task_s: Callable[[Task], float],
    transfers: Transfers | None = None,
    network: Interconnect | None = None,
    reduce_s: Callable[[int], float] | None = None,
) -> Simulation:
    """Run a schedule in simulated time.

    Args:
      task_s: the seconds of a task.
      transfers: what stages of different places send each other.
      reduce_s: the seconds that it takes to reduce the gradients of a stage over the replicas. The reductions of one
        worker follow each other.

    Raises:
      ConfigError: the tasks wait for each other.
    """
    return _Run(schedule, task_s, transfers or {}, network or Interconnect()).run(reduce_s)


class _Run:
    def __init__(
        self, schedule: Schedule, task_s: Callable[[Task], float], transfers: Transfers, network: Interconnect
    ) -> None:
        self.schedule = schedule
        self.task_s = task_s
        self.network = network
        self.transfers = transfers
        self.before: dict[int, list[int]] = {stage: [] for stage in range(schedule.stage_count)}
        self.after: dict[int, list[int]] = {stage: [] for stage in range(schedule.stage_count)}
        pairs = set(transfers) | {(stage, stage + 1) for stage in range(schedule.stage_count - 1)}
        for sender, receiver in sorted(pairs):
            self.after[sender].append(receiver)
            self.before[receiver].append(sender)
        self.ended: dict[Task, float] = {}
        self.arrived: dict[tuple[Task, int], float] = {}
        self.sending_until = [0.0] * schedule.places
        self.receiving_until = [0.0] * schedule.places
        self.clock = [0.0] * schedule.places
        self.waiting = [deque(tasks) for tasks in schedule.tasks]
        # When the next task of a place begins, of those that have, or are being sent, all that they need.
        self.ready: list[tuple[float, int]] = []
        self.is_ready = [False] * schedule.places

    def run(self, reduce_s: Callable[[int], float] | None) -> Simulation:
        busy = [0.0] * self.schedule.places
        for place in range(self.schedule.places):
            self._look_at(place)
        while self.ready:
            # The task that begins first: so transfers are sent in their order.
            begin, place = heappop(self.ready)
            self.is_ready[place] = False
            task = self.waiting[place].popleft()
            seconds = self.task_s(task)
            self.clock[place] = self.ended[task] = begin + seconds
            busy[place] += seconds
            for target in self._send(task):
                self._look_at(target)
        if any(self.waiting):
            raise ConfigError("pipeline: the tasks of this schedule wait for each other")
        compute_s = max(self.clock)
        step_s = max([compute_s, *self._reduced(reduce_s)])
        return Simulation(step_s, compute_s, tuple(busy), self.ended, self.task_s)

    def _look_at(self, place: int) -> None:
        """Let the next task of a place begin if all that it needs has been sent. Something has just been."""
        if self.is_ready[place] or not self.waiting[place]:
            return
        task = self.waiting[place][0]
        needs = [self.arrived.get((needed, task.stage)) for needed in self._needs(task)]
        known = [time for time in needs if time is not None]
        if len(known) == len(needs):
            heappush(self.ready, (max([self.clock[place], *known]), place))
            self.is_ready[place] = True

    def _needs(self, task: Task) -> Iterator[Task]:
        """The tasks whose results a task waits for."""
        if task.kind is TaskKind.FORWARD:
            yield from (Task(TaskKind.FORWARD, stage, task.microbatch) for stage in self.before[task.stage])
        elif task.kind is TaskKind.BACKWARD:
            yield Task(TaskKind.FORWARD, task.stage, task.microbatch)
            yield from (Task(TaskKind.BACKWARD, stage, task.microbatch) for stage in self.after[task.stage])
        else:
            yield Task(TaskKind.BACKWARD, task.stage, task.microbatch)

    def _send(self, task: Task) -> set[int]:
        """The places where a task may begin because of it."""
        end = self.ended[task]
        self.arrived[task, task.stage] = end
        targets: list[int] = []
        if task.kind is not TaskKind.WEIGHTS:
            targets = self.after[task.stage] if task.kind is TaskKind.FORWARD else self.before[task.stage]
        for target in targets:
            pair = (task.stage, target) if task.kind is TaskKind.FORWARD else (target, task.stage)
            self.arrived[task, target] = self._transfer(task.stage, target, end, self.transfers.get(pair, 0.0))
        return {self.schedule.place_of(stage) for stage in (task.stage, *targets)}

    def _transfer(self, sender: int, receiver: int, ready: float, size: float) -> float:
        source, target = self.schedule.place_of(sender), self.schedule.place_of(receiver)
        if source == target:
            return ready
        seconds = size / self.network.bytes_per_s
        begin = max(ready, self.sending_until[source], self.receiving_until[target])
        self.sending_until[source] = self.receiving_until[target] = begin + seconds
        return begin + seconds + self.network.latency_s

    def _reduced(self, reduce_s: Callable[[int], float] | None) -> Iterator[float]:
        """When the gradients of each place are reduced."""
        if reduce_s is None:
            return
        last = TaskKind.WEIGHTS if self.schedule.is_parted else TaskKind.BACKWARD
        for place in range(self.schedule.places):
            own = range(place, self.schedule.stage_count, self.schedule.places)
            final = {stage: self.ended[Task(last, stage, self.schedule.microbatches - 1)] for stage in own}
            end = 0.0
            for stage in sorted(own, key=final.__getitem__):
                end = max(end, final[stage]) + reduce_s(stage)
            yield end
