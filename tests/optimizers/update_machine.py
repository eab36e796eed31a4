"""Steps of an optimizer as reducers will take them, over NumPy arrays.

``NumpyPasses`` is a transcription of what programs mean, operation by operation; ``NativePasses`` is the C++ that
reducers run, on tensors cut into pieces. Both must give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from jaxhetero import _native
from jaxhetero.optimizers._programs.program import Opcode, OutputType, Program
from jaxhetero.optimizers._programs.update import Origin, Pass, Source, Update

Array = np.ndarray[Any, Any]

NAN = np.float32(np.nan)


# Of each wire_dtype of 8 or 4 bits: the largest number, and the exponent of the least scale.
NUMBERS = {"int8": (127, -126), "int4": (7, -126), "float8_e4m3fn": (448, -117)}


def in_numbers(values: Array, wire_dtype: str) -> Array:
    """What a worker sends of its gradients: a transcription of docs/how_to/eight_bits.md."""
    largest, least = NUMBERS[wire_dtype]
    flat = values.astype(np.float32).astype(np.float64).ravel()
    blocks = np.pad(flat, (0, -flat.size % 64)).reshape(-1, 64)
    most = np.abs(blocks).max(axis=1, keepdims=True, initial=0)
    has_scale = most <= largest * np.ldexp(2.0**127, -(largest.bit_length() - 1))  # neither NaN nor too large
    part, exponent = np.frexp(np.where(has_scale, most, 0) / largest)
    scales = np.ldexp(1.0, np.maximum(np.where(part > 0.5, exponent, exponent - 1), least))
    rounded = np.where(has_scale, blocks, 0) / scales
    rounded = rounded.astype(ml_dtypes.float8_e4m3fn) if wire_dtype == "float8_e4m3fn" else np.round(rounded)
    sent = np.where(has_scale, rounded.astype(np.float64) * scales + 0.0, NAN).astype(np.float32)
    return sent.ravel()[: values.size].reshape(values.shape)


def _extreme(pick: Callable[[Array, Array], Array], zero: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """maximum or minimum of IEEE 754-2019: NaN if either is, and -0 is below +0."""

    def extreme(a: Array, b: Array) -> Array:
        same_zero = zero(a.view(np.uint32), b.view(np.uint32)).view(np.float32)
        return np.where(np.isnan(a) | np.isnan(b), NAN, np.where(a == b, same_zero, np.where(pick(a, b), a, b)))

    return extreme


def _truth(compare: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    return lambda a, b: compare(a, b).astype(np.float32)


MEANING: dict[Opcode, Callable[..., Array]] = {
    Opcode.COPY: np.copy,
    Opcode.ADD: np.add,
    Opcode.SUB: np.subtract,
    Opcode.MUL: np.multiply,
    Opcode.DIV: np.divide,
    Opcode.MAX: _extreme(np.greater, np.bitwise_and),
    Opcode.MIN: _extreme(np.less, np.bitwise_or),
    Opcode.SQRT: np.sqrt,
    Opcode.ABS: np.abs,
    Opcode.NEG: np.negative,
    Opcode.SIGN: lambda a: np.where(a > 0, np.float32(1), np.where(a < 0, np.float32(-1), a)),
    Opcode.LESS: _truth(np.less),
    Opcode.LESS_EQUAL: _truth(np.less_equal),
    Opcode.EQUAL: _truth(np.equal),
    Opcode.SELECT: lambda a, b, c: np.where(a != 0, b, c),
    Opcode.ROUND_BF16: lambda a: a.astype(ml_dtypes.bfloat16).astype(np.float32),
}


def tree_sum(values: Array) -> np.float32:
    """Of elements 2i and 2i + 1 in float64, and so on; where there is no second one, the first goes up unchanged."""
    sums = values.astype(np.float64) if len(values) else np.zeros(1)
    while len(sums) > 1:
        pairs = sums[: len(sums) // 2 * 2]
        sums = np.append(pairs[::2] + pairs[1::2], sums[len(pairs) :])
    return NAN if np.isnan(sums[0]) else np.float32(sums[0])


class Passes(Protocol):
    """Something that runs programs over whole tensors."""

    def __call__(
        self, program: Program, inputs: Sequence[Array], scalars: Array, count: int
    ) -> tuple[list[Array], list[np.float32]]:
        """Outputs and totals."""


def numpy_pass(
    program: Program, inputs: Sequence[Array], scalars: Array, count: int
) -> tuple[list[Array], list[np.float32]]:
    first = program.input_count + program.scalar_count
    slots = [*inputs, *(np.full(count, scalar, np.float32) for scalar in scalars), *[None] * program.temporary_count]
    assert len(slots) == first + program.temporary_count
    with np.errstate(all="ignore"):
        for step in program.instructions:
            value = MEANING[step.opcode](*(slots[slot] for slot in step.operands))
            assert value.dtype == np.float32
            slots[step.to] = value
        totals = [tree_sum(slots[slot]) for slot in program.summands]
        outputs = [np.where(np.isnan(slots[output.slot]), NAN, slots[output.slot]) for output in program.outputs]
        types = {OutputType.F32: np.float32, OutputType.BF16: ml_dtypes.bfloat16}
        return [a.astype(types[o.type]) for a, o in zip(outputs, program.outputs, strict=True)], totals


class NativePasses:
    """The native runner, on pieces of each tensor in any order. Inputs are written over where they can be."""

    def __init__(self, pieces: Random | None = None, *, interpret: bool = False, baseline: bool = False) -> None:
        self._pieces = pieces
        self._options = (interpret, baseline)
        self._runners: dict[Program, Any] = {}
        self.kernels: dict[Program, str] = {}

    def __call__(
        self, program: Program, inputs: Sequence[Array], scalars: Array, count: int
    ) -> tuple[list[Array], list[np.float32]]:
        if program not in self._runners:
            status, runner = _native.load_program(program.encode())
            assert status[0] == "ok", status
            assert runner is not None
            self.kernels[program] = runner.kernel
            runner.choose(*self._options)
            self._runners[program] = runner
        types = {OutputType.F32: np.float32, OutputType.BF16: np.uint16}
        outputs = [np.empty(count, types[output.type]) for output in program.outputs]
        subtrees: list[list[Any]] = [[] for _ in program.summands]
        for begin, end in self._cuts(count):
            status, found = self._runners[program].run(
                [np.ascontiguousarray(array[begin:end]) for array in inputs],
                np.asarray(scalars, np.float32),
                [array[begin:end] for array in outputs],
                begin,
            )
            assert status[0] == "ok", status
            for total, piece in zip(subtrees, found, strict=True):
                total += piece
        return [a.view(ml_dtypes.bfloat16) if a.dtype == np.uint16 else a for a in outputs], [
            _total(pieces, count) for pieces in subtrees
        ]

    def _cuts(self, count: int) -> list[tuple[int, int]]:
        if self._pieces is None:
            return [(0, count)]
        cuts = sorted({0, count, *(self._pieces.randrange(count) for _ in range(self._pieces.randrange(8)))})
        pieces = list(itertools.pairwise(cuts))
        self._pieces.shuffle(pieces)
        return pieces


def _total(subtrees: list[Any], count: int) -> np.float32:
    status, total = _native.sum_of_tensor(subtrees, count)
    assert status[0] == "ok", status
    return np.float32(total)


class Job:
    """Weights and states at the reducers, and what stays with the workers."""

    def __init__(self, update: Update, passes: Passes, params: Any, state: Any) -> None:
        self.update = update
        self.passes = passes
        states = jax.tree.leaves(state)
        self.worker_states = [states[i] for i in update.worker_states]
        self.weights = [_flat(leaf) for leaf in jax.tree.leaves(params)]
        self.states = [[_flat(states[i]) for i in leaf.states] for leaf in update.leaves]
        self.sent: list[Array] = list(self.weights)  # what workers get

    def step(self, gradients: Any) -> None:
        """Run every pass once its scalars are known, and then take over what the last ones gave."""
        scalars = self.update.scalars(self.worker_states)
        known: dict[Source, np.float32] = {
            Source(Origin.WORKERS, i): value for i, value in enumerate(np.asarray(scalars, np.float32))
        }
        gradients = [_flat(leaf) for leaf in jax.tree.leaves(gradients)]
        waiting = [(pass_, number) for number, leaf in enumerate(self.update.leaves) for pass_ in leaf.passes]
        waiting += [(pass_, -1 - number) for number, pass_ in enumerate(self.update.derived)]
        outputs: dict[int, list[Array]] = {}
        while waiting:
            ready = [(pass_, number) for pass_, number in waiting if _is_ready(pass_, known)]
            assert ready, "every pass waits for another"
            waiting = [item for item in waiting if item not in ready]
            for pass_, number in ready:
                inputs = [gradients[number], self.weights[number], *self.states[number]] if number >= 0 else []
                found = self._run(pass_, inputs, len(inputs[0]) if inputs else 1, known)
                if number < 0:
                    known[Source(Origin.DERIVED, -1 - number)] = found[0][0]
                elif found:
                    outputs[number] = found
        totals = [known[Source(Origin.TOTAL, number)] for number in self.update.returned_totals]
        self.worker_states = self.update.advance(self.worker_states, np.array(totals, np.float32))
        for number, found in outputs.items():
            count = 1 + len(self.states[number])
            self.weights[number], *self.states[number] = found[:count]
            self.sent[number] = found[0] if len(found) == count else found[-1]

    def _run(self, pass_: Pass, inputs: list[Array], count: int, known: dict[Source, np.float32]) -> list[Array]:
        scalars = [s.constant if s.origin == Origin.CONSTANT else known[s] for s in pass_.scalars]
        program = self.update.programs[pass_.program]
        outputs, totals = self.passes(program, inputs, np.array(scalars, np.float32), count)
        known |= {Source(Origin.TOTAL, n): value for n, value in zip(pass_.totals, totals, strict=True)}
        return outputs


def _is_ready(pass_: Pass, known: dict[Source, np.float32]) -> bool:
    return all(source.origin == Origin.CONSTANT or source in known for source in pass_.scalars)


def _flat(array: Any) -> Array:
    return np.asarray(array).astype(np.float32).ravel()
