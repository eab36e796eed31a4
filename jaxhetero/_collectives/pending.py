"""Sums that outlive the program that starts them: a later one takes the totals, layer by layer as it needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero._collectives.axis_groups import AxisGroups
from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES, make_buckets
from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.labels import op_label
from jaxhetero._collectives.mesh_axes import AxisName, ReducedAxes, classify
from jaxhetero._collectives.pending_primitives import PendingSum
from jaxhetero._collectives.reduce_tree import (
    from_parts,
    make_varying,
    own_part,
    prepare_leaves,
    reduce_locally,
)
from jaxhetero._collectives.refuse_invariant import refuse_invariant
from jaxhetero._collectives.unreduced import has_unreduced
from jaxhetero._collectives.wire_dtypes import bucket_dtype, check_wire_dtype, primitive_wire_dtype, wire_bytes
from jaxhetero._job import world
from jaxhetero.errors import ConfigError

# The shape and the dtype of an array.
_Types = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class _Form:
    """What is static of a sum."""

    label: str
    structure: Any
    leaves: _Types
    parts: _Types  # what of each leaf one device sends and gets
    buckets: tuple[tuple[int, ...], ...]
    calls: tuple[PendingSum, ...]  # one for each bucket
    axis_name: AxisName
    axes: ReducedAxes
    mean: bool


@jax.tree_util.register_pytree_node_class
class Pending:
    """A sum on its way, which ``psum_start`` gives and ``psum_done`` takes: a pytree of one small array a bucket.

    It goes through ``jax.jit``, donation and the carry of ``jax.lax.scan``. Under ``jax.shard_map`` its arrays vary
    over every axis of the mesh: leave and enter with ``P(mesh.axis_names)``. The arrays only name the rounds. So each
    sum is finished once, by the process that started it, and a checkpoint cannot have one.

    Example:
      >>> pending = jaxhetero.psum_start({"w": jnp.ones(2)})
      >>> isinstance(pending, jaxhetero.Pending)
      True
      >>> jaxhetero.psum_done(pending)
      {'w': Array([1., 1.], dtype=float32)}
    """

    def __init__(self, arrays: Sequence[jax.Array], form: _Form) -> None:
        self._arrays = tuple(arrays)
        self._form = form

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], _Form]:
        """For JAX: its arrays, and what is static."""
        return self._arrays, self._form

    @classmethod
    def tree_unflatten(cls, form: _Form, arrays: Sequence[jax.Array]) -> Pending:
        """The inverse of ``tree_flatten``."""
        return cls(arrays, form)

    def __repr__(self) -> str:
        return f"Pending({self._form.label!r}, {len(self._form.leaves)} leaves in {len(self._form.buckets)} buckets)"


def psum_start(
    x: Any,
    axis_name: AxisName = None,
    *,
    mean: bool = False,
    priority: Any = 0,
    workers: Sequence[int] | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Pending:
    """Start a sum over all workers, which ``psum_done`` finishes, in the same program or in a later one.

    The rounds go on while the program ends and the next one begins. So they run under the forward pass of the next step
    as well as under the backward pass of this one. What ``psum`` gives, ``psum_done`` gives, bit by bit.

    Args:
      x, axis_name, workers, wire_dtype, bucket_bytes, name: as in ``psum``.
      mean: ``True`` makes the results the mean over the workers, as ``pmean``, ``False`` the sum.
      priority: of all rounds that run, a worker pushes chunks of those with the lowest number first. An int, or a
        pytree of ints as a prefix of ``x``, of which a bucket has the least; the same on all workers. The rounds of
        other collectives have 0.

    Returns:
      What ``psum_done`` takes. Each must be finished once, before ``jaxhetero.shutdown()``.

    Does not block. A bucket's memory is the program's again once it is copied.

    Raises:
      NotInitializedError, ConfigError: as ``psum``. Also in elastic jobs, for arrays of type "unreduced" outside
        ``jax.shard_map``, under ``jax.vmap``, and for values that are being differentiated.
      jax.errors.JaxRuntimeError: as in ``psum``; but what happens to a round after its start, ``psum_done`` raises.

    Example:
      The gradients of one step are applied in the next one. Train steps like these are made by
      ``jaxhetero.optimizers.across_steps``:

      >>> @jax.jit
      ... def step(params, pending, batch):
      ...     grads = jaxhetero.psum_done(pending)
      ...     params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
      ...     grads = jax.grad(lambda w: jnp.sum((batch @ w) ** 2))(params)
      ...     return params, jaxhetero.psum_start(grads, mean=True)
      >>> params = jnp.ones(2)
      >>> pending = jaxhetero.psum_start(jnp.zeros(2), mean=True)
      >>> params, pending = step(params, pending, jnp.array([[1.0, 2.0]]))
      >>> jaxhetero.psum_done(pending)
      Array([ 6., 12.], dtype=float32)
    """
    label = op_label("psum_start", name)
    world.refuse_elastic(label)
    options = {"mean": mean, "priority": priority, "workers": workers, "wire_dtype": wire_dtype}
    form, sent = _prepare(x, axis_name, label, bucket_bytes=bucket_bytes, **options)
    if not form.axes.spans_workers:
        return Pending(sent, form)
    buckets = ([sent[index] for index in bucket] for bucket in form.buckets)
    return Pending([call.start(bucket) for call, bucket in zip(form.calls, buckets, strict=True)], form)


def psum_done(pending: Pending) -> Any:
    """Finish a sum that ``psum_start`` has started.

    Of several buckets, each is there on its own: what is computed of one does not wait for the others.

    Args:
      pending: what ``psum_start`` gave, in the same process.

    Returns:
      The sum, or the mean, as a pytree like ``x`` of ``psum_start``.

    Does not block: the caller waits when it looks at the result. A total that came before is copied.

    Raises:
      NotInitializedError: before ``jaxhetero.initialize()``.
      ConfigError: ``pending`` is something else, or was started over other mesh axes.
      jax.errors.JaxRuntimeError: when the program runs and a peer has failed since the start; and for a sum that has
        been finished before, or that another process has started, such as one from a checkpoint.

    Example:
      >>> pending = jaxhetero.psum_start(jnp.arange(3.0), mean=True)
      >>> jaxhetero.psum_done(pending)
      Array([0., 1., 2.], dtype=float32)
    """
    if not isinstance(pending, Pending):
        raise ConfigError(f"psum_done: got {type(pending).__name__}; it takes what jaxhetero.psum_start gives")
    form = pending._form
    _check_axes(form)
    if form.axes.spans_workers:
        results: dict[int, jax.Array] = {}
        for call, bucket, ticket in zip(form.calls, form.buckets, pending._arrays, strict=True):
            results.update(zip(bucket, call.done(ticket), strict=True))
        parts = [results[index].astype(part.dtype) for index, part in enumerate(form.parts)]
    else:
        parts = list(pending._arrays)
    leaves = [_whole(part, leaf, form.axes) for part, leaf in zip(parts, form.leaves, strict=True)]
    if form.mean:
        with jax.transfer_guard("allow"):  # for the count
            leaves = [leaf / form.axes.count for leaf in leaves]
    return jax.tree.unflatten(form.structure, leaves)


def _prepare(
    x: Any,
    axis_name: AxisName,
    label: str,
    *,
    mean: bool,
    priority: Any,
    workers: Sequence[int] | None,
    wire_dtype: Any,
    bucket_bytes: int,
) -> tuple[_Form, list[jax.Array]]:
    """What is static of a sum, and what this device sends of each leaf."""
    if has_unreduced(x):
        raise ConfigError(f"{label}: a leaf is of type unreduced; use psum_start inside jax.shard_map")
    axes = classify(axis_name, label, workers)
    refuse_invariant(x, axis_name, label, mean=mean)
    check_wire_dtype(wire_dtype, label)
    integers = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32) if _is_bool(leaf) else leaf, x)
    leaves, structure = prepare_leaves(integers, label, bucket_bytes)
    parts = [_part(leaf, axes) for leaf in leaves]
    sent = [part.astype(bucket_dtype(part.dtype, wire_dtype)) for part in parts] if axes.spans_workers else parts
    if axes.worker_axis is not None:
        sent = [make_varying(part, axes) for part in sent]
    made = make_buckets(sent, bucket_bytes, wire_dtype) if axes.spans_workers else []
    priorities = priorities_of(priority, x, label)
    # Those that are needed first come first, also among the tickets that a program is given: XLA's CPU runtime orders
    # instructions by what they take, and has later ones wait for what has had their memory before.
    buckets = tuple(sorted(map(tuple, made), key=lambda bucket: min(priorities[index] for index in bucket)))
    call_bytes = wire_bytes(leaves, wire_dtype) // axes.devices_per_worker
    calls = tuple(
        PendingSum(
            label=f"{label} bucket {number}",
            worker_count=world.size(),
            axis_name=axes.worker_axis,
            devices_along=axes.devices_along,
            call_bytes=call_bytes,
            group=axes.group,
            wire_dtype=primitive_wire_dtype(sent[bucket[0]].dtype, wire_dtype),
            priority=min(priorities[index] for index in bucket),
            bucket=tuple((sent[index].shape, str(sent[index].dtype)) for index in bucket),
        )
        for number, bucket in enumerate(buckets)
    )
    return _Form(label, structure, _types(leaves), _types(parts), buckets, calls, axis_name, axes, mean), sent


def _part(leaf: jax.Array, axes: ReducedAxes) -> jax.Array:
    """What of ``leaf`` this device sends, after the sums inside its worker."""
    is_shared = axes.spans_workers and axes.local_count > 1
    part = own_part(leaf, axes, Kind.SUM) if is_shared else reduce_locally(leaf, axes.local_axes, Kind.SUM)
    return _along(axes).own_part(part, Kind.SUM) if axes.devices_along > 1 else part


def _whole(part: jax.Array, leaf: jax.ShapeDtypeStruct, axes: ReducedAxes) -> jax.Array:
    """The inverse: what the devices of a worker have got, together."""
    is_shared = axes.spans_workers and axes.local_count > 1
    if axes.devices_along > 1:
        shape = (-(-leaf.size // axes.local_count),) if is_shared else leaf.shape
        part = _along(axes).join_parts(part, jnp.zeros(shape, part.dtype))
    return from_parts(part, leaf, axes) if is_shared else part


def _along(axes: ReducedAxes) -> AxisGroups:
    assert axes.worker_axis is not None, "devices lie along the axis of the workers"
    return AxisGroups(axes.worker_axis, axes.devices_along)


def _check_axes(form: _Form) -> None:
    """``ConfigError`` if this is not where the sum can be finished."""
    world.current()
    try:
        here = classify(form.axis_name, form.label, form.axes.group or None)
    except NameError:
        here = None
    if here != form.axes:
        raise ConfigError(
            f"{form.label}: it was started over axis_name={form.axis_name!r} under jax.shard_map; finish it under "
            "jax.shard_map over the same mesh"
        )


def priorities_of(priority: Any, x: Any, label: str) -> list[int]:
    """That of each leaf of ``x``."""
    try:
        of_leaves = jax.tree.map(lambda number, part: [int(number)] * len(jax.tree.leaves(part)), priority, x)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{label}: priority is {priority!r}; it must be an int, or a pytree of ints that is a prefix of x"
        ) from error
    return list(jax.tree.leaves(of_leaves))


def _types(arrays: Sequence[jax.Array]) -> _Types:
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)


def _is_bool(leaf: Any) -> bool:
    return bool(jnp.result_type(leaf) == jnp.bool_)
