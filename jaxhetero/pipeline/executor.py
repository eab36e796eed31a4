"""Runs the tasks of this worker, in the order of the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxhetero.pipeline.exchange import Inbox, Message, Outbox, Route
from jaxhetero.pipeline.graph import Value
from jaxhetero.pipeline.places import Places
from jaxhetero.pipeline.programs import Program, Programs
from jaxhetero.pipeline.reduction import Reduction
from jaxhetero.pipeline.schedules import Kind, Schedule, Task
from jaxhetero.pipeline.stages import Stage

if TYPE_CHECKING:
    from jaxhetero._channels import Channels

Key = tuple[Kind, int, int, int]
"""What a value passes between: a kind of task, the stage that makes it, the one that takes it, and the microbatch."""


@dataclass(frozen=True)
class Step:
    """What a step starts from, on this worker. Arrays by their number among the inputs of the loss."""

    params: Mapping[int, Any]
    whole: Mapping[int, Any]
    state: Mapping[int, Any]
    batches: Sequence[Mapping[int, Any]]
    """One for each microbatch."""


@dataclass(frozen=True)
class Made:
    """What a step has made on this worker."""

    gradients: dict[int, Any]
    """The mean over the microbatches and the replicas, by the number of the parameter."""
    outputs: dict[int, list[Any]]
    """One array for each microbatch, by the number of the output."""
    state: dict[int, Any]
    """By the number of the argument."""


class _Compiled:
    """A program with what runs it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._run = None if program.is_empty else program.compile()

    def run(self, values: dict[Value, Any]) -> None:
        """Read what the program is given from ``values``, and write what it makes to them. Does not wait for it."""
        if self._run is None:
            return
        donated = [values[value] for value in self.program.donated_inputs]
        others = [values[value] for value in self.program.other_inputs]
        values.update(zip(self.program.outputs, self._run(donated, others), strict=True))


class StageRunner:
    """One stage of this worker, and what it holds during a step."""

    def __init__(self, programs: Programs) -> None:
        self.stage: Stage = programs.stage
        self.programs = programs
        self.compiled = {
            Kind.FORWARD: _Compiled(programs.forward),
            Kind.BACKWARD: _Compiled(programs.backward),
            Kind.WEIGHTS: _Compiled(programs.weights),
        }
        self._prepare = _Compiled(programs.prepare)
        self._kept = tuple(programs.kept)
        self._seed = [jnp.ones(value.aval.shape, value.aval.dtype) for value in programs.inputs.seed]
        self._zeros = jax.jit(lambda: [jnp.zeros(value.aval.shape, value.aval.dtype) for value in programs.inputs.sums])
        self._common: dict[Value, Any] = {}
        self._microbatches: dict[int, dict[Value, Any]] = {}
        self.state: list[Any] = []
        self.sums: list[Any] = []

    def begin_step(self, step: Step) -> None:
        """Prepare what depends on parameters alone."""
        inputs, stage = self.programs.inputs, self.stage
        self._common = {
            **_numbered(inputs.params, step.params, stage.params),
            **_numbered(inputs.whole, step.whole, stage.whole),
            **dict(zip(inputs.seed, self._seed, strict=True)),
        }
        self._prepare.run(self._common)
        self.state = [step.state[number] for number in stage.state]
        self.sums = self._zeros()

    def forward(self, microbatch: int, received: Sequence[Any], batch: Mapping[int, Any]) -> dict[Value, Any]:
        """Run the forward pass; all values of the microbatch."""
        inputs = self.programs.inputs
        values = {
            **self._common,
            **dict(zip(inputs.state, self.state, strict=True)),
            **dict(zip(inputs.received, received, strict=True)),
            **_numbered(inputs.batch, batch, self.stage.batch),
        }
        self.compiled[Kind.FORWARD].run(values)
        self.state = [values[value] for value in self.programs.outputs.state]
        self._microbatches[microbatch] = {value: values[value] for value in self._kept}
        return values

    def backward(self, microbatch: int, cotangents: Sequence[Any], *, parted: bool) -> list[Any]:
        """Run the backward pass, or its first part; the gradients of the floats that were received."""
        values = {**self._common, **self._microbatches.pop(microbatch)}
        values.update(zip(self.programs.inputs.cotangents, cotangents, strict=True))
        if not parted:
            self._with_sums(Kind.BACKWARD, values)
        else:
            self.compiled[Kind.BACKWARD].run(values)
            wanted = set(self.programs.weights.inputs) - {*self._common, *self.programs.inputs.sums}
            self._microbatches[microbatch] = {value: values[value] for value in wanted}
        return [values[value] for value in self.programs.outputs.gradients]

    def weights(self, microbatch: int) -> None:
        """Run the second part of the backward pass."""
        self._with_sums(Kind.WEIGHTS, {**self._common, **self._microbatches.pop(microbatch)})

    def _with_sums(self, kind: Kind, values: dict[Value, Any]) -> None:
        values.update(zip(self.programs.inputs.sums, self.sums, strict=True))
        self.compiled[kind].run(values)
        self.sums = [values[value] for value in self.programs.outputs.sums]

    def end_step(self) -> None:
        """Let go of what was held."""
        self._common = {}
        self._microbatches = {}
        self.sums = []
        self.state = []


def _numbered(values: Sequence[Value], arrays: Mapping[int, Any], numbers: Sequence[int]) -> dict[Value, Any]:
    """The arrays with these numbers, by their values."""
    return {value: arrays[number] for value, number in zip(values, numbers, strict=True)}


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
        self._inboxes: dict[tuple[Kind, int, int], Inbox] = {}
        self._routes: dict[tuple[Kind, int, int], Route] = {}
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
            self._run_task(task, step, outputs)
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
        if task.kind is Kind.FORWARD:
            received = self._received(task)
            values = runner.forward(task.microbatch, received, step.batches[task.microbatch])
            for number, value in zip(runner.stage.outputs, runner.programs.outputs.outputs, strict=True):
                outputs[number].append(values[value])
            self._pass_forward(task, [values[value] for value in runner.programs.outputs.sent])
        elif task.kind is Kind.BACKWARD:
            gradients = runner.backward(task.microbatch, self._cotangents(task), parted=self._schedule.is_parted)
            self._pass_back(task, gradients)
        else:
            runner.weights(task.microbatch)

    def _received(self, task: Task) -> list[Any]:
        """What other stages have made for a forward pass, in the order of ``Stage.received``."""
        stage = self._stages[task.stage]
        arrays: list[Any] = []
        for sender in sorted(set(stage.senders)):
            arrays += self._take((Kind.FORWARD, sender, task.stage, task.microbatch))
        return arrays

    def _pass_forward(self, task: Task, sent: Sequence[Any]) -> None:
        stage = self._stages[task.stage]
        made = dict(zip(stage.sent, sent, strict=True))
        for target in _targets(stage):
            arrays = [made[value] for value in self._stages[target].received_from(task.stage)]
            self._pass((Kind.FORWARD, task.stage, target, task.microbatch), arrays)

    def _cotangents(self, task: Task) -> list[Any]:
        """The gradients of each float that a stage has sent, from each stage that it went to."""
        stage = self._stages[task.stage]
        found: dict[tuple[Value, int], Any] = {}
        for target in _targets(stage):
            floats = _floats(self._stages[target].received_from(task.stage))
            if floats:
                arrays = self._take((Kind.BACKWARD, target, task.stage, task.microbatch))
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
        for sender in sorted(set(stage.senders)):
            floats = _floats(stage.received_from(sender))
            if floats:
                arrays = [made[value] for value in floats]
                self._pass((Kind.BACKWARD, task.stage, sender, task.microbatch), arrays)

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
            what = "activations" if kind is Kind.FORWARD else "gradients of activations"
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

    def _all_routes(self) -> Iterator[tuple[Kind, int, int, tuple[jax.ShapeDtypeStruct, ...]]]:
        """Between any two stages, in an order that is the same on every worker."""
        for stage in self._stages:
            for target in _targets(stage):
                values = self._stages[target].received_from(stage.number)
                yield Kind.FORWARD, stage.number, target, tuple(value.shape for value in values)
                floats = _floats(values)
                if floats:
                    yield Kind.BACKWARD, target, stage.number, tuple(value.shape for value in floats)


def _targets(stage: Stage) -> list[int]:
    return sorted({target for targets in stage.targets for target in targets})


def _floats(values: Sequence[Value]) -> list[Value]:
    return [value for value in values if value.is_float]


def _message(key: Key) -> Message:
    kind, source, target, microbatch = key
    return Message((kind is Kind.BACKWARD) << 56 | source << 40 | target << 24 | microbatch, f"microbatch {microbatch}")
