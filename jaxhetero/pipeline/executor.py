"""Runs the tasks of this worker, in the order of the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jaxhetero.errors import JaxheteroError
from jaxhetero.pipeline.exchange import Inbox, Message, Outbox, Route
from jaxhetero.pipeline.graph import Value
from jaxhetero.pipeline.places import Places
from jaxhetero.pipeline.programs import Programs
from jaxhetero.pipeline.reduction import Reduction
from jaxhetero.pipeline.runner import StageRunner, Step
from jaxhetero.pipeline.schedules import Schedule, Task, TaskKind
from jaxhetero.pipeline.stages import Stage

if TYPE_CHECKING:
    from jaxhetero._job.channels import Channels

Key = tuple[TaskKind, int, int, int]
"""What a value passes between: a kind of task, the stage that makes it, the one that takes it, and the microbatch."""


@dataclass(frozen=True)
class Made:
    """What a step has made on this worker."""

    gradients: dict[int, Any]
    """The mean over the microbatches and the replicas, by the number of the parameter."""
    outputs: dict[int, list[Any]]
    """One array for each microbatch, by the number of the output."""
    state: dict[int, Any]
    """By the number of the argument."""


class Executor:
    """Runs steps on this worker. Every worker of the job makes one, from the same stages and the same schedule."""

    def __init__(
        self,
        schedule: Schedule,
        programs: Sequence[Programs],
        stages: Sequence[Stage],
        places: Places,
        channels: Channels | None,
        reduction: Reduction,
    ) -> None:
        """``programs``: of this worker's stages, ascending. Blocks while they are compiled."""
        self._schedule = schedule
        self._places = places
        self._stages = stages
        self._reduction = reduction
        self._runners = {one.stage.number: StageRunner(one) for one in programs}
        self._tasks = schedule.tasks[places.place]
        # Of each stage's last task, after which its gradients are final.
        self._last_positions = {task.stage: position for position, task in enumerate(self._tasks)}
        self._inboxes: dict[tuple[TaskKind, int, int], Inbox] = {}
        self._routes: dict[tuple[TaskKind, int, int], Route] = {}
        self._outbox = None if channels is None else Outbox(channels)
        if channels is not None:
            self._connect(channels)
        self._passed: dict[Key, list[Any]] = {}

    def run(self, step: Step) -> Made:
        """One step. Blocks until this worker's programs are dispatched, and what they need of others has come."""
        for inbox in self._inboxes.values():
            inbox.begin_step()
        for runner in self._runners.values():
            runner.begin_step(step)
        outputs: dict[int, list[Any]] = defaultdict(list)
        for position, task in enumerate(self._tasks):
            try:
                self._run_task(task, step, outputs)
            except JaxheteroError as error:
                error.add_note(f"pipeline: this worker was at {task.describe()}")
                raise
            if position == self._last_positions[task.stage]:
                self._reduction.submit(task.stage, self._runners[task.stage].sums)
        state = {
            number: array
            for runner in self._runners.values()
            for number, array in zip(runner.stage.state, runner.state, strict=True)
        }
        if self._outbox is not None:
            self._outbox.finish_step()
        gradients = self._reduction.finish()
        for runner in self._runners.values():
            runner.end_step()
        return Made(gradients, dict(outputs), state)

    def _run_task(self, task: Task, step: Step, outputs: dict[int, list[Any]]) -> None:
        runner = self._runners[task.stage]
        if task.kind is TaskKind.FORWARD:
            received = self._received(task)
            values = runner.forward(task.microbatch, received, step.batches[task.microbatch])
            for number, value in zip(runner.stage.outputs, runner.programs.outputs.outputs, strict=True):
                outputs[number].append(values[value])
            self._pass_forward(task, [values[value] for value in runner.programs.outputs.sent])
        elif task.kind is TaskKind.BACKWARD:
            gradients = runner.backward(task.microbatch, self._cotangents(task), parted=self._schedule.is_parted)
            self._pass_back(task, gradients)
        else:
            runner.weights(task.microbatch)

    def _received(self, task: Task) -> list[Any]:
        """What other stages have made for a forward pass, in the order of ``Stage.received``."""
        stage = self._stages[task.stage]
        arrays: list[Any] = []
        for sender in stage.received_from:
            arrays += self._take((TaskKind.FORWARD, sender, task.stage, task.microbatch))
        return arrays

    def _pass_forward(self, task: Task, sent: Sequence[Any]) -> None:
        stage = self._stages[task.stage]
        made = dict(zip(stage.sent, sent, strict=True))
        for target in stage.sent_to:
            arrays = [made[value] for value in self._stages[target].received_from[task.stage]]
            self._pass((TaskKind.FORWARD, task.stage, target, task.microbatch), arrays)

    def _cotangents(self, task: Task) -> list[Any]:
        """The gradients of each float that a stage has sent, from each stage that it went to."""
        stage = self._stages[task.stage]
        found: dict[tuple[Value, int], Any] = {}
        for target in stage.sent_to:
            floats = _floats(self._stages[target].received_from[task.stage])
            if floats:
                arrays = self._take((TaskKind.BACKWARD, target, task.stage, task.microbatch))
                found.update(zip(((value, target) for value in floats), arrays, strict=True))
        return [
            found[value, target]
            for value, targets in zip(stage.sent, stage.targets, strict=True)
            if value.is_float
            for target in targets
        ]

    def _pass_back(self, task: Task, gradients: Sequence[Any]) -> None:
        stage = self._stages[task.stage]
        made = dict(zip(_floats(stage.received), gradients, strict=True))
        for sender, values in stage.received_from.items():
            arrays = [made[value] for value in _floats(values)]
            if arrays:
                self._pass((TaskKind.BACKWARD, task.stage, sender, task.microbatch), arrays)

    def _pass(self, key: Key, arrays: list[Any]) -> None:
        route = self._routes.get(key[:3])
        if route is None:
            self._passed[key] = arrays
            return
        assert self._outbox is not None
        self._outbox.send(route, _message(key), arrays)

    def _take(self, key: Key) -> list[Any]:
        inbox = self._inboxes.get(key[:3])
        return self._passed.pop(key) if inbox is None else inbox.take()

    def _connect(self, channels: Channels) -> None:
        """Make the routes between this worker's stages and those of others."""
        for number, (kind, source, target, shapes) in enumerate(self._all_routes()):
            source_place, target_place = map(self._schedule.place_of, (source, target))
            if source_place == target_place or self._places.place not in (source_place, target_place):
                continue
            what = "activations" if kind is TaskKind.FORWARD else "gradients of activations"
            text = f"{what} from stage {source} to stage {target}"
            is_incoming = self._places.place == target_place
            peer = self._places.rank_at(source_place if is_incoming else target_place)
            route = Route(number, peer, shapes, text)
            if is_incoming:
                taken = [task.microbatch for task in self._tasks if task.kind is kind and task.stage == target]
                messages = [_message((kind, source, target, microbatch)) for microbatch in taken]
                self._inboxes[kind, source, target] = Inbox(channels, route, messages)
            else:
                self._routes[kind, source, target] = route

    def _all_routes(self) -> Iterator[tuple[TaskKind, int, int, tuple[jax.ShapeDtypeStruct, ...]]]:
        """Between any two stages, in an order that is the same on every worker."""
        for stage in self._stages:
            for target in stage.sent_to:
                values = self._stages[target].received_from[stage.number]
                yield TaskKind.FORWARD, stage.number, target, tuple(value.shape for value in values)
                floats = _floats(values)
                if floats:
                    yield TaskKind.BACKWARD, target, stage.number, tuple(value.shape for value in floats)


def _floats(values: Sequence[Value]) -> list[Value]:
    return [value for value in values if value.is_float]


def _message(key: Key) -> Message:
    kind, source, target, microbatch = key
    return Message(
        (kind is TaskKind.BACKWARD) << 56 | source << 40 | target << 24 | microbatch, f"microbatch {microbatch}"
    )
