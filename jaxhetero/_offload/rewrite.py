"""Runs a traced program with our collectives in the place of JAX's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import jit_p

from jaxhetero import _compat
from jaxhetero._offload.calls import Call, Options, as_call, is_replaced, run
from jaxhetero._offload.scope import Scope
from jaxhetero.errors import ConfigError


class Rewriter:
    """Evaluates programs, which are JAX's jaxprs, in the trace of the caller."""

    def __init__(self, scope: Scope, options: Options) -> None:
        self.scope = scope
        self.options = options
        # By program. JAX keeps the program of a jitted function for as long as the function.
        self._rewritten: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._affected: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def evaluate(self, program: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """The results of ``program``."""
        values = _Values(self.scope, self.options)
        values.write([*program.constvars, *program.invars], [*constants, *arguments])
        for equation in program.eqns:
            with _compat.equation_context(equation):
                call = as_call(equation)
                if call is not None and is_replaced(call, self.scope):
                    values.postpone(call)
                else:
                    values.write(equation.outvars, self.run_equation(equation, values.read(equation.invars)))
        return values.read(program.outvars)

    def run_equation(self, equation: _compat.Equation, operands: Sequence[Any]) -> list[Any]:
        """The results of an equation, which may have collectives in its inner programs."""
        if not self.has_inner_collectives(equation.params):
            return _compat.run_equation(equation, operands)
        run_special = _SPECIAL.get(equation.primitive.name)
        if run_special is not None:
            return run_special(self, equation, operands)
        rewritten = equation.replace(params=_compat.with_inner_programs(equation.params, self.rewrite))
        return _compat.run_equation(rewritten, operands)

    def run_primitive(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """The results of a primitive that a function runs outside of any trace; a jitted function is one."""
        if primitive.name not in _compat.COLLECTIVES and not self.has_inner_collectives(params):
            return primitive.bind(*operands, **params)
        if primitive is jit_p:
            return primitive.bind(*operands, **_compat.with_inner_programs(params, self.rewrite))
        program = jax.make_jaxpr(lambda *arguments: primitive.bind(*arguments, **params), axis_env=self.scope.axis_env)
        traced = program(*operands)
        results = self.evaluate(traced, traced.consts, operands)
        return results if primitive.multiple_results else results[0]

    def has_inner_collectives(self, params: dict[str, Any]) -> bool:
        """Whether there is a collective in the inner programs of an equation with these parameters."""
        return any(map(self._has_collectives, _compat.inner_programs(params)))

    def _has_collectives(self, program: Any) -> bool:
        if program not in self._affected:
            self._affected[program] = any(
                as_call(equation) is not None or self.has_inner_collectives(equation.params)
                for equation in program.eqns
            )
        return self._affected[program]

    def rewrite(self, program: Any) -> Any:
        """A program like ``program`` with our collectives; the same one for the same one, so that it compiles once."""
        if program not in self._rewritten:
            self._rewritten[program] = _compat.retrace(program, self.as_function(program))
        return self._rewritten[program]

    def as_function(self, program: Any) -> Callable[..., list[Any]]:
        """``program`` with our collectives as a function of its arguments."""
        return lambda *arguments: self.evaluate(program, getattr(program, "consts", ()), arguments)


def _run_shard_map(rewriter: Rewriter, equation: _compat.Equation, operands: Sequence[Any]) -> list[Any]:
    params = equation.params
    mesh, axis = params["mesh"], rewriter.scope.worker_axis
    if axis in params["newly_manual_axes"]:
        raise ConfigError(
            f"offload: the jax.shard_map or jax.pmap at {_compat.equation_source(equation)} has axis {axis!r} of "
            f"{mesh.shape[axis]} devices, and has been traced as if those were all; apply offload to the function "
            f"inside, for example jax.pmap(jaxhetero.offload(step, axis_name={axis!r}), axis_name={axis!r})"
        )
    mapped: Callable[..., Any] = jax.shard_map(
        lambda *arguments: tuple(rewriter.as_function(params["jaxpr"])(*arguments)),
        mesh=mesh,
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(mapped(*operands))


def _run_custom(rewriter: Rewriter, equation: _compat.Equation, operands: Sequence[Any]) -> list[Any]:
    """A function with a derivative of its own: the derivative is JAX's to take, before we come."""

    def refuse(_primals: Any, _tangents: Any) -> Any:
        raise ConfigError(
            f"offload: the function at {_compat.equation_source(equation)} has a custom derivative and a collective "
            "inside, and cannot be differentiated any more; apply offload to the function that takes the gradient"
        )

    call: Any = jax.custom_jvp(rewriter.as_function(equation.params["call_jaxpr"]))
    call.defjvp(refuse)
    return list(call(*operands))


_SPECIAL: dict[str, Callable[[Rewriter, _compat.Equation, Sequence[Any]], list[Any]]] = {
    "shard_map": _run_shard_map,
    "custom_jvp_call": _run_custom,
    "custom_vjp_call": _run_custom,
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
        self._postponed: dict[Any, list[Call]] = {}  # those that share buckets, by the variable of a result

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        self._values.update(zip(variables, values, strict=True))

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        """The values of variables and of literals."""
        for atom in atoms:
            if not hasattr(atom, "val") and atom in self._postponed:
                self._run(self._postponed[atom])
        return [atom.val if hasattr(atom, "val") else self._values[atom] for atom in atoms]

    def postpone(self, call: Call) -> None:
        """Run the collective when its result is read."""
        self.read(call.equation.invars)  # of collectives that it waits for itself
        group = next((group for group in self._postponed.values() if group[0].may_share_buckets(call)), [])
        group.append(call)
        self._postponed[call.equation.outvars[0]] = group

    def _run(self, group: list[Call]) -> None:
        operands = [operand for call in group for operand in self.read(call.equation.invars)]
        with _compat.equation_context(group[0].equation):
            results = run(group, operands, self._scope, self._options)
        for call, result in zip(group, results, strict=True):
            del self._postponed[call.equation.outvars[0]]
            self.write(call.equation.outvars, [result])
