"""Runs a traced program with our collectives in the place of JAX's."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxhetero import _compat
from jaxhetero._job import world
from jaxhetero._offload.calls import CollectiveCall, Options, as_call, is_replaced, obstacle_inside, run, warn_once
from jaxhetero._offload.scope import Scope, is_for_this_worker, listed, make_scope
from jaxhetero.errors import ConfigError, JaxheteroError


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], axis_env: Sequence[tuple[str, int]]
) -> tuple[Any, list[Any], Callable[[Sequence[Any]], Any]]:
    """The program of ``function`` for ``arguments``, its operands, and what makes results of those of the program.

    Arrays are traced; all else in the arguments, which are pytrees, is passed on as it is. ``axis_env``: the axes that
    the function sees beside those of the caller, and their sizes.
    """
    operands, as_arguments = _taken_apart(arguments)
    found: list[Callable[[Sequence[Any]], Any]] = []

    def of_arrays(*arrays: Any) -> list[Any]:
        outputs, as_results = _taken_apart(function(*as_arguments(arrays)))
        found.append(as_results)
        return outputs

    return jax.make_jaxpr(of_arrays, axis_env=axis_env)(*operands), operands, found[0]


def _taken_apart(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays of a pytree and what puts others in their places, with all that is not an array."""
    leaves, structure = jax.tree.flatten(tree)
    places = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = [leaves[index] for index in places]
    for index in places:  # a tracer that stays here would outlive its trace
        leaves[index] = None

    def with_arrays(others: Sequence[Any]) -> Any:
        put = dict(zip(places, others, strict=True))
        return jax.tree.unflatten(structure, [put.get(index, leaf) for index, leaf in enumerate(leaves)])

    return arrays, with_arrays


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype != jax.dtypes.float0


class Rewriter:
    """Evaluates programs, which are JAX's jaxprs, in the trace of the caller."""

    def __init__(self, scope: Scope, options: Options) -> None:
        self.scope = scope
        self.options = options
        # By program. JAX keeps the program of a jitted function for as long as the function.
        self._rewritten: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._contents: weakref.WeakKeyDictionary[Any, list[_Holds]] = weakref.WeakKeyDictionary()

    def evaluate(self, program: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """The results of ``program``."""
        values = _Values(self.scope, self.options)
        values.write([*program.constvars, *program.invars], [*constants, *arguments])
        for equation, holds in zip(program.eqns, self._holdings(program), strict=True):
            operands = values.read(equation.invars)
            with _compat.equation_context(equation):
                call = as_call(equation)
                if call is not None and is_replaced(call, self.scope):
                    values.postpone(call)
                elif holds and call is None:
                    values.write(equation.outvars, self._run_equation(equation, operands, holds))
                else:
                    values.write(equation.outvars, _compat.run_equation(equation, operands))
        return values.read(program.outvars)

    def _run_equation(self, equation: _compat.Equation, operands: Sequence[Any], holds: _Holds) -> list[Any]:
        """The results of an equation that has something of ours inside."""
        obstacle, cause = obstacle_inside(equation), None
        if obstacle is None:
            try:
                is_expanded = _compat.expansion(equation) is not None
                run_inside = _run_expanded if is_expanded else _SPECIAL.get(equation.primitive.name, _run_rewritten)
                return run_inside(self, equation, operands)
            except (JaxheteroError, jax.errors.JaxRuntimeError, FloatingPointError):
                raise
            except Exception as error:
                obstacle, cause = f"{type(error).__name__}: {error}", error
        what = f"the {equation.primitive.name} at {_compat.equation_source(equation)}"
        if holds is _Holds.COLLECTIVES and (self.scope.worker_axis is not None or jax.process_count() == 1):
            raise ConfigError(
                f"offload: {what} has a collective inside that may go over the workers, and jaxhetero cannot enter it: "
                f"{obstacle}; move the collective out of it, or apply offload to the function inside"
            ) from cause
        if holds is _Holds.COLLECTIVES:
            warn_once(f"offload leaves {what}, with the collectives inside, to JAX: {obstacle}")
        return _compat.run_equation(equation, operands)

    def in_mesh_of(self, equation: _compat.Equation) -> Rewriter:
        """What rewrites the program that a ``jax.shard_map`` maps."""
        name = self.scope.axis_name
        if self.scope.in_mesh or (name is not None and self.scope.worker_axis is None):
            return self  # in another jax.shard_map
        sizes = {axis: equation.params["mesh"].shape[axis] for axis in equation.params["newly_manual_axes"]}
        scope = make_scope(name, sizes)
        if scope.worker_axis is not None and scope.in_mesh and world.size() > 1:
            check_has_no_sums(equation, {scope.worker_axis})
        return Rewriter(scope, self.options)

    def has_collectives(self, program: Any) -> bool:
        """Whether there is a collective in ``program``, however deep."""
        return _Holds.COLLECTIVES in self._holdings(program)

    def _holdings(self, program: Any) -> list[_Holds]:
        """What each equation of ``program`` holds."""
        if program not in self._contents:
            self._contents[program] = [self._holding(equation) for equation in program.eqns]
        return self._contents[program]

    def _holding(self, equation: _compat.Equation) -> _Holds:
        call = as_call(equation)
        if call is not None:
            is_elsewhere = self.scope.axis_name is not None and self.scope.worker_axis not in (None, *call.axes)
            return _Holds.NOTHING if is_elsewhere else _Holds.COLLECTIVES
        inner = [holds for program in self.inner_programs(equation) for holds in self._holdings(program)]
        return max(inner, default=_Holds.RULES if _compat.has_rules(equation) else _Holds.NOTHING)

    def inner_programs(self, equation: _compat.Equation) -> list[Any]:
        """The programs in an equation, or the one that it stands for."""
        expansion = _compat.expansion(equation)
        if expansion is None:
            return _compat.inner_programs(equation.params)
        types = [atom.aval for atom in equation.invars]
        return [jax.make_jaxpr(expansion, axis_env=self.scope.axis_env)(*types)]

    def rewrite(self, program: Any) -> Any:
        """A program like ``program`` with our collectives; the same one for the same one, so that it compiles once."""
        if not any(self._holdings(program)):
            return program
        if program not in self._rewritten:
            self._rewritten[program] = _compat.retrace(program, self.as_function(program))
        return self._rewritten[program]

    def as_function(self, program: Any) -> Callable[..., list[Any]]:
        """``program`` with our collectives as a function of its arguments."""
        return lambda *arguments: self.evaluate(program, getattr(program, "consts", ()), arguments)

    def rewrite_rule(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """A function like ``rule``, which a transformation calls, with our collectives."""

        def rewritten(*arguments: Any) -> Any:
            program, operands, as_results = trace(rule, arguments, self.scope.axis_env)
            return as_results(self.evaluate(program, program.consts, operands))

        return rewritten


class _Holds(enum.IntEnum):
    """What there is for us in an equation."""

    NOTHING = 0
    RULES = 1
    """Functions for transformations that are still to come. What is in them is seen when they are called."""
    COLLECTIVES = 2


def _run_rewritten(rewriter: Rewriter, equation: _compat.Equation, operands: Sequence[Any]) -> list[Any]:
    rewritten = _compat.with_inner_programs(equation.params, rewriter.rewrite)
    return _compat.run_equation(equation.replace(params=rewritten), operands)


def _calls(program: Any) -> Iterator[CollectiveCall]:
    """All collectives in a program."""
    for equation in program.eqns:
        call = as_call(equation)
        if call is not None:
            yield call
        for inner in _compat.inner_programs(equation.params):
            yield from _calls(inner)


def check_has_no_sums(equation: _compat.Equation, axes: Iterable[str]) -> None:
    """``ConfigError`` if a ``jax.shard_map`` over a worker's own devices has collectives of JAX over these axes."""
    for call in _calls(equation.params["jaxpr"]):
        if call.name != "axis_index" and set(axes).intersection(call.axes):
            raise ConfigError(
                f"offload: {call.label} goes over {listed(axes)} of the jax.shard_map or jax.pmap at "
                f"{_compat.equation_source(equation)}, which JAX traced outside of offload or differentiated as a "
                "whole; take gradients inside of it, and call it in the block or in the function that is offloaded"
            )


def _run_shard_map(rewriter: Rewriter, equation: _compat.Equation, operands: Sequence[Any]) -> list[Any]:
    params, mesh = equation.params, equation.params["mesh"]
    if rewriter.scope.worker_axis is None and is_for_this_worker(mesh):
        for call in _calls(params["jaxpr"]):
            warn_once(
                f"offload leaves {call.label} to JAX, inside this worker: no other worker has devices in its mesh"
            )
        return _compat.run_equation(equation, operands)
    inner = rewriter.in_mesh_of(equation)
    mapped: Callable[..., Any] = jax.shard_map(
        lambda *arguments: tuple(inner.as_function(params["jaxpr"])(*arguments)),
        mesh=mesh,
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(mapped(*operands))


def _run_with_rules(rewriter: Rewriter, equation: _compat.Equation, operands: Sequence[Any]) -> list[Any]:
    """A function that has rules of its own, for transformations that are still to come; they may have collectives."""
    rewritten = equation.replace(params=_compat.with_inner_programs(equation.params, rewriter.rewrite))
    return _compat.run_with_rules(rewritten, operands, rewriter.rewrite_rule)


def _run_expanded(rewriter: Rewriter, equation: _compat.Equation, operands: Sequence[Any]) -> list[Any]:
    """A primitive that shows its program late, and its derivative as late; we come before."""

    def refuse(_primals: Any, _tangents: Any) -> Any:
        raise ConfigError(
            f"offload: the {equation.primitive.name} at {_compat.equation_source(equation)} has a derivative of its "
            "own and a collective inside; apply offload to the function that takes the gradient"
        )

    (program,) = rewriter.inner_programs(equation)
    call: Any = jax.custom_jvp(rewriter.as_function(program))
    call.defjvp(refuse)
    return list(call(*operands))


def _run_rematerialized(rewriter: Rewriter, equation: _compat.Equation, operands: Sequence[Any]) -> list[Any]:
    """The forward pass of a derivative with ``optimize_remat``, without JAX's way to drop what nobody uses of it."""
    return rewriter.as_function(equation.params["fwd_jaxpr"])(*operands)


_SPECIAL: dict[str, Callable[[Rewriter, _compat.Equation, Sequence[Any]], list[Any]]] = {
    "shard_map": _run_shard_map,
    "custom_jvp_call": _run_with_rules,
    "custom_vjp_call": _run_with_rules,
    "custom_vmap_call": _run_with_rules,
    "remat_opt": _run_rematerialized,
}


class _Values:
    """The values of a program's variables.

    A collective waits until somebody reads its result, and takes along those that wait with it. So the sums of a
    backward pass, of which the optimizer is the first to read one, fill buckets together.
    """

    def __init__(self, scope: Scope, options: Options) -> None:
        self._scope = scope
        self._options = options
        self._values: dict[Any, Any] = {}
        self._postponed: dict[Any, list[CollectiveCall]] = {}  # those that share buckets, by the variable of a result

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        self._values.update(zip(variables, values, strict=True))

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        """The values of variables and of literals."""
        for atom in atoms:
            if not hasattr(atom, "val") and atom in self._postponed:
                self._run(self._postponed[atom])
        return [atom.val if hasattr(atom, "val") else self._values[atom] for atom in atoms]

    def postpone(self, call: CollectiveCall) -> None:
        """Run the collective, whose operands have been read, when its result is."""
        group = next((group for group in self._postponed.values() if group[0].may_share_buckets(call)), [])
        group.append(call)
        self._postponed.update((variable, group) for variable in call.equation.outvars)

    def _run(self, group: list[CollectiveCall]) -> None:
        operands = self.read([atom for call in group for atom in call.equation.invars])
        variables = [variable for call in group for variable in call.equation.outvars]
        with _compat.equation_context(group[0].equation):
            results = run(group, operands, self._scope, self._options)
        for variable in variables:
            del self._postponed[variable]
        self.write(variables, results)
