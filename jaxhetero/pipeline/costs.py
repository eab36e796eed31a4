"""How long each equation takes: estimated from its shapes, or measured on this worker's device."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero import _compat
from jaxhetero._collectives.moved import word_type
from jaxhetero.pipeline.graph import Equation, aval_bytes

# Of an accelerator of today, in operations and bytes a second. Only their ratio decides where a model is cut.
_FLOPS = 1e14
_BYTES = 1e12
# What a backward pass takes, in forward passes: it computes a product for each operand of a product.
BACKWARD = 2.0
_REPETITIONS = 5
_LEAST_S = 1e-9
# In the text of functions among the parameters, such as the rule of a derivative: another one for each equation.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_TAKING = frozenset({"gather", "slice", "dynamic_slice"})


def estimate(equation: Equation) -> float:
    """Seconds, by the arithmetic that the equation does and the bytes that it touches."""
    flops, touched = _work(equation.source)
    return max(flops / _FLOPS, touched / _BYTES)


def _work(source: _compat.Equation) -> tuple[float, float]:
    """Operations and bytes."""
    # Of an array from which rows are taken, only these are read.
    operands = source.invars[1:] if source.primitive.name in _TAKING else source.invars
    touched = float(sum(aval_bytes(atom.aval) for atom in (*operands, *source.outvars)))
    rule = _RULES.get(source.primitive.name)
    if rule is not None:
        return rule(source), touched
    inner = list(_compat.inner_programs(source.params))
    if inner:
        return _work_inside(source, inner)
    return float(sum(_count(variable) for variable in source.outvars)), touched


def _work_inside(source: _compat.Equation, programs: list[Any]) -> tuple[float, float]:
    works = [_add_up(_work(equation) for equation in program.eqns) for program in programs]
    if source.primitive.name == "cond":
        return max(works)
    # Of a custom derivative, the first program is the function. Of a loop without a known length, one run is counted.
    operations, touched = _add_up(works) if source.primitive.name == "while" else works[0]
    length = source.params["length"] if source.primitive.name == "scan" else 1
    return operations * length, touched * length


def _add_up(works: Iterable[tuple[float, float]]) -> tuple[float, float]:
    pairs = list(works)
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def _count(atom: Any) -> int:
    """Elements of an operand or a result."""
    return int(math.prod(atom.aval.shape))


def _dot_flops(source: _compat.Equation) -> float:
    (contracted, _), _ = source.params["dimension_numbers"]
    left: Any = source.invars[0].aval
    length: int = math.prod(left.shape[axis] for axis in contracted)
    return 2.0 * _count(source.outvars[0]) * length


def _convolution_flops(source: _compat.Equation) -> float:
    kernel: Any = source.invars[1].aval
    output_features: int = kernel.shape[source.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * _count(source.outvars[0]) * _count(source.invars[1]) / output_features


_RULES: dict[str, Callable[[_compat.Equation], float]] = {
    "dot_general": _dot_flops,
    "conv_general_dilated": _convolution_flops,
}


class Measure:
    """Runs each kind of equation on the default device: those with the same primitive, parameters and shapes once."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        one = jnp.ones(())
        self._idle_s = _time(jax.jit(lambda x: x), [one])

    def __call__(self, equation: Equation) -> float:
        """Seconds: the median of a few runs, less what an empty program takes. Blocks while it compiles and runs."""
        shapes = [(atom.aval.shape, str(atom.aval.dtype)) for atom in equation.inputs]
        kind = f"{equation.name} {_ADDRESS.sub('', str(equation.source.params))} {shapes}"
        if kind not in self._known:
            program = jax.jit(lambda *operands: equation.run(operands))
            measured_s = _time(program, [_example(atom) for atom in equation.inputs])
            self._known[kind] = max(measured_s - self._idle_s, _LEAST_S)
        return self._known[kind]


def _time(program: Callable[..., Any], operands: list[Any]) -> float:
    jax.block_until_ready(program(*operands))
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _example(atom: Any) -> Any:
    if hasattr(atom, "val"):
        return atom.val
    words, back = word_type(atom.shape)
    # Ones, not zeros: a division by zero may take another time.
    return back(jnp.ones(words.shape, words.dtype))
