"""Puts a program together: operations on values that are written once, and then a slot for each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxhetero.optimizers._programs.program import Instruction, Opcode, Output, OutputType, Program

# A value of a program: an input, a scalar, or the result of an operation.
Operand: TypeAlias = "tuple[str, int]"


@dataclass(frozen=True)
class _Step:
    opcode: Opcode
    operands: tuple[Operand, ...]


class Assembly:
    """The operations of a program. The same one on the same operands is there once."""

    def __init__(self, input_count: int) -> None:
        self._input_count = input_count
        self._scalar_count = 0
        self._steps: list[_Step] = []
        self._known: dict[_Step, Operand] = {}

    def input(self, number: int) -> Operand:
        """An array of the tensor's size."""
        return ("input", number)

    def scalar(self) -> Operand:
        """One more number that is the same for all elements."""
        self._scalar_count += 1
        return ("scalar", self._scalar_count - 1)

    def emit(self, opcode: Opcode, *operands: Operand) -> Operand:
        """The result of an operation."""
        step = _Step(opcode, operands)
        if step not in self._known:
            self._steps.append(step)
            self._known[step] = ("step", len(self._steps) - 1)
        return self._known[step]

    def program(self, summands: Sequence[Operand], outputs: Sequence[tuple[Operand, OutputType]]) -> Program:
        """The program that computes these. Temporaries are used again once nothing needs what they hold."""
        summands = [self._as_step(operand) for operand in summands]
        results = [self._as_step(operand) for operand, _ in outputs]
        last_use = {operand: i for i, step in enumerate(self._steps) for operand in step.operands}
        last_use |= dict.fromkeys((*summands, *results), len(self._steps))
        slots = {("input", i): i for i in range(self._input_count)}
        slots |= {("scalar", i): self._input_count + i for i in range(self._scalar_count)}
        first = len(slots)
        free: list[int] = []
        used = 0
        instructions = []
        for number, step in enumerate(self._steps):
            operands = tuple(slots[operand] for operand in step.operands)
            for operand in set(step.operands):
                if operand[0] == "step" and last_use[operand] == number:
                    heapq.heappush(free, slots[operand])
            if not free:
                heapq.heappush(free, first + used)
                used += 1
            slots["step", number] = heapq.heappop(free)
            instructions.append(Instruction(step.opcode, slots["step", number], operands))
        return Program(
            self._input_count,
            self._scalar_count,
            used,
            tuple(instructions),
            tuple(slots[operand] for operand in summands),
            tuple(Output(slots[operand], type_) for operand, (_, type_) in zip(results, outputs, strict=True)),
        )

    def _as_step(self, operand: Operand) -> Operand:
        """What a program gives is in temporaries: an output may lie in the memory of an input."""
        return operand if operand[0] == "step" else self.emit(Opcode.COPY, operand)
