"""One stage of this worker: its compiled programs, and what they hold during a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero.pipeline.graph import Value
from jaxhetero.pipeline.programs import Programs, StageProgram
from jaxhetero.pipeline.schedules import TaskKind
from jaxhetero.pipeline.stages import Stage


@dataclass(frozen=True)
class Step:
    """What a step starts from, on this worker. Arrays by their number among the inputs of the loss."""

    params: Mapping[int, Any]
    """What the worker holds of each leaf."""
    whole: Mapping[int, Any]
    state: Mapping[int, Any]
    batches: Sequence[Mapping[int, Any]]
    """One for each microbatch."""


class _Compiled:
    """A program with what runs it."""

    def __init__(self, program: StageProgram) -> None:
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
            TaskKind.FORWARD: _Compiled(programs.forward),
            TaskKind.BACKWARD: _Compiled(programs.backward),
            TaskKind.WEIGHTS: _Compiled(programs.weights),
        }
        self._prepare = _Compiled(programs.prepare)
        self._kept = programs.kept
        self._kept_for_weights = programs.kept_for_weights
        self._seed = [jax.device_put(np.ones(value.aval.shape, value.aval.dtype)) for value in programs.inputs.seed]
        self._zeros = jax.jit(lambda: [jnp.zeros(value.aval.shape, value.aval.dtype) for value in programs.inputs.sums])
        self._common: dict[Value, Any] = {}
        self._microbatches: dict[int, dict[Value, Any]] = {}
        self.state: list[Any] = []
        self.sums: list[Any] = []

    def begin_step(self, step: Step) -> None:
        """Prepare what depends on parameters alone."""
        inputs, stage = self.programs.inputs, self.stage
        self._common = {
            **_numbered(inputs.params, step.params, self.programs.leaves),
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
        self.compiled[TaskKind.FORWARD].run(values)
        self.state = [values[value] for value in self.programs.outputs.state]
        self._microbatches[microbatch] = {value: values[value] for value in self._kept}
        return values

    def backward(self, microbatch: int, cotangents: Sequence[Any], *, parted: bool) -> list[Any]:
        """Run the backward pass, or its first part; the gradients of the floats that were received."""
        values = {**self._common, **self._microbatches.pop(microbatch)}
        values.update(zip(self.programs.inputs.cotangents, cotangents, strict=True))
        if not parted:
            self._with_sums(TaskKind.BACKWARD, values)
        else:
            self.compiled[TaskKind.BACKWARD].run(values)
            self._microbatches[microbatch] = {value: values[value] for value in self._kept_for_weights}
        return [values[value] for value in self.programs.outputs.gradients]

    def weights(self, microbatch: int) -> None:
        """Run the second part of the backward pass."""
        self._with_sums(TaskKind.WEIGHTS, {**self._common, **self._microbatches.pop(microbatch)})

    def _with_sums(self, kind: TaskKind, values: dict[Value, Any]) -> None:
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
