"""Programs that JAX has traced, its jaxprs, for ``jaxhetero.offload``.

Why: how to run, take apart and put together a jaxpr has no public interface, although ``jax.extend.core`` has the
classes. Since 0.10, where a jaxpr with values for its constants is a ClosedJaxpr. In 0.12 both are a Jaxpr; the
attributes that are used here are the same.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax._src import effects, linear_util, shard_map, source_info_util
from jax.extend.core import JaxprEqn, Primitive

Equation = JaxprEqn
# The names of the primitives of jax.lax that send something along an axis, and axis_index. No version has all of them.
_SYNCHRONOUS = """
    psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter axis_index ppermute all_to_all
    ragged_all_to_all pbroadcast pbroadcast_dynamic psend precv unreduced_psum unreduced_reduce_scatter unreduced_pmax
    unreduced_pmin all_gather_reduced
"""
COLLECTIVES = frozenset(_SYNCHRONOUS.split()) | {f"{name}_start" for name in _SYNCHRONOUS.split()}


def inner_programs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among the parameters of an equation, for example the body of a scan."""
    found: list[Any] = []

    def note(program: Any) -> Any:
        found.append(program)
        return program

    with_inner_programs(params, note)
    return found


def with_inner_programs(value: Any, change: Callable[[Any], Any], done: dict[int, Any] | None = None) -> Any:
    """``value`` with each jaxpr in it changed; what has none, or an unchanged one, stays the same object.

    A library keeps its jaxprs where it likes: in containers, named tuples, dataclasses and objects of its own.

    Args:
      value: the parameters of an equation, or a part of them.
      change: gives what takes the place of a jaxpr.
      done: what has become of the parts before this one, by their ids. Objects may hold each other.

    Raises:
      TypeError: a jaxpr that would change is in a function.
    """
    done = {} if done is None else done
    if isinstance(value, _PLAIN):
        return value
    if hasattr(value, "eqns"):
        return change(value)
    if id(value) not in done:
        done[id(value)] = value
        parts, put_together = _taken_apart(value)
        changed = [with_inner_programs(part, change, done) for part in parts]
        if not all(map(operator.is_, changed, parts)):
            done[id(value)] = put_together(changed)
    return done[id(value)]


_PLAIN = (str, bytes, int, float, complex, type(None), type, np.ndarray, np.dtype, jax.Array)


def _taken_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The parts of a parameter, and what makes another one of other parts. JAX has its jaxprs in the open."""
    if isinstance(value, (tuple, list)):
        return list(value), getattr(value, "_make", type(value))
    if isinstance(value, functools.partial):
        return [value.args, value.keywords], lambda changed: type(value)(value.func, *changed[0], **changed[1])
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    is_foreign = module.partition(".")[0] not in ("jax", "jaxlib", "numpy", "builtins")
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if is_foreign], _refuse_function
    is_data = is_foreign and (dataclasses.is_dataclass(value) or not callable(value))
    attributes = _attributes(value) if is_data else {}
    entries = dict(value) if isinstance(value, dict) else {}

    def put_together(changed: list[Any]) -> Any:
        made = copy.copy(value)
        for name, part in zip(attributes, changed, strict=False):
            object.__setattr__(made, name, part)
        if entries:
            dict.update(made, zip(entries, changed[len(attributes) :], strict=True))
        return made

    return [*attributes.values(), *entries.values()], put_together


def _refuse_function(_: list[Any]) -> Any:
    raise TypeError("its program is kept by a Python function")


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds, in its dictionary or in slots."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    in_slots = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **in_slots}


def expansion(equation: Equation) -> Callable[..., Any] | None:
    """What a primitive does that has its program in an object, and shows it when it is compiled; else None.

    Why: JAX's "hijax" primitives are new, and not public. Since 0.10.
    """
    primitive, atoms = equation.primitive, (*equation.invars, *equation.outvars)
    if not primitive.is_high(*(atom.aval for atom in equation.invars), **equation.params):
        return None
    if any(atom.aval.is_high for atom in atoms) or inner_programs(equation.params):
        return None
    return functools.partial(primitive.to_lojax, **equation.params)


def retrace(program: Any, function: Callable[..., Sequence[Any]]) -> Any:
    """A jaxpr of ``function`` for arguments of the types of those of ``program``, to take the place of ``program``."""
    types = [variable.aval for variable in program.invars]
    traced = jax.make_jaxpr(function)(*types)
    if traced.consts and not getattr(program, "consts", ()):
        # There may be no place for constants in this jaxpr. There is one in that of a jitted function inside.
        traced = jax.make_jaxpr(jax.jit(function))(*types)
    return traced if hasattr(program, "consts") else traced.jaxpr


@contextlib.contextmanager
def equation_context(equation: Equation) -> Iterator[None]:
    """The mesh, the names and the place in the source with which JAX traced an equation."""
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    with source_info_util.user_context(equation.source_info.traceback, name_stack=stack), equation.ctx.manager:
        yield


def bind(primitive: Primitive, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """The results of a primitive in the trace of the caller."""
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def run_equation(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation in the trace of the caller."""
    return bind(equation.primitive, equation.params, operands)


def has_rules(equation: Equation) -> bool:
    """Whether an equation holds functions of the user's for transformations: derivatives, or what jax.vmap does."""
    return equation.primitive.name in ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def run_with_rules(
    equation: Equation, operands: Sequence[Any], change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[Any]:
    """As ``run_equation`` for one that ``has_rules``, with each of the rules changed. Why: as above."""
    primitive, params = equation.primitive, equation.primitive.get_bind_params(equation.params)
    if "rule" in params:
        params = {**params, "rule": change(params["rule"])}
    else:
        function, *rules = params["subfuns"]
        changed = [linear_util.wrap_init(change(rule.call_wrapped), debug_info=rule.debug_info) for rule in rules]
        params = {**params, "subfuns": (function, *changed)}
    return list(primitive.bind(*operands, **params))


_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def inlined_program(equation: Equation) -> Any | None:
    """The jaxpr of an equation that does nothing but run it; None for any other equation.

    Why: the names of primitives and of their parameters are not public. Since 0.10.
    """
    name = _INLINED.get(equation.primitive.name)
    return None if name is None else equation.params[name]


def mesh_axes(equation: Equation) -> tuple[str, ...]:
    """The axes of the mesh of a ``jax.shard_map``; none of any other equation. Why: as above."""
    return tuple(equation.params["mesh"].axis_names) if equation.primitive is shard_map.shard_map_p else ()


def scan_counts(equation: Equation) -> tuple[int, int]:
    """How many of the first operands of a scan are constants, and how many after them are carried.

    Why: as above. Until 0.11 they are numbers, in 0.12 the structure of the operands.
    """
    structure = equation.params.get("ft_in")
    if structure is None:
        return equation.params["num_consts"], equation.params["num_carry"]
    constants, carry, _ = structure.update(equation.invars).unpack()
    return len(list(constants)), len(list(carry))


def with_params(equation: Equation, **changed: Any) -> Equation:
    """The same equation with other parameters. Why: as above."""
    changed_equation: Equation = equation.replace(params={**equation.params, **changed})
    return changed_equation


def is_ordered(equation: Equation) -> bool:
    """Whether the effects of an equation must happen in the order of the program. Why: as above."""
    return bool(effects.ordered_effects.filter_in(equation.effects))
