"""How a pytree is reduced: inside each worker by XLA, in buckets over the workers, inside each worker again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero._collectives import gather_primitives, primitive
from jaxhetero._collectives.axis_groups import extreme
from jaxhetero._collectives.buckets import make_buckets
from jaxhetero._collectives.mesh_axes import ReducedAxes
from jaxhetero._collectives.participants import Tally
from jaxhetero._collectives.primitive import Kind
from jaxhetero._collectives.quanta import QUANTA, quanta_of, sum_in_quanta
from jaxhetero._collectives.together import together
from jaxhetero._collectives.unreduced import as_varying
from jaxhetero._collectives.wire_dtypes import (
    bucket_dtype,
    check_dtype,
    check_wire_dtype,
    describe_leaf,
    primitive_wire_dtype,
    wire_bytes,
)
from jaxhetero._compat import partly_reduced_axes, unreduced_axes, varying_axes
from jaxhetero._job import world
from jaxhetero.errors import ConfigError


def reduce_tree(
    x: Any,
    axes: ReducedAxes,
    kind: Kind,
    *,
    label: str,
    bucket_bytes: int,
    root: int = 0,
    wire_dtype: Any = None,
    call_bytes: int = 0,
    tally: Tally | None = None,
    quanta_are_means: bool = False,
) -> Any:
    """Reduce every leaf of ``x``; each device of a worker sends its part. See ``collectives.psum``.

    ``call_bytes``: if ``x`` is a part of a larger tree, the bytes of the whole tree on the wire.
    ``tally``: of a sum, counts who has taken part in each bucket.
    ``quanta_are_means``: what goes over the wire in 8 or 4 bits is the mean over the workers, not the sum.
    """
    leaves, structure = prepare_leaves(x, label, bucket_bytes, are_summed=kind is not Kind.BROADCAST)
    check_wire_dtype(wire_dtype, label, tuple(QUANTA))
    call_bytes = max(call_bytes, wire_bytes(leaves, wire_dtype)) // axes.devices_per_worker
    quanta = quanta_of(wire_dtype)
    if quanta is not None:
        wire_dtype = None
        _check_quanta(axes, tally, label)
    if not axes.spans_workers:
        totals = [reduce_locally(leaf, axes.local_axes, kind, axes.local_groups) for leaf in leaves]
        if tally is not None:
            buckets = make_buckets(leaves)
            totals = tally.count(totals, [tally.own_row(leaves[bucket[0]].dtype) for bucket in buckets], buckets, None)
        return jax.tree.unflatten(structure, totals)
    shared = axes.local_count > 1
    parts = [own_part(leaf, axes, kind) if shared else reduce_locally(leaf, axes.local_axes, kind) for leaf in leaves]
    on_wire = [part.astype(bucket_dtype(part.dtype, wire_dtype)) for part in parts]

    def reduce_bucket(bucket: Sequence[jax.Array], label: str, kind: Kind = kind) -> list[jax.Array]:
        own = [] if tally is None else [_varying(tally.own_row(bucket[0].dtype), axes.local_axes if shared else ())]
        return primitive.all_reduce(
            [*bucket, *own],
            label=label,
            kind=kind,
            root=root,
            worker_count=world.capacity(),
            axis_name=axes.worker_axis,
            devices_along=axes.devices_along,
            wire_dtype=primitive_wire_dtype(bucket[0].dtype, wire_dtype),
            call_bytes=call_bytes,
            group=axes.group,
        )

    def reduce_arrays(arrays: Sequence[jax.Array], kind: Kind, label: str) -> list[jax.Array]:
        return map_buckets(functools.partial(reduce_bucket, kind=kind), arrays, axes, label, bucket_bytes, wire_dtype)

    if quanta is None:
        results = reduce_arrays(on_wire, kind, label)
    else:
        workers = len(axes.group) or world.capacity()
        results = sum_in_quanta(on_wire, quanta, reduce_arrays, label, workers, are_means=quanta_are_means)
    results, rows = results[: len(parts)], results[len(parts) :]
    results = [result.astype(part.dtype) for result, part in zip(results, parts, strict=True)]
    if tally is not None:
        results = tally.count(results, rows, make_buckets(on_wire, bucket_bytes, wire_dtype), axes if shared else None)
    if shared:
        results = [from_parts(result, leaf, axes) for result, leaf in zip(results, leaves, strict=True)]
    return jax.tree.unflatten(structure, results)


def _check_quanta(axes: ReducedAxes, tally: Tally | None, label: str) -> None:
    if world.is_elastic() or tally is not None:
        raise ConfigError(f"{label}: wire_dtype of 8 or 4 bits goes with neither elastic jobs, nor weight, nor who")
    if axes.devices_along > 1:
        raise ConfigError(
            f"{label}: wire_dtype of 8 or 4 bits is not for several devices of a worker along the workers' axis"
        )


def gather_arrays(
    arrays: Sequence[jax.Array], axes: ReducedAxes, *, label: str, bucket_bytes: int, to: str
) -> list[jax.Array]:
    """Each array of all workers and devices, stacked along a new first axis in the order of mesh or group."""
    if axes.local_groups:
        groups = axes.local_groups
        return [jax.lax.all_gather(array, axes.local_axes, axis_index_groups=groups, to=to) for array in arrays]
    call_bytes = (len(axes.group) or world.capacity()) * wire_bytes(arrays, None)

    def gather_bucket(bucket: Sequence[jax.Array], label: str) -> list[jax.Array]:
        return gather_primitives.all_gather(
            bucket,
            label=label,
            worker_count=world.capacity(),
            axis_name=axes.worker_axis,
            devices_along=axes.devices_along,
            call_bytes=call_bytes,
            group=axes.group,
            invariant=to == "invarying",
        )

    if axes.spans_workers:
        stacks = map_buckets(gather_bucket, arrays, axes, label, bucket_bytes)
    else:
        stacks = [array[None] for array in arrays]
    if axes.local_axes:
        stacks = [jax.lax.all_gather(stack, axes.local_axes, axis=0, to=to) for stack in stacks]
    else:
        stacks = [stack[None] for stack in stacks]
    rows = [_flatten_places(stack, axes) for stack in stacks]
    return [_reordered(stack, axes.order) for stack in rows] if axes.order else rows


def scatter_arrays(arrays: Sequence[jax.Array], axes: ReducedAxes, *, label: str, bucket_bytes: int) -> list[jax.Array]:
    """The sum of each array, whose first axis has a row for every device of mesh or group; each keeps its own."""
    if axes.local_groups:
        return [_scatter_locally(_varying(array, axes.local_axes), axes) for array in arrays]
    if axes.order:
        arrays = [_reordered(array, np.argsort(axes.order)) for array in arrays]
    rows = [_split_places(array, axes) for array in arrays]
    if axes.local_axes:
        rows = [_scatter_locally(_varying(row, axes.local_axes), axes) for row in rows]
    else:
        rows = [row[0] for row in rows]
    call_bytes = wire_bytes(rows, None) // axes.devices_along

    def scatter_bucket(bucket: Sequence[jax.Array], label: str) -> list[jax.Array]:
        return gather_primitives.psum_scatter(
            bucket,
            label=label,
            worker_count=world.capacity(),
            axis_name=axes.worker_axis,
            devices_along=axes.devices_along,
            call_bytes=call_bytes,
            group=axes.group,
        )

    if axes.spans_workers:
        return map_buckets(scatter_bucket, rows, axes, label, bucket_bytes)
    return [row[0] for row in rows]


def prepare_leaves(x: Any, label: str, bucket_bytes: int, *, are_summed: bool = True) -> tuple[list[jax.Array], Any]:
    """The leaves of ``x`` as arrays that can be sent, and the structure."""
    if bucket_bytes < 1:
        raise ConfigError(f"{label}: bucket_bytes is {bucket_bytes}; it must be at least 1")
    leaves, structure = jax.tree.flatten(x)
    for leaf in leaves:
        if are_summed:
            check_dtype(leaf, label)
        aval = jax.typeof(leaf)
        if axes := partly_reduced_axes(aval) - unreduced_axes(aval):
            raise ConfigError(
                f"{label}: a leaf is {describe_leaf(leaf)} of type reduced, or unreduced but not to be summed, over "
                f"{', '.join(sorted(axes))}; these types are not supported; make it vary, by jax.lax.pcast(x, axes, "
                "to='varying')"
            )
    return [as_varying(jnp.asarray(leaf)) for leaf in leaves], structure


def map_buckets(
    function: Callable[[Sequence[jax.Array], str], list[jax.Array]],
    arrays: Sequence[jax.Array],
    axes: ReducedAxes,
    label: str,
    bucket_bytes: int,
    wire_dtype: Any = None,
) -> list[jax.Array]:
    """``function`` of each bucket and its label; results in the order of ``arrays``, and then what it gives more."""
    results: dict[int, jax.Array] = {}
    more: list[jax.Array] = []
    if axes.worker_axis is not None:
        arrays = [_varying(array, (axes.worker_axis,)) for array in arrays]
    for number, bucket in enumerate(make_buckets(arrays, bucket_bytes, wire_dtype)):
        outputs = function([arrays[index] for index in bucket], f"{label} bucket {number}")
        results.update(zip(bucket, outputs, strict=False))
        more += outputs[len(bucket) :]
    return together([*(results[index] for index in range(len(arrays))), *more])


# --- Inside a worker.


def reduce_locally(
    leaf: jax.Array, local_axes: tuple[str, ...], kind: Kind, groups: tuple[tuple[int, ...], ...] = ()
) -> jax.Array:
    is_alone = all(jax.lax.axis_size(name) == 1 for name in local_axes)
    if is_alone and varying_axes(jax.typeof(leaf)).isdisjoint(local_axes):
        return leaf  # XLA would keep the all-reduce of one device
    if kind is Kind.SUM:
        # jax.lax refuses a value that varies along only some of the axes. We take it, as we do between workers.
        total: jax.Array = jax.lax.psum(_varying(leaf, local_axes), local_axes, axis_index_groups=groups or None)
        return total
    if kind is Kind.BROADCAST:
        copies = jax.lax.all_gather(_varying(leaf, local_axes), local_axes, to="invarying") if leaf.size else leaf[None]
        return copies[0]
    return extreme(leaf, local_axes, kind, groups or None)


def own_part(leaf: jax.Array, axes: ReducedAxes, kind: Kind) -> jax.Array:
    """This device's equal part of its worker's reduced leaf, as a vector; padding at the end is zeros."""
    if kind is not Kind.SUM:
        leaf = reduce_locally(leaf, axes.local_axes, kind)
    flat = jnp.pad(leaf.reshape(-1), (0, -leaf.size % axes.local_count))
    if leaf.size == 0:  # XLA's collectives refuse empty arrays, or crash on them
        return flat
    if kind is Kind.SUM:
        flat = _varying(flat, axes.local_axes)
        part: jax.Array = jax.lax.psum_scatter(flat, axes.local_axes, scatter_dimension=0, tiled=True)
        return part
    rows = flat.reshape(axes.local_count, flat.size // axes.local_count)
    row: jax.Array = jax.lax.dynamic_index_in_dim(rows, jax.lax.axis_index(axes.local_axes), keepdims=False)
    return row


def _scatter_locally(rows: jax.Array, axes: ReducedAxes) -> jax.Array:
    if rows.size == 0:  # XLA refuses empty arrays
        return rows[0]
    row: jax.Array = jax.lax.psum_scatter(rows, axes.local_axes, axis_index_groups=axes.local_groups or None)
    return row


def from_parts(part: jax.Array, leaf: jax.Array | jax.ShapeDtypeStruct, axes: ReducedAxes) -> jax.Array:
    """Join the parts of a worker's devices, in the shape of ``leaf``."""
    if leaf.size == 0:
        return jnp.zeros(leaf.shape, part.dtype)
    # With types, the cotangent of the whole is the same on all devices. Without, each device has its own cotangent, and
    # the transpose must sum them.
    to = "invarying" if varying_axes(jax.typeof(part)) else "varying"
    whole: jax.Array = jax.lax.all_gather(part, axes.local_axes, axis=0, tiled=True, to=to)
    return whole[: leaf.size].reshape(leaf.shape)


def _reordered(rows: jax.Array, numbers: Any) -> jax.Array:
    """The rows of these numbers. Each group has others, in the same program: see ``rules.own_rank``."""
    with jax.transfer_guard("allow"):
        chosen: jax.Array = rows[jax.lax.optimization_barrier(jnp.array(numbers, jnp.int32))]
    return chosen


def _flatten_places(stack: jax.Array, axes: ReducedAxes) -> jax.Array:
    """``[devices of a worker, workers, ...]`` to one axis in the order of the mesh."""
    local_sizes = [int(jax.lax.axis_size(name)) for name in axes.local_axes]
    split = stack.reshape(*local_sizes, *stack.shape[1:])
    moved = jnp.moveaxis(split, len(local_sizes), axes.worker_position)
    return moved.reshape(stack.shape[0] * stack.shape[1], *stack.shape[2:])


def _split_places(array: jax.Array, axes: ReducedAxes) -> jax.Array:
    """The inverse of ``_flatten_places``."""
    sizes = [int(jax.lax.axis_size(name)) for name in axes.local_axes]
    workers = array.shape[0] // axes.local_count
    sizes.insert(axes.worker_position, workers)
    moved = jnp.moveaxis(array.reshape(*sizes, *array.shape[1:]), axes.worker_position, len(sizes) - 1)
    return moved.reshape(axes.local_count, workers, *array.shape[1:])


def _varying(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """As in lax.psum: a value that is the same along an axis counts once for each device along that axis."""
    constant = tuple(name for name in axes if name not in varying_axes(jax.typeof(array)))
    return jax.lax.pcast(array, constant, to="varying") if constant else array


def make_varying(leaf: Any, axes: ReducedAxes) -> jax.Array:
    """``leaf`` as a value of its own on every device that ``axes`` name."""
    return _varying(jnp.asarray(leaf), axes.local_axes + ((axes.worker_axis,) if axes.worker_axis else ()))
