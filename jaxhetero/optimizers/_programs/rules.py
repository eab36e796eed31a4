"""How each primitive of JAX becomes operations of a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxhetero.optimizers._programs.assembly import Assembly, Operand
from jaxhetero.optimizers._programs.program import Opcode

# Gives the operand that always has a value.
Number: TypeAlias = Callable[[float], Operand]
# Gives the operand that holds the result.
Rule: TypeAlias = Callable[["Writer", Sequence[Operand], Mapping[str, Any]], Operand]


class Writer:
    """What rules write with."""

    def __init__(self, assembly: Assembly, number: Number) -> None:
        self.emit = assembly.emit
        self.number = number

    def invert(self, truth: Operand) -> Operand:
        """1 where the operand is 0."""
        return self.emit(Opcode.EQUAL, truth, self.number(0.0))


def _direct(opcode: Opcode) -> Rule:
    return lambda writer, operands, _: writer.emit(opcode, *operands)


def _swapped(opcode: Opcode) -> Rule:
    return lambda writer, operands, _: writer.emit(opcode, operands[1], operands[0])


def _not_equal(writer: Writer, operands: Sequence[Operand], _: Mapping[str, Any]) -> Operand:
    return writer.invert(writer.emit(Opcode.EQUAL, *operands))


def _select(writer: Writer, operands: Sequence[Operand], _: Mapping[str, Any]) -> Operand:
    predicate, when_false, when_true = operands
    return writer.emit(Opcode.SELECT, predicate, when_true, when_false)


def _square(writer: Writer, operands: Sequence[Operand], _: Mapping[str, Any]) -> Operand:
    return writer.emit(Opcode.MUL, operands[0], operands[0])


def _power(writer: Writer, operands: Sequence[Operand], params: Mapping[str, Any]) -> Operand:
    """By squaring."""
    square, left = operands[0], abs(params["y"])
    power = None if left else writer.number(1.0)
    while left:
        if left % 2:
            power = square if power is None else writer.emit(Opcode.MUL, power, square)
        left //= 2
        square = writer.emit(Opcode.MUL, square, square) if left else square
    assert power is not None
    return power if params["y"] >= 0 else writer.emit(Opcode.DIV, writer.number(1.0), power)


def _inverse_root(writer: Writer, operands: Sequence[Operand], _: Mapping[str, Any]) -> Operand:
    return writer.emit(Opcode.DIV, writer.number(1.0), writer.emit(Opcode.SQRT, operands[0]))


def _is_finite(writer: Writer, operands: Sequence[Operand], _: Mapping[str, Any]) -> Operand:
    return writer.emit(Opcode.LESS, writer.emit(Opcode.ABS, operands[0]), writer.number(math.inf))


def _clamp(writer: Writer, operands: Sequence[Operand], _: Mapping[str, Any]) -> Operand:
    low, value, high = operands
    return writer.emit(Opcode.MIN, writer.emit(Opcode.MAX, low, value), high)


def _same(_: Writer, operands: Sequence[Operand], __: Mapping[str, Any]) -> Operand:
    return operands[0]


RULES: Mapping[str, Rule] = {
    "abs": _direct(Opcode.ABS),
    "add": _direct(Opcode.ADD),
    "add_any": _direct(Opcode.ADD),
    "and": _direct(Opcode.MIN),
    "clamp": _clamp,
    "convert_element_type": _same,
    "copy": _same,
    "copy_p": _same,
    "div": _direct(Opcode.DIV),
    "eq": _direct(Opcode.EQUAL),
    "ge": _swapped(Opcode.LESS_EQUAL),
    "gt": _swapped(Opcode.LESS),
    "integer_pow": _power,
    "is_finite": _is_finite,
    "le": _direct(Opcode.LESS_EQUAL),
    "lt": _direct(Opcode.LESS),
    "max": _direct(Opcode.MAX),
    "min": _direct(Opcode.MIN),
    "mul": _direct(Opcode.MUL),
    "ne": _not_equal,
    "neg": _direct(Opcode.NEG),
    "not": lambda writer, operands, _: writer.invert(operands[0]),
    "or": _direct(Opcode.MAX),
    "rsqrt": _inverse_root,
    "select_n": _select,
    "sign": _direct(Opcode.SIGN),
    "sqrt": _direct(Opcode.SQRT),
    "square": _square,
    "stop_gradient": _same,
    "sub": _direct(Opcode.SUB),
    "xor": _not_equal,
}
