"""The primitive behind optimizers on reducers: one bucket of weights, whose states the reducers keep.

A call stores, loads, measures or updates. ``xla_ffi/ffi/state_call.h`` lists the operands and results of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.primitive import CallAttributes, attributes_of, lower_call, next_stream
from jaxhetero._collectives.quanta import QUANTA, Quanta, quanta_of, round_to_quanta
from jaxhetero._collectives.rules import as_program
from jaxhetero._collectives.worker_devices import WorkerDevices
from jaxhetero._compat import is_computed, lower_on_gpu_stream, register_lowering, without_varying_axis
from jaxhetero.config import cuda_stand_in
from jaxhetero.errors import ConfigError

_NAMES = {
    Kind.STORE: "jaxhetero_store",
    Kind.LOAD: "jaxhetero_load",
    Kind.MEASURE: "jaxhetero_measure",
    Kind.UPDATE: "jaxhetero_update",
}


@dataclass(frozen=True)
class StateCall:
    """A call, but for its operands.

    Attributes:
      kind: what it does.
      label: the name of the op in messages and traces.
      number: of the state; unlike that of any other bucket of any optimizer of the job.
      slot_count: the weights, and the states that belong to them.
      slot: that is stored or loaded.
      update: the encoded description of a measure or an update.
      resumes: the reducers have the summed gradients already.
      is_backed_up: other reducers keep a copy of the state.
      wire_dtype: as in ``psum``. With 8 and 4 bits, gradients are float32 and rounded before the call; what is sent
        then has the same bits in fewer bytes.
      call_bytes: of gradients on the wire in the whole step.
      results: shapes and dtypes, but for the version.
      worker_count: as in ``primitive.all_reduce``.
      devices: those of each worker that share the call.
      caller: the number of the one that makes it.
      is_elastic: nobody knows beforehand who takes part. All contribute the same to a store.
      averages: in an elastic job, of a measure or an update: it is given the mean of the gradients, not their sum.
      is_shared: what the devices share is still to be written around the call.
    """

    kind: Kind
    label: str
    number: int
    slot_count: int
    results: tuple[tuple[tuple[int, ...], str], ...]
    slot: int = 0
    update: bytes = b""
    resumes: bool = False
    is_backed_up: bool = True
    wire_dtype: str = ""
    call_bytes: int = 0
    worker_count: int = 1
    devices: WorkerDevices = field(default_factory=WorkerDevices)
    caller: int = 0
    is_shared: bool = False
    is_elastic: bool = False
    averages: bool = False

    @property
    def leaf_count(self) -> int:
        """Of a measure or an update: the leaves of the bucket, which are first of its operands and of its results."""
        return {Kind.MEASURE: len(self.results) - 1, Kind.UPDATE: len(self.results)}.get(self.kind, 0)

    @property
    def quanta(self) -> Quanta | None:
        """What gradients are rounded to, if ``wire_dtype`` has 8 or 4 bits."""
        return quanta_of(self.wire_dtype or None)

    def rounded(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Operands whose gradients are as they are sent."""
        if self.quanta is None or self.resumes:
            return [*operands]
        count = self.leaf_count
        return [*round_to_quanta(operands[:count], self.quanta), *operands[count:]]

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        """The results, and the version of the state after it."""
        with jax.named_scope(self.label):
            given = operands if self.is_shared else self.rounded(operands)
            outputs: list[jax.Array] = PRIMITIVE.bind(*given, call=self)
            return outputs


PRIMITIVE = Primitive("jaxhetero_state")
PRIMITIVE.multiple_results = True


def _abstract_eval(*operands: Any, call: StateCall) -> list[Any]:
    version = operands[-1]
    results = [version.update(shape=shape, dtype=np.dtype(dtype), weak_type=False) for shape, dtype in call.results]
    results.append(version.update(weak_type=False))
    axes = call.devices.axes if call.devices.worker_axis is None else (call.devices.worker_axis, *call.devices.axes)
    for axis in axes:
        results = [without_varying_axis(result, axis) for result in results]
    return results


def _run_shared(*operands: jax.Array, call: StateCall) -> list[jax.Array]:
    """Sum the gradients of the worker's devices, call on one of them, and give all of them what comes of it."""
    devices, sums = call.devices, 0 if call.resumes else call.leaf_count
    summed = call.rounded([*map(devices.sum, operands[:sums]), *operands[sums:]])
    results = PRIMITIVE.bind(*summed, call=replace(call, is_shared=False))
    # A measure does not write the leaves.
    own = call.leaf_count if call.kind is Kind.MEASURE else 0
    return [*results[:own], *(devices.share(result, call.caller) for result in results[own:])]


def _refuse_transform(name: str) -> Any:
    def refuse(*_: Any, call: StateCall, **__: Any) -> Any:
        raise ConfigError(
            f"{call.label}: {name} cannot go through an optimizer on reducers, which keep one model: call init() and "
            "update() outside of it, once for each model"
        )

    return refuse


_lower_shared = mlir.lower_fun(_run_shared, multiple_results=True)


def _lower(ctx: Any, *operands: Any, call: StateCall) -> Any:
    if call.is_shared:
        return _lower_shared(ctx, *operands, call=call)
    if cuda_stand_in():  # as on a GPU
        return _lower_on_gpu(ctx, *operands, call=call)
    return _lower_call(ctx, *operands, call=call)


def _lower_on_gpu(ctx: Any, *operands: Any, call: StateCall) -> Any:
    if call.is_shared:
        return _lower_shared(ctx, *operands, call=call)
    if call.leaf_count == 0:  # a store or a load, which have nothing to run beside
        return _lower_call(ctx, *operands, call=call)
    return mlir.lower_fun(_run_on_stream, multiple_results=True)(ctx, *operands, call=call)


# The call of a bucket's measure or update on a GPU. Behind the leaves it has one operand: the scalars as uint32. It has
# one result: the new weights side by side, or the totals as uint32. The bits of the version are at the end of both. Why
# one result: see ``primitive.run_on_stream``.
_packed = Primitive("jaxhetero_packed_state")


def _run_on_stream(*operands: jax.Array, call: StateCall) -> list[jax.Array]:
    """Make the call on a stream of its own.

    XLA converts to the dtype of the wire on the device, so that a lane copies half the bytes to the host.
    """
    leaves, (*scalars, version) = operands[: call.leaf_count], operands[call.leaf_count :]
    narrows = call.wire_dtype and call.quanta is None and not call.resumes
    given = [leaf.astype(call.wire_dtype) for leaf in leaves] if narrows else leaves
    bits = [jax.lax.bitcast_convert_type(array, np.uint32).ravel() for array in scalars]
    # XLA ends with a segmentation fault where a call on another stream has a constant as its operand, or an array
    # without elements (jaxlib 0.12.0.1, compiling for an H100).
    step = jax.lax.optimization_barrier(jnp.concatenate([*bits, version.reshape(1)]))
    packed = _packed.bind(*given, step, call=call)
    if call.kind is Kind.MEASURE:
        return [*leaves, jax.lax.bitcast_convert_type(packed[:-1], np.float32), packed[-1]]
    results, end = [], 0
    for shape, _ in call.results:
        start, end = end, end + math.prod(shape)
        results.append(jax.lax.slice_in_dim(packed, start, end).reshape(shape))
    version = packed[end:] if packed.dtype.itemsize == 2 else packed[end]
    return [*results, jax.lax.bitcast_convert_type(version, np.uint32)]


def _packed_type(*operands: Any, call: StateCall) -> Any:
    step = operands[-1]
    if call.kind is Kind.MEASURE:
        (count,), _ = call.results[-1]
        return step.update(shape=(count + 1,))
    dtype = np.dtype(call.results[0][1])
    count = sum(math.prod(shape) for shape, _ in call.results)
    return step.update(shape=(count + step.dtype.itemsize // dtype.itemsize,), dtype=dtype)


def _lower_packed(ctx: Any, *operands: Any, call: StateCall) -> Any:
    return _call(ctx, operands, call, state_attributes(ctx, call), {})


def _lower_packed_on_stream(ctx: Any, *operands: Any, call: StateCall) -> Any:
    attributes = state_attributes(ctx, call, by_number_on_host=True)

    def run(*operands: Any) -> Any:
        return _call(ctx, operands, call, attributes, {})[0]

    return [lower_on_gpu_stream(ctx, next_stream(), run, *operands)]


def _lower_call(ctx: Any, *operands: Any, call: StateCall) -> Any:
    return _call(ctx, operands, call, state_attributes(ctx, call), _aliases(ctx, operands, call))


def _call(
    ctx: Any, operands: Sequence[Any], call: StateCall, attributes: CallAttributes, aliases: dict[int, int]
) -> Any:
    return lower_call(ctx, operands, attributes, _NAMES[call.kind], aliases)


def state_attributes(ctx: Any, call: StateCall, *, by_number_on_host: bool = False) -> CallAttributes:
    """The attributes of a call that is about a state."""
    attributes = attributes_of(
        ctx,
        label=call.label,
        kind=call.kind,
        root=0,
        worker_count=call.worker_count,
        axis_name=call.devices.worker_axis,
        devices_along=call.devices.along,
        in_groups=False,
        wire_dtype="" if call.quanta else call.wire_dtype,
        call_bytes=call.call_bytes,
        group=(),
        by_number_on_host=by_number_on_host,
    )
    column_count = 1 + int(attributes.device_columns.max(initial=0))
    if column_count != call.devices.count:
        raise ConfigError(
            f"{call.label}: the mesh has {column_count} devices of each worker, and axis_name names "
            f"{call.devices.count} of them; an optimizer on reducers takes the gradients of all: "
            "name all axes of the mesh"
        )
    numbers = [*QUANTA].index(call.wire_dtype) + 1 if call.quanta else 0  # as in xla_ffi/sum/reduce.h
    state = [call.number, call.slot_count, call.slot, call.resumes, call.is_backed_up, call.caller, numbers]
    if call.is_elastic:
        state += [call.averages, call.kind is Kind.STORE]
    return replace(attributes, state=np.array(state, np.int64), update=np.frombuffer(call.update, np.uint8))


def _aliases(ctx: Any, operands: Sequence[Any], call: StateCall) -> dict[int, int]:
    """New weights take the memory of their gradients; see ``primitive.lower``. A measure passes it on to them.

    In other memory, an update would wait for whatever had that last: often for the gradients of another bucket.
    """
    same = (ctx.avals_in[i].dtype == np.dtype(call.results[i][1]) for i in range(call.leaf_count))
    return {i: i for i, is_same in enumerate(same) if is_same and is_computed(operands[i])}


PRIMITIVE.def_impl(as_program(PRIMITIVE, ("call",)))
PRIMITIVE.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[PRIMITIVE] = _refuse_transform("jax.vmap")
ad.primitive_jvps[PRIMITIVE] = _refuse_transform("a derivative")
register_lowering(PRIMITIVE, _lower)
register_lowering(PRIMITIVE, _lower_on_gpu, platform="cuda")
_packed.def_abstract_eval(_packed_type)
register_lowering(_packed, _lower_packed)
register_lowering(_packed, _lower_packed_on_stream, platform="cuda")
