"""Programs as a reducer runs them: a list of operations in float32, the same for every element of a tensor.

``xla_ffi/update/program.h`` is the other half: it tells what each operation means, and reads what ``encode`` writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum


class Opcode(IntEnum):
    """As in ``xla_ffi/update/program.h``. True is 1 and false is 0."""

    COPY = 1
    ADD = 2
    SUB = 3
    MUL = 4
    DIV = 5
    MAX = 6
    MIN = 7
    SQRT = 8
    ABS = 9
    NEG = 10
    SIGN = 11
    LESS = 12
    LESS_EQUAL = 13
    EQUAL = 14
    SELECT = 15
    ROUND_BF16 = 16


# What a reducer takes. As in ``xla_ffi/update/program.h``.
MOST_INPUTS = 256
MOST_SCALARS = 8192
MOST_TEMPORARIES = 1024
MOST_INSTRUCTIONS = 1 << 15
MOST_RESULTS = 256


class OutputType(IntEnum):
    """How an output is written to memory. As in ``xla_ffi/update/program.h``."""

    F32 = 1
    BF16 = 2


@dataclass(frozen=True)
class Instruction:
    """One operation: ``to = opcode(*operands)``. Operands are slots, and ``to`` is a temporary."""

    opcode: Opcode
    to: int
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """A temporary that is written to memory."""

    slot: int
    type: OutputType


@dataclass(frozen=True)
class Program:
    """What one pass over a tensor computes.

    Slots are numbered: first the inputs, with a value for each element; then the scalars; then the temporaries.
    ``summands`` are temporaries whose elements are added up over the tensor.
    """

    input_count: int
    scalar_count: int
    temporary_count: int
    instructions: tuple[Instruction, ...]
    summands: tuple[int, ...]
    outputs: tuple[Output, ...]

    @property
    def is_small(self) -> bool:
        """Whether a reducer takes it."""
        return (
            self.input_count <= MOST_INPUTS
            and self.scalar_count <= MOST_SCALARS
            and self.temporary_count <= MOST_TEMPORARIES
            and len(self.instructions) <= MOST_INSTRUCTIONS
            and max(len(self.summands), len(self.outputs)) <= MOST_RESULTS
        )

    def encode(self) -> bytes:
        """The program as it is sent: numbers of fixed width, little-endian, and lists with their lengths before them.

        ``decode_program`` in ``xla_ffi/update/program.cc`` reads it, and says what it refuses.
        """
        parts = [
            struct.pack("<HHHI", self.input_count, self.scalar_count, self.temporary_count, len(self.instructions))
        ]
        for step in self.instructions:
            operands = (*step.operands, 0, 0, 0)[:3]
            parts.append(struct.pack("<BHHHH", step.opcode, step.to, *operands))
        parts.append(struct.pack(f"<I{len(self.summands)}H", len(self.summands), *self.summands))
        parts.append(struct.pack("<I", len(self.outputs)))
        parts += [struct.pack("<HB", output.slot, output.type) for output in self.outputs]
        return b"".join(parts)
