"""A traced function as one graph of calls of primitives, without functions in functions.

What is the same for every element of an array is kept as a scalar, also where JAX broadcasts it; what does not depend
on any input is computed here; and the same call with the same operands is there once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero._compat import Equation, bind, equation_functions, equation_source, inner_programs
from jaxhetero.optimizers._programs.vectors import FOLDS, MOST_ITEMS, MOVES, Items, as_items, folded, mapped, moved

Primitive: TypeAlias = Any

# Primitives that compute each element from the same element of every operand.
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos cosh
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul
    ne neg nextafter not or pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
SUM = "reduce_sum"
# Powers that are exact operations.
_ROOTS = {0.5: jax.lax.sqrt_p, -0.5: jax.lax.rsqrt_p}
# Primitives with a function among their parameters that is not simply called.
_LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True, eq=False)
class Value:
    """An array, or a scalar that may stand for an array whose elements are all the same."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, eq=False)
class Input(Value):
    """The ``number``-th argument of the traced function."""

    number: int


@dataclass(frozen=True, eq=False)
class Constant(Value):
    """What is known when the function is traced."""

    value: Any


@dataclass(frozen=True, eq=False)
class Listed(Value):
    """A small array, by its items: sums over tensors, such as norms that were stacked, and what is computed of them."""

    items: Items


@dataclass(frozen=True, eq=False)
class Result(Value):
    """A result of a call."""

    call: Call
    index: int


@dataclass(frozen=True, eq=False)
class Call:
    """A primitive with its operands: the ``number``-th call of a graph.

    Attributes:
      equation: where it comes from.
      sums: how many sums come one after the other up to it, itself included.
    """

    number: int
    primitive: Primitive
    params: dict[str, Any]
    operands: tuple[Value, ...]
    equation: Equation
    sums: int
    results: list[Result] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return str(self.primitive.name)

    @property
    def source(self) -> str:
        """Which transformation made the call, and where: ``add_noise (_adding.py:add_noise.<locals>.update_fn)``."""
        names = [name.split(".")[0] for name in equation_functions(self.equation) if ".<locals>.update" in name]
        source = equation_source(self.equation)
        return f"{names[0]} ({source})" if names else source


def sums_before(value: Value) -> int:
    """How many sums come one after the other up to a value."""
    if isinstance(value, Listed):
        return max(map(sums_before, value.items.flat))
    return value.call.sums if isinstance(value, Result) else 0


class Graph:
    """The calls of a traced function, each behind those that it needs.

    Attributes:
      inputs: the arguments.
      calls: all calls, in order.
      outputs: the results.
    """

    def __init__(self, traced: Any) -> None:
        """Take a closed jaxpr to pieces."""
        self.calls: list[Call] = []
        self._known: dict[Any, list[Value]] = {}
        self._constants: dict[Any, Constant] = {}
        self._choices: dict[Value, tuple[Value, Value, Value] | None] = {}
        self._current: Any = None  # the equation from which calls are made
        # The equation that runs a jitted function. JAX traces that once, and knows its first caller alone.
        self._caller: Any = None
        self.inputs = [Input(tuple(v.aval.shape), v.aval.dtype, i) for i, v in enumerate(traced.jaxpr.invars)]
        self.outputs = [self._whole(value) for value in self._run(traced, self.inputs)]

    def _run(self, program: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr."""
        open_program = getattr(program, "jaxpr", program)
        known: dict[Any, Value] = dict(zip(open_program.invars, operands, strict=True))
        if open_program.constvars:
            known |= zip(open_program.constvars, map(self.constant, program.consts), strict=True)

        def read(atom: Any) -> Value:
            return self.constant(atom.val, atom.aval.dtype) if hasattr(atom, "val") else known[atom]

        for equation in open_program.eqns:
            results = self._equation(equation, [read(atom) for atom in equation.invars])
            known |= zip(equation.outvars, results, strict=True)
        return [read(atom) for atom in open_program.outvars]

    def _equation(self, equation: Equation, operands: list[Value]) -> list[Value]:
        self._current = self._caller or equation
        name, inner = equation.primitive.name, list(inner_programs(equation.params))
        if name == "cond":
            return self._choice(inner, operands[0], operands[1:])
        if inner and name not in _LOOPS:
            outer = self._caller
            self._caller = outer or (equation if _is_of_tx(equation) else None)
            results = self._run(inner[0], operands)
            self._caller = outer
            return results
        if name in ELEMENTWISE:
            operands = self._spread(equation, operands)
        listed = self._listed(equation, operands)
        if listed is not None:
            return listed
        other = self._rewritten(equation, operands) or self._summed(equation, operands)
        if other is not None:
            return [other]
        types = [_type(variable) for variable in equation.outvars]
        dtypes = [dtype for _, dtype in types]
        if name in ELEMENTWISE:
            return self.call(equation.primitive, equation.params, operands, dtypes, None)
        shapes = [_type(variable)[0] for variable in equation.invars]
        operands = [self._as_array(value, shape) for value, shape in zip(operands, shapes, strict=True)]
        return self.call(equation.primitive, equation.params, operands, dtypes, [shape for shape, _ in types])

    def _spread(self, equation: Equation, operands: Sequence[Value]) -> list[Value]:
        """The operands of an elementwise equation; those that JAX repeats along an axis of length 1, repeated."""
        shape, _ = _type(equation.outvars[0])
        return [
            value if _is_as_good_in(shape, value) else self._repeated(value, _type(variable)[0], shape)
            for value, variable in zip(operands, equation.invars, strict=True)
        ]

    def _repeated(self, value: Value, given: tuple[int, ...], shape: tuple[int, ...]) -> Value:
        params = {"shape": shape, "broadcast_dimensions": tuple(range(len(shape))), "sharding": None}
        items = self._items(value, given)
        if items is not None:
            return self._of_items(moved(jax.lax.broadcast_in_dim_p, params, [items], [])[0])
        value = self._as_array(value, given)
        return self.call(jax.lax.broadcast_in_dim_p, params, [value], [value.dtype], [shape])[0]

    def _listed(self, equation: Equation, operands: Sequence[Value]) -> list[Value] | None:
        """The results of an equation that moves or combines items of small arrays; None of any other."""
        name, params, first = equation.primitive.name, equation.params, operands[0] if operands else None
        if name in FOLDS and isinstance(first, Listed):
            return [self._folded(FOLDS[name], first, params["axes"])]
        # Scalars that are put together make a small array.
        if name not in MOVES or not (MOVES[name] is None or any(isinstance(value, Listed) for value in operands)):
            return None
        if all(isinstance(value, Constant) for value in operands):
            return None
        count = MOVES[name] or len(operands)
        shapes = [_type(variable)[0] for variable in equation.invars]
        found = [self._items(*pair) for pair in zip(operands[:count], shapes, strict=False)]
        items = [each for each in found if each is not None]
        others = [value.value for value in operands[count:] if isinstance(value, Constant)]
        is_small = all(math.prod(_type(variable)[0]) <= MOST_ITEMS for variable in equation.outvars)
        if len(items) + len(others) < len(operands) or not is_small:
            return None
        return [self._of_items(each) for each in moved(equation.primitive, params, items, others)]

    def _folded(self, primitive: Primitive, value: Listed, axes: Sequence[int]) -> Value:
        return self._of_items(folded(functools.partial(self.apply, primitive), value.items, axes))

    def _items(self, value: Value, shape: tuple[int, ...]) -> Items | None:
        """The items of a small array that JAX thinks to have this shape; None if they are not known one by one."""
        if value.shape == () and math.prod(shape) <= MOST_ITEMS:
            return as_items(value, shape)
        if isinstance(value, Constant) and math.prod(value.shape) <= MOST_ITEMS:
            return mapped(lambda item: self.constant(item, value.dtype))(np.reshape(value.value, shape).astype(object))
        return value.items if isinstance(value, Listed) else None

    def _of_items(self, items: Items) -> Value:
        return items.flat[0] if items.size == 1 else Listed(items.shape, items.flat[0].dtype, items)

    def _whole(self, value: Value) -> Value:
        """A value for a primitive that cannot take it item by item."""
        if not isinstance(value, Listed):
            return value
        rows = [self._as_array(item, (1,)) for item in value.items.flat]
        flat = self.call(jax.lax.concatenate_p, {"dimension": 0}, rows, [value.dtype], [(len(rows),)])[0]
        return self._as_array(flat, value.shape)

    def _rewritten(self, equation: Equation, operands: Sequence[Value]) -> Value | None:
        """The result of an elementwise equation that needs no call, or another one."""
        if not operands:
            return None
        name, first, last = equation.primitive.name, operands[0], operands[-1]
        shape, dtype = _type(equation.outvars[0])
        keeps_order = equation.params.get("dimensions") is None or name == "squeeze"
        if name in {"broadcast_in_dim", "reshape", "squeeze"} and keeps_order and _is_as_good_in(shape, first):
            return first
        if name == "convert_element_type" and first.dtype == dtype:
            return first
        if name == "div" and first.shape != () and last.shape == ():
            # Within one unit in the last place, and several times as fast.
            inverse = self.apply(jax.lax.div_p, self.constant(1, dtype), last)
            return self.apply(jax.lax.mul_p, first, inverse)
        if name == "pow" and first.shape != () and _number(last) in _ROOTS:
            return self.call(_ROOTS[_number(last)], {"accuracy": None}, [first], [dtype], None)[0]
        return None

    def _summed(self, equation: Equation, operands: Sequence[Value]) -> Value | None:
        """The result of an equation that combines all elements of an array, if it is one."""
        name, (shape, _) = equation.primitive.name, _type(equation.outvars[0])
        if name == "dot_general" and _contracts_all(equation):
            product = self.apply(jax.lax.mul_p, *operands)
            return self.total(product, _type(equation.invars[0])[0])
        if name not in {"reduce_sum", "reduce_and", "reduce_or"} or math.prod(shape) != 1:
            return None
        (value,), (taken, _) = operands, _type(equation.invars[0])
        if not taken and not value.shape:
            return None
        if name == "reduce_sum":
            return self.total(value, taken)
        # All are true if none is false, and any is true if one is.
        truths = self.apply(jax.lax.not_p, value) if name == "reduce_and" else value
        count = self.total(self._as_number(truths), taken)
        compare = jax.lax.eq_p if name == "reduce_and" else jax.lax.ne_p
        return self.apply(compare, count, self.constant(0, np.float32))

    def _as_number(self, truths: Value) -> Value:
        """1 for true and 0 for false."""
        params = {"new_dtype": np.dtype(np.float32), "weak_type": False, "sharding": None}
        return self.call(jax.lax.convert_element_type_p, params, [truths], [params["new_dtype"]], None)[0]

    def _as_array(self, value: Value, shape: tuple[int, ...]) -> Value:
        """The value in the shape that JAX thinks it has, for a primitive to which the shape matters."""
        value = self._whole(value)
        if value.shape == tuple(shape):
            return value
        primitive = jax.lax.broadcast_in_dim_p if value.shape == () else jax.lax.reshape_p
        params: dict[str, Any] = {"shape": tuple(shape), "broadcast_dimensions": (), "sharding": None}
        if value.shape != ():
            params = {"new_sizes": tuple(shape), "dimensions": None, "sharding": None}
        return self.call(primitive, params, [value], [value.dtype], [tuple(shape)])[0]

    def _choice(self, branches: list[Any], index: Value, operands: list[Value]) -> list[Value]:
        """What ``lax.cond`` and ``lax.switch`` give: all branches are computed, and one is selected."""
        if isinstance(index, Constant):
            return self._run(branches[int(index.value)], operands)
        chosen = self._run(branches[0], operands)
        for number, branch in enumerate(branches[1:], 1):
            is_it = self.apply(jax.lax.eq_p, index, self.constant(number, index.dtype))
            chosen = [self.select(is_it, a, b) for a, b in zip(chosen, self._run(branch, operands), strict=True)]
        return chosen

    def total(self, value: Value, shape: Sequence[int]) -> Value:
        """The sum of all elements of a value that JAX thinks to have this shape.

        Where one of two values was selected for all elements alike, one of two sums may be. So a sum does not wait for
        what the selection alone depends on: ``optax.safe_norm`` selects by another norm of the same tensor.
        """
        if value.shape == ():
            return self.apply(jax.lax.mul_p, value, self.constant(math.prod(shape), value.dtype))
        if isinstance(value, Listed):
            return self._folded(jax.lax.add_p, value, range(len(value.shape)))
        choice = self._uniform_choice(value)
        if choice is not None and max(map(sums_before, choice[1:])) < sums_before(value):
            predicate, when_false, when_true = choice
            return self.select(predicate, self.total(when_false, shape), self.total(when_true, shape))
        axes = tuple(range(len(value.shape)))
        params = {"axes": axes, "out_sharding": None}
        return self.call(jax.lax.reduce_sum_p, params, [value], [value.dtype], [()])[0]

    def _uniform_choice(self, value: Value) -> tuple[Value, Value, Value] | None:
        """``p, a, b`` where the value is ``b if p else a`` for a scalar ``p``."""
        if value not in self._choices:
            self._choices[value] = self._find_uniform_choice(value)
        return self._choices[value]

    def _find_uniform_choice(self, value: Value) -> tuple[Value, Value, Value] | None:
        if not isinstance(value, Result) or value.shape == () or value.call.name not in ELEMENTWISE:
            return None
        call = value.call
        if call.name == "select_n":
            predicate, *cases = call.operands
            return (predicate, cases[0], cases[1]) if predicate.shape == () and len(cases) == 2 else None
        choices = [self._uniform_choice(operand) for operand in call.operands]
        predicates = {choice[0] for choice in choices if choice is not None}
        if len(predicates) != 1:
            return None
        sides = [
            [
                operand if choice is None else choice[side]
                for operand, choice in zip(call.operands, choices, strict=True)
            ]
            for side in (1, 2)
        ]
        first, second = (self.call(call.primitive, call.params, side, [value.dtype], None)[0] for side in sides)
        return predicates.pop(), first, second

    def select(self, predicate: Value, when_false: Value, when_true: Value) -> Value:
        """One of two values."""
        return self.apply(jax.lax.select_n_p, predicate, when_false, when_true)

    def apply(self, primitive: Primitive, *operands: Value) -> Value:
        """The result of an elementwise primitive without parameters."""
        dtype = np.dtype(bool) if primitive.name in {"eq", "ne"} else operands[-1].dtype
        return self.call(primitive, {}, operands, [dtype], None)[0]

    def constant(self, value: Any, dtype: Any = None) -> Constant:
        """A value that is known; an array of one value is a scalar."""
        array = value if dtype is None else np.asarray(value, dtype)
        if isinstance(array, np.ndarray) and array.shape == ():
            key = (array.dtype, array.tobytes())
            return self._constants.setdefault(key, Constant((), array.dtype, array))
        return Constant(tuple(np.shape(array)), array.dtype, array)

    def call(
        self,
        primitive: Primitive,
        params: dict[str, Any],
        operands: Sequence[Value],
        dtypes: Sequence[Any],
        shapes: Sequence[tuple[int, ...]] | None,
    ) -> list[Value]:
        """The results of a call: one that is there already, a new one, or constants.

        Args:
          primitive, params, operands: what is called.
          dtypes: of the results.
          shapes: of the results. ``None`` where each element is computed from the same element of the operands.
        """
        if shapes is None and any(isinstance(value, Listed) for value in operands):
            return self._by_items(primitive, params, operands, dtypes)
        chosen = self._chosen_number(operands) if shapes is None and primitive.name != "select_n" else None
        if chosen is not None:
            place, predicate, *cases = chosen
            results = [
                self.call(primitive, params, [*operands[:place], case, *operands[place + 1 :]], dtypes, None)[0]
                for case in cases
            ]
            return [self.select(predicate, *results)]
        key = (primitive, repr(params), tuple(operands))
        if key in self._known:
            return self._known[key]
        if shapes is None:
            shapes = [max((value.shape for value in operands), key=len)] * len(dtypes)
        if all(isinstance(value, Constant) for value in operands):
            self._known[key] = self._compute(primitive, params, operands)
            return self._known[key]
        sums = max(map(sums_before, operands), default=0) + (primitive.name == SUM)
        call = Call(len(self.calls), primitive, params, tuple(operands), self._current, sums)
        call.results.extend(Result(*type_, call, i) for i, type_ in enumerate(zip(shapes, dtypes, strict=True)))
        self.calls.append(call)
        self._known[key] = list(call.results)
        return self._known[key]

    def _chosen_number(self, operands: Sequence[Value]) -> tuple[int, Value, Value, Value] | None:
        """``i, p, a, b`` where operand ``i`` is the whole number ``b if p else a``, and ``p`` depends on sums.

        Programs have no whole numbers. They need none where those that depend on sums, such as how many steps in a row
        had a gradient that was not finite, are chosen among numbers of the workers.
        """
        for place, value in enumerate(operands):
            if not isinstance(value, Result) or value.shape != () or not np.issubdtype(value.dtype, np.integer):
                continue
            call = value.call
            if sums_before(call.operands[0]) == 0:
                continue
            if call.name == "select_n" and len(call.operands) == 3:
                return (place, *call.operands)
            if call.name == "convert_element_type" and call.operands[0].dtype == bool:
                zero, one = (self.constant(number, value.dtype) for number in (0, 1))
                return place, call.operands[0], zero, one
        return None

    def _by_items(
        self, primitive: Primitive, params: dict[str, Any], operands: Sequence[Value], dtypes: Sequence[Any]
    ) -> list[Value]:
        """The results of an elementwise call on small arrays: one call for each item, if all are known by items."""
        shape = max((value.shape for value in operands), key=len)
        arrays = [self._items(value, value.shape) for value in operands]
        if any(items is None for items in arrays):
            return self.call(primitive, params, [self._whole(value) for value in operands], dtypes, None)

        def item(*values: Value) -> Value:
            return self.call(primitive, params, values, dtypes, None)[0]

        return [self._of_items(np.broadcast_to(mapped(item)(*arrays), shape))]

    def _compute(self, primitive: Primitive, params: dict[str, Any], operands: Sequence[Value]) -> list[Value]:
        with jax.ensure_compile_time_eval():
            found = bind(primitive, params, [value.value for value in operands if isinstance(value, Constant)])
        return [self._known_array(array) for array in found]

    def _known_array(self, array: Any) -> Constant:
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
        return self.constant(array) if is_key else self.constant(np.asarray(array), array.dtype)


def _is_of_tx(equation: Equation) -> bool:
    """Whether the transformation made the equation, and not ``lower``, where all of the transformation is jitted."""
    return not equation_functions(equation)[0].startswith("lower.<locals>")


def _type(variable: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the dtype of a variable of a jaxpr."""
    return tuple(variable.aval.shape), variable.aval.dtype


def _number(value: Value) -> float:
    """The number that a value is known to be; else NaN."""
    return float(value.value) if isinstance(value, Constant) and value.shape == () else math.nan


def _is_as_good_in(shape: Sequence[int], value: Value) -> bool:
    """Whether a value need not be changed to have a shape: its elements are in the same order, or all the same."""
    return value.shape == () or math.prod(value.shape) == math.prod(shape)


def _contracts_all(equation: Equation) -> bool:
    """Whether a ``dot_general`` is the sum of the products of all elements of two arrays of one shape."""
    (left, right), batch = equation.params["dimension_numbers"]
    shape, other = (_type(variable)[0] for variable in equation.invars)
    every = tuple(range(len(shape)))
    return not any(batch) and tuple(left) == tuple(right) == every and shape == other
