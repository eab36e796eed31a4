"""What becomes of the programs that JAX traces while offload is on."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxhetero import _compat
from jaxhetero._job import world
from jaxhetero._offload.calls import Options, as_call, warn_once
from jaxhetero._offload.rewrite import Rewriter, check_has_no_sums, trace
from jaxhetero._offload.scope import Scope, listed, make_scope, mapped_axes
from jaxhetero.errors import ConfigError


class Interceptor:
    """Has the collectives of programs go through reducers.

    Of equal arguments there is one: JAX keeps programs by interceptor.
    """

    def __init__(self, axis_name: str | None, options: Options, *, is_inside: bool = False) -> None:
        self._axis_name = axis_name
        self._options = options
        self.is_inside = is_inside
        """Whether a program is being traced that will be rewritten as a whole; nothing is rewritten meanwhile."""

    @functools.cached_property
    def _inside(self) -> Interceptor:
        return Interceptor(self._axis_name, self._options, is_inside=True)

    def trace(self, trace: Callable[[], Any]) -> Any:
        """Call ``trace``. It sees an axis of all workers, where nothing maps the axis.

        If no name was given, that is the axis that ``trace`` looks for and does not find.
        """
        if self.is_inside:
            return trace()
        name = self._axis_name
        if name is None:
            try:
                return trace()
            except NameError as error:
                name = _compat.unbound_axis(error)
                if name is None or mapped_axes():
                    raise
        if name in _compat.bound_axes():
            return trace()
        with _compat.bind_axis(name, world.size()), telling_of_unbound_axes():
            return trace()

    def lower(self, program: Any) -> Any:
        """``program`` with our collectives."""
        if self.is_inside:
            return program
        scope = make_scope(self._axis_name, {}, _compat.free_axes(program))
        check_name_is_met(program, scope)
        rewriter = _rewriter(scope, self._options, world.rank(), world.size())
        if not rewriter.has_collectives(program):
            return program
        with _compat.intercept(self._inside):
            return rewriter.rewrite(program)

    def map(self, function: Callable[..., Any], *shards: Any) -> Any:
        """Call a function that is mapped over a mesh, with our collectives if the mesh is this worker's own."""
        if self.is_inside:
            return function(*shards)
        scope = make_scope(self._axis_name, mapped_axes())
        if not (scope.in_mesh or scope.unclear):
            with telling_of_unbound_axes():
                return function(*shards)
        results: list[Any] = []

        def of_arrays(*arrays: Any) -> list[Any]:
            result = function(*arrays)
            results.append(_compat.with_values(result, [None] * len(result)))
            return list(result)

        program, operands, _ = self._trace(of_arrays, shards, scope)
        return _compat.with_values(results[0], self._run(program, scope, operands))

    def run(self, function: Callable[..., Any], arguments: Sequence[Any], name: str) -> Any:
        """The results of a function, called ``name``, with our collectives in the trace of the caller."""
        sizes = mapped_axes()
        check_axis_is_not_of_vmap(self._axis_name)
        program, operands, as_results = self._trace(function, arguments, make_scope(self._axis_name, sizes))
        free = [axis for axis in _compat.free_axes(program) if axis not in _compat.bound_axes()]
        scope = make_scope(self._axis_name, sizes, free)
        check_name_is_met(program, scope)
        if scope.worker_axis is not None and scope.in_mesh and world.size() > 1:
            _watch.watch(scope.worker_axis)
        if jax.process_count() == 1 < world.size() and not _has_any_collective(program):
            warn_once(f"offload: there is no collective in {name}, so each worker runs it by itself")
        return as_results(self._run(program, scope, operands))

    def _trace(self, function: Callable[..., Any], arguments: Sequence[Any], scope: Scope) -> Any:
        with _compat.intercept(self._inside if scope.in_mesh else self), telling_of_unbound_axes():
            return trace(function, arguments, scope.axis_env if scope.in_mesh else ())

    def _run(self, program: Any, scope: Scope, arrays: Sequence[Any]) -> list[Any]:
        rewriter = _rewriter(scope, self._options, world.rank(), world.size())
        name = jax.named_scope(_OWN_MESH) if scope.in_mesh else contextlib.nullcontext()
        with _compat.intercept(self._inside), name:
            return rewriter.evaluate(program, program.consts, arrays)

    def call(self, compiled: Any) -> None:
        """Tell of JAX's collectives in a program that was compiled ahead of time, before offload saw it."""
        if self.is_inside or compiled in _seen or world.size() == 1:
            return
        found = _compiled_collective(compiled.as_text() or "")
        if found is not None and jax.process_count() == 1:
            raise ConfigError(
                f"offload: {found} would stay inside this worker, because the program was compiled ahead of time, "
                "outside of offload; compile it in the block"
            )
        if found is not None:
            warn_once(f"offload leaves {found} to JAX: the program was compiled ahead of time, outside of offload")
        _seen.add(compiled)


# Compiled programs without a collective that offload should have replaced.
_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def _compiled_collective(text: str) -> str | None:
    """``psum of train_step`` in XLA's text of a program; None if it has no collective of jax.lax, or has ours."""
    if 'custom_call_target="jaxhetero' in text:
        return None
    for line in text.splitlines():
        if re.search(r" (all-\w+|reduce-scatter|collective-\w+)[\w-]*\(", line):
            made_of = re.search(r'op_name="(?:[^"]*/)?(\w+)"', line)
            if made_of is None or made_of[1] in _compat.COLLECTIVES:  # else XLA has put it in, for a sharding
                program = re.match(r"HloModule (?:jit_)?([^,\s]*)", text)
                return f"{made_of[1] if made_of else 'a collective'} of {program[1] if program else 'a function'}"
    return None


@functools.cache
def interceptor(axis_name: str | None, options: Options, _rank: int, _size: int) -> Interceptor:
    """The one of these arguments, in a job of this size."""
    return Interceptor(axis_name, options)


@functools.cache
def _rewriter(scope: Scope, options: Options, _rank: int, _size: int) -> Rewriter:
    return Rewriter(scope, options)


_OWN_MESH = "jaxhetero.own_mesh"  # of all that is traced in a worker's own mesh


class _Watch:
    """Looks at what is lowered outside of offload, for sums over a worker's own mesh that were put into it later.

    JAX does so when a mapped function is differentiated as a whole, for the gradients of what all its devices share.
    """

    def __init__(self) -> None:
        self._axes: set[str] = set()

    def watch(self, axis: str) -> None:
        """Look at meshes that have this axis, from now on."""
        self._axes.add(axis)
        _compat.intercept_otherwise(self)

    def trace(self, trace: Callable[[], Any]) -> Any:
        return trace()

    def map(self, function: Callable[..., Any], *shards: Any) -> Any:
        return function(*shards)

    def call(self, compiled: Any) -> None:
        pass

    def lower(self, program: Any) -> Any:
        """``program`` as it is, or a ``ConfigError``."""
        for equation in program.eqns:
            axes = self._axes.intersection(_compat.mesh_axes(equation))
            for inner in _compat.inner_programs(equation.params):
                if axes and any(_compat.is_within(own, _OWN_MESH) for own in inner.eqns):
                    check_has_no_sums(equation, axes)
                self.lower(inner)
        return program


_watch = _Watch()


def check_axis_is_not_of_vmap(name: str | None) -> None:
    """``ConfigError`` if the axis that was named is one whose values are all on this device."""
    if name in _compat.bound_axes() and name not in mapped_axes() and not _compat.is_bound_here(str(name)):
        raise ConfigError(
            f"offload: axis_name is {name!r}, an axis of jax.vmap, whose values are all in this worker; give the axis "
            "that goes over all workers another name"
        )


def check_name_is_met(program: Any, scope: Scope) -> None:
    """``ConfigError`` if a name was given, and the collectives of ``program`` all go over other axes of meshes."""
    name = scope.axis_name
    if name is None or name in mapped_axes() or world.size() == 1:
        return
    axes = {axis for axes in _axes_of_calls(program, name) for axis in axes}
    if axes and name not in axes:
        raise ConfigError(
            f"offload: axis_name is {name!r}, and no collective goes over that axis; the axes that were seen are "
            f"{listed(axes)}; give the one that goes over all workers"
        )


def _axes_of_calls(program: Any, name: str) -> Iterator[tuple[str, ...]]:
    """Of each collective, but for those in a mesh that has ``name``: there, others are over a worker's own devices."""
    for equation in program.eqns:
        call = as_call(equation)
        if call is not None:
            yield tuple(axis for axis in call.axes if isinstance(axis, str))
        if name not in _compat.mesh_axes(equation):
            for inner in _compat.inner_programs(equation.params):
                yield from _axes_of_calls(inner, name)


def _has_any_collective(program: Any) -> bool:
    """Whether there is one of JAX's or one of ours, which a function inside may have put in."""
    return any(
        equation.primitive.name in _compat.COLLECTIVES
        or equation.primitive.name.startswith("jaxhetero")
        or any(map(_has_any_collective, _compat.inner_programs(equation.params)))
        for equation in program.eqns
    )


@contextlib.contextmanager
def telling_of_unbound_axes() -> Iterator[None]:
    """``ConfigError`` in the place of JAX's error about an axis that nothing maps."""
    try:
        yield
    except NameError as error:
        name = _compat.unbound_axis(error)
        if name is None:
            raise
        seen = f"the axes that are mapped are {listed(_compat.bound_axes())}; " if _compat.bound_axes() else ""
        raise ConfigError(
            f"offload: nothing maps axis {name!r}; {seen}give offload the argument axis_name, the axis that goes over "
            "all workers"
        ) from error
