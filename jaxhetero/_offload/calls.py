"""JAX's collectives in a traced program, and what takes the place of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxhetero import _compat
from jaxhetero._collectives import api, exchanges
from jaxhetero._collectives.index_groups import classify_in_groups
from jaxhetero._job import world
from jaxhetero._offload.scope import Scope
from jaxhetero.errors import ConfigError
from jaxhetero.watching.native_log import logger

# By the names of JAX's primitives. "psum_invariant" is lax.psum in typed shard_map, also where JAX itself sums the
# gradients of replicated parameters.
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "psum": api.psum,
    "psum_invariant": api.psum,
    "unreduced_psum": api.psum,
    "pmax": api.pmax,
    "pmin": api.pmin,
}
_GATHERS = {"all_gather": "varying", "all_gather_invariant": "invarying"}
_SCATTERS = {"reduce_scatter", "unreduced_reduce_scatter"}
_INDEX = "axis_index"
_SCOPE = "jaxhetero.offload"  # of all that is put in
# The same over axes of an array, for those axes of a collective that jax.vmap has named. JAX gives their positions.
_OF_ARRAYS: dict[Callable[..., Any], Callable[..., Any]] = {
    api.psum: jax.lax.reduce_sum,
    api.pmax: jax.lax.reduce_max,
    api.pmin: jax.lax.reduce_min,
}
# What XLA compiles to a kernel of its own, or applies to pairs of numbers.
_KERNELS = {"pallas_call", "core_map", "mpmd_map", "cudnn_fusion"}
_OF_NUMBERS = {"reduce", "reduce_window"}
_PERMUTE = "ppermute"
_ALL_TO_ALL = "all_to_all"
_REPLACED = {*_REDUCTIONS, *_GATHERS, *_SCATTERS, _PERMUTE, _ALL_TO_ALL, _INDEX}


@dataclass(frozen=True)
class Options:
    """How the collectives are made that are put in; see ``jaxhetero.psum``."""

    bucket_bytes: int
    wire_dtype: Any


@dataclass(frozen=True)
class CollectiveCall:
    """One equation of a program that is a collective."""

    equation: _compat.Equation
    axes: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The name of JAX's primitive."""
        return str(self.equation.primitive.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the axes that are axes of a mesh, by their names."""
        return tuple(axis for axis in self.axes if isinstance(axis, str))

    @property
    def positions(self) -> tuple[int, ...]:
        """Those of the axes that are axes of the operand."""
        return tuple(axis for axis in self.axes if isinstance(axis, int))

    @property
    def label(self) -> str:
        """``psum at train.py:train_step``: the name of the op in messages."""
        name = self.name.removesuffix("_invariant").removeprefix("unreduced_")
        return f"{name} at {_compat.equation_source(self.equation)}"

    def may_share_buckets(self, other: CollectiveCall) -> bool:
        """Whether the two differ in their operands alone."""
        one, two = self.equation, other.equation
        return self.name == other.name and one.params == two.params and one.ctx == two.ctx


def as_call(equation: _compat.Equation) -> CollectiveCall | None:
    """The collective that an equation is; None if it is none, or part of one of ours, inside a worker."""
    if equation.primitive.name not in _compat.COLLECTIVES or _compat.is_of_our_collectives(equation, _SCOPE):
        return None
    axes = equation.params["axes" if "axes" in equation.params else "axis_name"]
    return CollectiveCall(equation, tuple(axes) if isinstance(axes, (tuple, list)) else (axes,))


def is_replaced(call: CollectiveCall, scope: Scope) -> bool:
    """Whether something of ours takes the place of a collective.

    Where something should and cannot, a collective in a global mesh stays JAX's, with a warning. In other programs
    JAX would run it inside this worker alone, which is an error.
    """
    if not scope.spans_workers(call.axes, call.label) or (call.name == _INDEX and scope.worker_axis is None):
        if scope.is_without_workers():
            warn_once(
                f"offload leaves {call.label} to JAX: no axis of the mesh has a multiple of {world.size()} devices"
            )
        return False
    obstacle = _obstacle(call, scope)
    if obstacle is not None and scope.worker_axis is None:
        warn_once(f"offload leaves {call.label} to JAX: {obstacle}")
        return False
    if obstacle is not None:
        raise ConfigError(
            f"offload: {call.label} goes over {scope.worker_axis!r}, the axis of all workers, and cannot: {obstacle}"
        )
    return True


def _obstacle(call: CollectiveCall, scope: Scope) -> str | None:
    if call.name not in _REPLACED:
        return f"jaxhetero has no {call.name}"
    if call.positions and call.name not in _REDUCTIONS:
        return f"its axes {call.axes} have positions among them; name mesh axes alone"
    if call.name in _GATHERS.keys() | _SCATTERS | {_ALL_TO_ALL} and scope.worker_axis not in (None, call.axes[0]):
        return f"the order of its result needs {scope.worker_axis!r} as the first of {call.axes}"
    is_mixed = scope.worker_axis is not None and len(call.axes) > 1
    if call.name == _PERMUTE and (is_mixed or not exchanges.is_in_mesh_order(call.names)):
        return f"it goes over several axes, {call.axes}, or not in the order of the mesh"
    groups = call.equation.params.get("axis_index_groups")
    return _obstacle_of_groups(call, groups, scope) if groups and call.name != _ALL_TO_ALL else None


def _obstacle_of_groups(call: CollectiveCall, groups: Sequence[Sequence[int]], scope: Scope) -> str | None:
    try:
        classify_in_groups(scope.mesh_axes(call.names), groups, "here", of_one_size=call.name not in _REDUCTIONS)
    except ConfigError as error:
        return str(error)
    return None


def obstacle_inside(equation: _compat.Equation) -> str | None:
    """Why an equation cannot have a collective of ours inside; None if it may."""
    name = equation.primitive.name
    if name in _KERNELS:
        return "it is a kernel"
    if name in _OF_NUMBERS or name.startswith("scatter"):
        return "it is a function of single numbers"
    return None


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, each text once in a process."""
    logger.warning(message)


@jax.named_scope(_SCOPE)
def run(
    calls: Sequence[CollectiveCall], operands: Sequence[jax.Array], scope: Scope, options: Options
) -> list[jax.Array]:
    """The results of all calls, which share buckets, from the operands of all."""
    call = calls[0]
    if call.name == _INDEX:
        return [scope.own_index()] * len(calls)
    params = call.equation.params
    arguments: dict[str, Any] = {
        "axis_name": scope.mesh_axes(call.names),
        "bucket_bytes": options.bucket_bytes,
        "name": call.label if len(calls) == 1 else f"{call.label} and {len(calls) - 1} more",
    }
    if call.name != _PERMUTE:
        arguments["axis_index_groups"] = params.get("axis_index_groups")
    if call.positions:
        reduce = _OF_ARRAYS[_REDUCTIONS[call.name]]
        operands = [reduce(operand, call.positions) for operand in operands]
    # Buckets are filled from the last leaf to the first, because gradients come in that order. These come in order.
    tree = list(reversed(operands))
    if call.name in _REDUCTIONS:
        if _REDUCTIONS[call.name] is api.psum:
            arguments["wire_dtype"] = options.wire_dtype
        results = _REDUCTIONS[call.name](tree, **arguments)
    elif call.name in _SCATTERS:
        results = api.psum_scatter(
            tree, scatter_dimension=params["scatter_dimension"], tiled=params["tiled"], **arguments
        )
    elif call.name == _PERMUTE:
        results = exchanges.ppermute(tree, perm=params["perm"], **arguments)
    elif call.name == _ALL_TO_ALL:  # JAX makes the new axis of one that is not tiled before and after the primitive
        axes = {"split_axis": params["split_axis"], "concat_axis": params["concat_axis"]}
        results = exchanges.all_to_all(tree, tiled=True, **axes, **arguments)
    else:
        results = api.all_gather(
            tree, axis=params["all_gather_dimension"], tiled=params["tiled"], to=_GATHERS[call.name], **arguments
        )
    return list(reversed(results))
