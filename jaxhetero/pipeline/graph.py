"""A traced function as one flat list of equations: jitted calls are inlined, scans are unrolled into parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero import _compat
from jaxhetero._collectives.moved import word_type
from jaxhetero.errors import ConfigError


class Value:
    """Something that an equation computes, or that the function is given. Equal only to itself."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval

    @property
    def bytes(self) -> int:
        """The size in memory."""
        return aval_bytes(self.aval)

    @property
    def is_float(self) -> bool:
        """Whether it can have a gradient."""
        return bool(jnp.issubdtype(self.aval.dtype, jnp.inexact))

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """Its shape and its dtype, to trace with."""
        return jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype, weak_type=self.aval.weak_type)


def aval_bytes(aval: Any) -> int:
    """The size in memory of an array of this type."""
    count = int(math.prod(aval.shape))
    return count * _item_bytes(aval.dtype)


@functools.cache
def _item_bytes(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words, _ = word_type(jax.ShapeDtypeStruct((), dtype))
        return int(words.size * words.dtype.itemsize)
    return int(np.dtype(dtype).itemsize)


# An operand: a value, or a constant that is written in the program.
Atom = Any


@dataclass(eq=False, slots=True)
class Equation:
    """One operation of the function, in terms of values."""

    source: _compat.Equation
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.source.primitive.name)

    @property
    def values(self) -> Iterator[Value]:
        """The inputs that are values."""
        return (atom for atom in self.inputs if isinstance(atom, Value))

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The results, in the trace of the caller."""
        with _compat.equation_context(self.source):
            return _compat.run_equation(self.source, operands)

    def describe(self) -> str:
        """For people: the primitive, the shape of its result and the place in the user's program."""
        shapes = ", ".join(value.aval.str_short() for value in self.outputs)
        return f"{self.name} of {shapes} at {_compat.equation_source(self.source)}"


@dataclass(eq=False)
class Graph:
    """The equations of a function in an order in which they can run."""

    inputs: list[Value]
    equations: list[Equation]
    outputs: list[Value]
    constants: dict[Value, Any] = field(default_factory=dict)

    def keep_live(self, wanted: Sequence[Value] | None = None) -> Graph:
        """The same function, or the part of it that makes ``wanted``, without what nobody needs."""
        outputs = self.outputs if wanted is None else list(wanted)
        equations = live(self.equations, outputs)
        used = {value for equation in equations for value in equation.values}.union(outputs)
        constants = {value: constant for value, constant in self.constants.items() if value in used}
        return Graph(self.inputs, equations, outputs, constants)


def live(equations: Sequence[Equation], wanted: Iterable[Value]) -> list[Equation]:
    """The equations that the wanted values need, and those with side effects."""
    needed = set(wanted)
    kept = []
    for equation in reversed(equations):
        if equation.source.effects or not needed.isdisjoint(equation.outputs):
            kept.append(equation)
            needed.update(equation.values)
    return kept[::-1]


def evaluate(equations: Iterable[Equation], known: dict[Value, Any], wanted: Iterable[Value]) -> list[Any]:
    """The wanted values, computed in the trace of the caller from the ``known`` ones."""
    values = dict(known)

    def read(atom: Atom) -> Any:
        return values[atom] if isinstance(atom, Value) else atom.val

    for equation in equations:
        results = equation.run([read(atom) for atom in equation.inputs])
        values.update(zip(equation.outputs, results, strict=True))
    return [values[value] for value in wanted]


def trace(function: Callable[..., Any], *shapes: Any, scan_parts: int = 1) -> Graph:
    """The graph of a function of arrays of these shapes.

    Args:
      shapes: pytrees of arrays or of ``jax.ShapeDtypeStruct``. Nothing is computed with them.
      scan_parts: into how many scans a longer ``jax.lax.scan`` is taken apart, so that it can be cut between them.

    Raises:
      ConfigError: the function has an ordered effect, which cannot be kept in order between processes.
    """
    program = jax.make_jaxpr(function)(*shapes)
    builder = _Builder(scan_parts)
    inputs = [Value(variable.aval) for variable in program.jaxpr.invars]
    outputs = builder.inline(program.jaxpr, builder.constants_of(program.consts), inputs)
    return Graph(inputs, builder.equations, builder.as_values(outputs), builder.constants).keep_live()


class _Builder:
    def __init__(self, scan_parts: int) -> None:
        self.scan_parts = scan_parts
        self.equations: list[Equation] = []
        self.constants: dict[Value, Any] = {}
        self._constant_values: dict[int, Value] = {}

    def constants_of(self, arrays: Sequence[Any]) -> list[Value]:
        """A value for each array that a program has closed over; one and the same for the same array."""
        for array in arrays:
            if id(array) not in self._constant_values:
                value = self._constant_values[id(array)] = Value(jax.typeof(array))
                self.constants[value] = array
        return [self._constant_values[id(array)] for array in arrays]

    def as_values(self, atoms: Sequence[Atom]) -> list[Value]:
        """The atoms, with a value in the place of each constant that is written in the program."""
        return [atom if isinstance(atom, Value) else self._constant(atom) for atom in atoms]

    def _constant(self, literal: Any) -> Value:
        value = Value(literal.aval)
        self.constants[value] = np.asarray(literal.val, literal.aval.dtype)
        return value

    def inline(self, program: Any, constants: Sequence[Atom], operands: Sequence[Atom]) -> list[Atom]:
        """Add the equations of a jaxpr; its outputs."""
        atoms: dict[Any, Atom] = dict(zip(program.constvars, constants, strict=True))
        atoms.update(zip(program.invars, operands, strict=True))

        def read(atom: Any) -> Atom:
            return atom if hasattr(atom, "val") else atoms[atom]

        for equation in program.eqns:
            inputs = [read(atom) for atom in equation.invars]
            atoms.update(zip(equation.outvars, self._add(equation, inputs), strict=True))
        return [read(atom) for atom in program.outvars]

    def _add(self, equation: _compat.Equation, inputs: Sequence[Atom]) -> Sequence[Atom]:
        _refuse_order(equation)
        inner = _compat.inlined_program(equation)
        if inner is not None:
            return self.inline(inner, self.constants_of(getattr(inner, "consts", ())), inputs)
        if equation.primitive.name == "scan" and self.scan_parts > 1 and equation.params["length"] > 1:
            return self._add_scan(equation, inputs)
        outputs = tuple(Value(variable.aval) for variable in equation.outvars)
        self.equations.append(Equation(equation, tuple(inputs), outputs))
        return outputs

    def _add_scan(self, equation: _compat.Equation, inputs: Sequence[Atom]) -> Sequence[Atom]:
        """A long scan as several short ones, each with its rows of what is scanned over."""
        parts = min(self.scan_parts, equation.params["length"])
        shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in inputs]
        with _compat.equation_context(equation):
            program = jax.make_jaxpr(lambda *operands: _scan_in_parts(equation, operands, parts))(*shapes)
        whole, self.scan_parts = self.scan_parts, 1
        try:
            return self.inline(program.jaxpr, self.constants_of(program.consts), inputs)
        finally:
            self.scan_parts = whole


def _scan_in_parts(equation: _compat.Equation, operands: Sequence[Any], parts: int) -> list[Any]:
    length, reverse = equation.params["length"], equation.params["reverse"]
    constant_count, carry_count = _compat.scan_counts(equation)
    constants, rest = operands[:constant_count], operands[constant_count:]
    carry, rows = list(rest[:carry_count]), rest[carry_count:]
    edges = [length * part // parts for part in range(parts + 1)]
    order = range(parts)
    stacked: dict[int, list[Any]] = {}
    for part in reversed(order) if reverse else order:
        begin, end = edges[part], edges[part + 1]
        slices = [jax.lax.slice_in_dim(array, begin, end) for array in rows]
        shorter = _compat.with_params(equation, length=end - begin)
        results = _compat.run_equation(shorter, [*constants, *carry, *slices])
        carry, stacked[part] = results[:carry_count], results[carry_count:]
    joined = [jnp.concatenate(pieces) for pieces in zip(*(stacked[part] for part in order), strict=True)]
    return [*carry, *joined]


def _refuse_order(equation: _compat.Equation) -> None:
    if _compat.is_ordered(equation):
        raise ConfigError(
            f"pipeline: the {equation.primitive.name} at {_compat.equation_source(equation)} has an effect that must "
            "keep its order (ordered=True), which stages in different processes cannot; use ordered=False, or do "
            "without it"
        )
