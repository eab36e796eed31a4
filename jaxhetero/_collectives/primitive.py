"""The primitives behind the collectives: one bucket in, one bucket out, one custom call in the compiled program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jaxhetero._collectives import rules
from jaxhetero._collectives.axis_groups import AxisGroups
from jaxhetero._collectives.kinds import Kind as Kind
from jaxhetero._collectives.mesh_axes import make_columns
from jaxhetero._collectives.wire_dtypes import is_float8, wire_bytes
from jaxhetero._compat import (
    is_computed,
    lower_on_gpu_stream,
    operation_name,
    place_in_program,
    program_device_count,
    program_mesh,
    register_lowering,
    without_varying_axis,
)
from jaxhetero._job import ffi
from jaxhetero.config import cuda_stand_in
from jaxhetero.errors import ConfigError

# A step along the workers' axis must be the next rank.
_IN_RANK_ORDER = (Kind.BROADCAST, Kind.SCATTER, Kind.GATHER)

# One for each kind, so that a printed jaxpr and a profile say which collective it is. Those of rows, a scatter and a
# gather, are defined in ``gather_primitives``.
PRIMITIVES = {
    Kind.SUM: Primitive("jaxhetero_psum"),
    Kind.BROADCAST: Primitive("jaxhetero_broadcast"),
    Kind.MAX: Primitive("jaxhetero_pmax"),
    Kind.MIN: Primitive("jaxhetero_pmin"),
    Kind.SCATTER: Primitive("jaxhetero_psum_scatter"),
    Kind.GATHER: Primitive("jaxhetero_all_gather"),
    Kind.MEAN8: Primitive("jaxhetero_mean8"),
    Kind.MEAN4: Primitive("jaxhetero_mean4"),
    Kind.MEANFLOAT8: Primitive("jaxhetero_mean_float8"),
}


@dataclass(frozen=True)
class CallAttributes:
    """The attributes of the FFI call, which xla_ffi/ffi/call_site.h declares by the same names."""

    label: str
    place: np.int64
    kind: np.int64
    root: np.int64
    wire_dtype: str
    call_bytes: np.int64
    worker_count: np.int64
    group: np.ndarray
    state: np.ndarray
    update: np.ndarray
    device_ids: np.ndarray
    device_columns: np.ndarray


def all_reduce(
    bucket: Sequence[jax.Array],
    *,
    label: str,
    kind: Kind,
    root: int,
    worker_count: int,
    axis_name: str | None,
    devices_along: int = 1,
    in_groups: bool = True,
    wire_dtype: str = "",
    call_bytes: int = 0,
    group: tuple[int, ...] = (),
) -> list[jax.Array]:
    """Reduce one bucket over all workers, or over those of a group.

    Args:
      bucket: arrays of one dtype.
      label: the name of this op in messages and traces. The label, the place in the program and the group make the op's
        number.
      kind: how contributions become a result.
      root: the rank whose contribution a broadcast takes, else 0.
      worker_count: how many workers the program was traced for; checked against the world when the program runs.
      axis_name: the mesh axis of the workers under ``jax.shard_map``; the results no longer vary over it. None where
        the mesh, if there is one, does not span workers.
      devices_along: how many devices of each worker lie side by side along that axis; all of them take part.
      in_groups: False where XLA has reduced inside each worker, and each of those devices has a part of its own.
      wire_dtype: "bfloat16" or "float16" to send a float32 sum in; "" to send the dtype of the bucket.
      call_bytes: bytes on the wire of all buckets of the collective together; the same on all workers.
      group: the ranks that take part, in order; empty for all.
    """
    with jax.named_scope(f"{label}, {wire_bytes(bucket, wire_dtype)} bytes"):
        return bind(
            bucket,
            label=label,
            kind=kind,
            root=root,
            worker_count=worker_count,
            axis_name=axis_name,
            devices_along=devices_along,
            in_groups=in_groups and devices_along > 1,
            wire_dtype=wire_dtype,
            call_bytes=call_bytes,
            group=group,
        )


def bind(bucket: Sequence[jax.Array], *, kind: Kind, **params: Any) -> list[jax.Array]:
    outputs: list[jax.Array] = PRIMITIVES[kind].bind(*bucket, kind=kind, **params)
    return outputs


def abstract_eval(
    *bucket: Any,
    kind: Kind,
    worker_count: int,
    axis_name: str | None,
    devices_along: int,
    in_groups: bool,
    group: tuple[int, ...],
    invariant: bool = True,
    **_: Any,
) -> list[Any]:
    """The types of the results; ``invariant``: they do not vary over ``axis_name``, but for those of groups."""
    row_count = (len(group) or worker_count) * (devices_along if in_groups else 1)

    def shape_of(aval: Any) -> tuple[int, ...]:
        if kind is Kind.SCATTER:
            return tuple(aval.shape[1:])
        return (row_count, *aval.shape) if kind is Kind.GATHER else tuple(aval.shape)

    results = [aval.update(shape=shape_of(aval), weak_type=False) for aval in bucket]
    is_same = invariant and not group
    return [without_varying_axis(aval, axis_name) for aval in results] if is_same and axis_name else results


def lower(ctx: Any, *bucket: Any, **params: Any) -> Any:
    """Lower to the FFI call; a result takes the memory of its operand where the program has computed the operand.

    Without this aliasing, XLA's CPU compiler reuses the memory of a gradient once the call returns, and the computation
    that reuses it waits for the round. An argument of the program is not aliased: XLA would copy it before the call. A
    result of another size than its operand cannot be.
    """
    if is_float8(ctx.avals_in[0].dtype):
        return mlir.lower_fun(_run_float8, multiple_results=True)(ctx, *bucket, **params)
    if params["in_groups"]:
        return mlir.lower_fun(_run_in_groups, multiple_results=True)(ctx, *bucket, **params)
    if cuda_stand_in() and (len(bucket) > 1 or params["wire_dtype"]):  # as on a GPU, but for the stream
        return lower_on_stream(ctx, *bucket, **params)
    same_size = params["kind"] not in (Kind.SCATTER, Kind.GATHER)
    aliases = {index: index for index, operand in enumerate(bucket) if same_size and is_computed(operand)}
    return lower_call(ctx, bucket, attributes_of(ctx, **params), PRIMITIVES[params["kind"]].name, aliases)


def _run_in_groups(*bucket: jax.Array, kind: Kind, **params: Any) -> list[jax.Array]:
    """Let XLA reduce between the devices of a worker that lie side by side along the workers' axis."""
    between_workers = functools.partial(bind, kind=kind, **{**params, "in_groups": False})
    return AxisGroups(params["axis_name"], params["devices_along"]).run(bucket, kind, between_workers)


def _run_float8(*bucket: jax.Array, kind: Kind, **params: Any) -> list[jax.Array]:
    """Move floats of 8 bits as bytes. What is summed of them, cotangents, is summed in float32 and rounded once."""
    dtype = bucket[0].dtype
    convert: Any = jax.lax.bitcast_convert_type
    on_wire: Any = jnp.uint8
    if kind in (Kind.SUM, Kind.SCATTER):
        convert, on_wire = jax.lax.convert_element_type, jnp.float32
    results = bind([convert(array, on_wire) for array in bucket], kind=kind, **params)
    return [convert(result, dtype) for result in results]


def _run_converted(*bucket: jax.Array, kind: Kind, wire_dtype: str, **params: Any) -> list[jax.Array]:
    """Let XLA convert on the device, so that a lane copies half the bytes from a GPU to the host."""
    narrow = [array.astype(wire_dtype) for array in bucket]
    outputs = bind(narrow, kind=kind, wire_dtype="", **params)
    return [output.astype(array.dtype) for output, array in zip(outputs, bucket, strict=True)]


def lower_call(
    ctx: Any, operands: Sequence[Any], attributes: CallAttributes, name: str, aliases: dict[int, int]
) -> Any:
    """Lower to the FFI call, which profiles show by ``name`` and the bytes of its operands."""
    # XLA must keep the call of a worker that does not use the result: the other workers wait for its contribution.
    rule = jax.ffi.ffi_lowering(ffi.ALL_REDUCE, has_side_effect=True, operand_output_aliases=aliases)
    size_bytes = wire_bytes(ctx.avals_in, attributes.wire_dtype)
    with operation_name(ctx, f"{name}_{size_bytes}_bytes"):
        return rule(ctx, *operands, **vars(attributes))


# How many rounds a GPU may have under way at once. Each occupies a stream, and the hardware has few queues.
_CUDA_STREAMS = 4
_streams = itertools.cycle(range(1, _CUDA_STREAMS + 1))


def next_stream() -> int:
    """The number of a stream for the next round of a GPU."""
    return next(_streams)


# The call of a bucket on a GPU. It has one result: that of its one leaf, or those of all leaves side by side, in rows
# for a gather.
_packed = Primitive("jaxhetero_packed")


def run_on_stream(*bucket: jax.Array, **params: Any) -> list[jax.Array]:
    """Make the call on a stream of its own: XLA begins it as early, and waits for it as late, as the data allow.

    XLA schedules an ordinary call right before the first use of its result, and a pair of calls, begin and end, in the
    same way. The GPU would then be idle during every round. A call with several results is waited for at once as well,
    since XLA takes them apart there. (Seen in programs that jaxlib 0.10.2 and 0.11.2 compile for an H100.)
    """
    if is_float8(bucket[0].dtype):
        return _run_float8(*bucket, **params)
    if params["in_groups"]:
        return _run_in_groups(*bucket, **params)
    if params["wire_dtype"]:
        return _run_converted(*bucket, **params)
    packed = _packed.bind(*bucket, **params)
    if len(bucket) == 1:
        return [packed]
    results, end = [], 0
    for aval in abstract_eval(*map(jax.typeof, bucket), **params):
        start, end = end, end + aval.size // packed.shape[0]
        results.append(jax.lax.slice_in_dim(packed, start, end, axis=1).reshape(aval.shape))
    return results


def _packed_type(*bucket: Any, kind: Kind, **params: Any) -> Any:
    avals = abstract_eval(*bucket, kind=kind, **params)
    if len(avals) == 1:
        return avals[0]
    row_count = avals[0].shape[0] if kind is Kind.GATHER else 1
    return avals[0].update(shape=(row_count, sum(aval.size for aval in avals) // row_count))


def _lower_packed(ctx: Any, *bucket: Any, **params: Any) -> Any:
    return lower_call(ctx, bucket, attributes_of(ctx, **params), PRIMITIVES[params["kind"]].name, {})


def _lower_packed_on_stream(ctx: Any, *bucket: Any, **params: Any) -> Any:
    attributes = attributes_of(ctx, by_number_on_host=True, **params)

    def call(*bucket: Any) -> Any:
        return lower_call(ctx, bucket, attributes, PRIMITIVES[params["kind"]].name, {})[0]

    return [lower_on_gpu_stream(ctx, next_stream(), call, *bucket)]


def attributes_of(
    ctx: Any,
    *,
    label: str,
    kind: Kind,
    root: int,
    worker_count: int,
    axis_name: str | None,
    devices_along: int,
    in_groups: bool,
    wire_dtype: str,
    call_bytes: int,
    group: tuple[int, ...],
    invariant: bool = True,
    by_number_on_host: bool = False,
) -> CallAttributes:
    """The attributes of a call that is about no state."""
    del invariant, in_groups  # a matter of types and of earlier lowerings
    devices = program_device_count(ctx)
    if devices > 1:
        raise ConfigError(
            f"{label}: this program runs on {devices} devices, and XLA would gather the whole array on each of them "
            "before the call; use it inside jax.shard_map over all mesh axes, with the workers' axis as axis_name"
        )
    mesh = program_mesh(ctx)
    ids, columns = make_columns(mesh, axis_name, devices_along, label, in_order=kind in _IN_RANK_ORDER or group != ())
    if by_number_on_host and isinstance(mesh, jax.sharding.Mesh):
        numbers = {device.id: device.local_hardware_id for device in mesh.local_devices}
        own = np.isin(ids, list(numbers))
        ids, columns = np.array([numbers[id_] for id_ in ids[own].tolist()], np.int64), columns[own]
    return CallAttributes(
        label=label,
        place=np.int64(place_in_program(ctx, (label, group))),
        kind=np.int64(kind),
        root=np.int64(root),
        wire_dtype=wire_dtype,
        call_bytes=np.int64(call_bytes),
        worker_count=np.int64(worker_count),
        group=np.array(group, np.int64),
        state=np.zeros(0, np.int64),
        update=np.zeros(0, np.uint8),
        device_ids=ids,
        device_columns=columns,
    )


def _batch(bucket: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[jax.Array], Sequence[Any]]:
    """``vmap``: the reduction is elementwise, so a batched operand is only a larger operand."""
    return bind(bucket, **params), dims


def _transpose(cotangents: Sequence[Any], *bucket: Any, **params: Any) -> list[Any]:
    """The cotangents of this worker's operands, from the cotangents of the results.

    If types say that the results are the same on every worker (``check_vma=True``), their cotangents are the same too,
    and each worker keeps its own copy. Else each worker has the cotangent of its own copy of the result, and the
    operands of a sum get the sum of these cotangents, as with ``jax.lax.psum`` there.
    """
    axis_name, kind, root = params["axis_name"], params["kind"], params["root"]
    if not params["group"] and any(rules.varies(operand.aval, axis_name) for operand in bucket):
        results = [ct if isinstance(ct, ad.Zero) else jax.lax.pcast(ct, axis_name, to="varying") for ct in cotangents]
    else:
        as_sum = {**params, "kind": Kind.SUM, "root": 0}
        results = rules.map_nonzero(all_reduce, cotangents, rules.zero_cotangents(bucket), as_sum, "cotangents")
    if kind is Kind.BROADCAST:
        is_root = rules.own_index(axis_name) == root * params["devices_along"]  # its first device
        results = [ct if isinstance(ct, ad.Zero) else jnp.where(is_root, ct, jnp.zeros_like(ct)) for ct in results]
    return results


_packed.def_abstract_eval(_packed_type)
register_lowering(_packed, _lower_packed)
register_lowering(_packed, _lower_packed_on_stream, platform="cuda")
lower_on_stream = mlir.lower_fun(run_on_stream, multiple_results=True)

for _kind in set(PRIMITIVES) - {Kind.SCATTER, Kind.GATHER}:
    rules.define(PRIMITIVES[_kind], abstract_eval, _batch)
    register_lowering(PRIMITIVES[_kind], lower)
    register_lowering(PRIMITIVES[_kind], lower_on_stream, platform="cuda")
    # As in jax.lax, a maximum has no derivative; JAX says so by the primitive's name.
    if _kind in (Kind.SUM, Kind.BROADCAST):
        rules.define_linear(PRIMITIVES[_kind], all_reduce, _transpose)
