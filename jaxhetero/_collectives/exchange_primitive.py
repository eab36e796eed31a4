"""The primitives of ``ppermute`` and ``all_to_all``: one bucket in, one bucket out, nothing added.

Where each worker has one device along the axes and arrays lie on the host, they go from worker to worker, over
channels. Elsewhere each device gathers what all have, through the reducers, and selects its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxhetero._collectives import rules
from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES
from jaxhetero._collectives.index_groups import Groups
from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.mesh_axes import ReducedAxes
from jaxhetero._collectives.primitive import CallAttributes, attributes_of
from jaxhetero._collectives.reduce_tree import gather_arrays
from jaxhetero._collectives.wire_dtypes import describe_leaf, wire_bytes
from jaxhetero._compat import operation_name, register_lowering
from jaxhetero._job import ffi
from jaxhetero.config import cuda_stand_in

_PERMUTE = Primitive("jaxhetero_ppermute")
_ALL_TO_ALL = Primitive("jaxhetero_all_to_all")


@dataclass(frozen=True)
class ExchangeAttributes(CallAttributes):
    """The attributes of the FFI call; xla_ffi/ffi/exchange_handler.h declares those that other calls lack."""

    shapes: str
    ranks: np.ndarray
    group_size: np.int64


def permute(bucket: Sequence[jax.Array], *, label: str, axes: ReducedAxes, sources: tuple[int, ...]) -> list[jax.Array]:
    """For each place, what the place ``sources[place]`` has; zeros where that is -1.

    Args:
      bucket: arrays.
      label: the name of this op in messages and traces.
      axes: those whose devices have a place each.
      sources: the source of each place.
    """
    return _bind(_PERMUTE, bucket, label=label, axes=axes, groups=(sources,))


def all_to_all(bucket: Sequence[jax.Array], *, label: str, axes: ReducedAxes, groups: Groups) -> list[jax.Array]:
    """At the place of number ``i`` in its group, the rows ``i`` of all of its group's arrays, in the group's order.

    Args:
      bucket: arrays with a first axis as long as each group.
      label, axes: as in ``permute``.
      groups: the places of each.
    """
    return _bind(_ALL_TO_ALL, bucket, label=label, axes=axes, groups=groups)


def _bind(primitive: Primitive, bucket: Sequence[jax.Array], *, label: str, **params: Any) -> list[jax.Array]:
    with jax.named_scope(f"{label}, {wire_bytes(bucket, '')} bytes"):
        outputs: list[jax.Array] = primitive.bind(*bucket, label=label, **params)
    return outputs


# The source of a place is given in the one group of a permutation.
Select = Callable[[jax.Array, Any, Groups], jax.Array]


def _select_source(stack: jax.Array, own: Any, groups: Groups) -> jax.Array:
    source = jnp.array(groups[0])[own]
    return jnp.where(source < 0, jnp.zeros_like(stack[0]), stack[source])


def _select_rows(stack: jax.Array, own: Any, groups: Groups) -> jax.Array:
    members = np.zeros((stack.shape[0], len(groups[0])), np.int32)
    numbers = np.zeros(stack.shape[0], np.int32)
    for group in groups:
        members[list(group)] = group
        numbers[list(group)] = range(len(group))
    rows: jax.Array = stack[jnp.array(members)[own], jnp.array(numbers)[own]]
    return rows


def _gather_and_select(
    *bucket: jax.Array, select: Select, label: str, axes: ReducedAxes, groups: Groups
) -> list[jax.Array]:
    own = _own_place(axes)
    stacks = gather_arrays(bucket, axes, label=label, bucket_bytes=DEFAULT_BUCKET_BYTES, to="varying")
    return [select(stack, own, groups) for stack in stacks]


def _own_place(axes: ReducedAxes) -> Any:
    """The place of this device among those of ``axes``."""
    if axes.worker_axis is None:
        first = rules.own_rank() * axes.local_count
        return first + jax.lax.axis_index(axes.local_axes) if axes.local_axes else first
    names = list(axes.local_axes)
    names.insert(axes.worker_position, axes.worker_axis)
    return jax.lax.axis_index(tuple(names))


def _lower_to_channels(ctx: Any, *bucket: Any, name: str, label: str, axes: ReducedAxes, groups: Groups) -> Any:
    size_bytes = wire_bytes(ctx.avals_in, "")
    attributes = attributes_of(
        ctx,
        label=label,
        kind=Kind.GATHER,  # which needs the workers in the order of their ranks as well
        root=0,
        worker_count=axes.count,
        axis_name=axes.worker_axis,
        devices_along=1,
        in_groups=False,
        wire_dtype="",
        call_bytes=size_bytes,
        group=(),
    )
    of_exchange = ExchangeAttributes(
        **vars(attributes),
        shapes=", ".join(map(describe_leaf, ctx.avals_in)),
        ranks=np.array(groups, np.int64).reshape(-1),
        group_size=np.int64(0 if name == _PERMUTE.name else len(groups[0])),
    )
    # XLA must keep the call of a worker that does not use the result: the other workers wait for what it sends.
    rule = jax.ffi.ffi_lowering(ffi.EXCHANGE, has_side_effect=True)
    with operation_name(ctx, f"{name}_{size_bytes}_bytes"):
        return rule(ctx, *bucket, **vars(of_exchange))


def _define(primitive: Primitive, batch_axis: int, inverse: Callable[[Groups], Groups], select: Select) -> None:
    """Tell JAX of a primitive.

    Args:
      primitive: ``_PERMUTE`` or ``_ALL_TO_ALL``.
      batch_axis: where an axis of ``vmap`` may be.
      inverse: from the groups of the primitive to those of its transpose.
      select: what one place has of what all have.
    """
    lower_to_gather = mlir.lower_fun(functools.partial(_gather_and_select, select=select), multiple_results=True)

    def types(*bucket: Any, **_: Any) -> list[Any]:
        return [aval.update(weak_type=False) for aval in bucket]

    def apply(bucket: Sequence[jax.Array], **params: Any) -> list[jax.Array]:
        return _bind(primitive, bucket, **params)

    def batch(bucket: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[Any]]:
        arrays = [x if dim is None else jnp.moveaxis(x, dim, batch_axis) for x, dim in zip(bucket, dims, strict=True)]
        return apply(arrays, **params), [None if dim is None else batch_axis for dim in dims]

    def transpose(cotangents: Sequence[Any], *bucket: Any, groups: Groups, **params: Any) -> list[Any]:
        back = {**params, "groups": inverse(groups)}
        return rules.map_nonzero(apply, cotangents, rules.zero_cotangents(bucket), back, "cotangents")

    def lower(ctx: Any, *bucket: Any, axes: ReducedAxes, **params: Any) -> Any:
        if axes.devices_per_worker > 1 or cuda_stand_in():
            return lower_to_gather(ctx, *bucket, axes=axes, **params)
        return _lower_to_channels(ctx, *bucket, name=primitive.name, axes=axes, **params)

    rules.define(primitive, types, batch)
    rules.define_linear(primitive, apply, transpose)
    register_lowering(primitive, lower)
    register_lowering(primitive, lower_to_gather, platform="cuda")


def _inverse_permutation(groups: Groups) -> Groups:
    (sources,) = groups
    targets = {source: place for place, source in enumerate(sources)}
    return (tuple(targets.get(place, -1) for place in range(len(sources))),)


_define(_PERMUTE, 0, _inverse_permutation, _select_source)
_define(_ALL_TO_ALL, 1, lambda groups: groups, _select_rows)
