"""The primitive behind optimizers on reducers: one bucket of weights, whose states the reducers keep.

A call stores, loads, measures or updates. ``xla_ffi/ffi/state_call.h`` lists the operands and results of each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxhetero import world
from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.primitive import attributes_of, lower_call
from jaxhetero._compat import is_computed, register_lowering, without_varying_axis
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
      wire_dtype: as in ``psum``.
      call_bytes: of gradients on the wire in the whole step.
      results: shapes and dtypes, but for the version.
      worker_count, axis_name: as in ``primitive.all_reduce``.
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
    axis_name: str | None = None

    @property
    def leaf_count(self) -> int:
        """Of a measure or an update: the leaves of the bucket, which are first of its operands and of its results."""
        return {Kind.MEASURE: len(self.results) - 1, Kind.UPDATE: len(self.results)}.get(self.kind, 0)

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        """The results, and the version of the state after it."""
        with jax.named_scope(self.label):
            outputs: list[jax.Array] = PRIMITIVE.bind(*operands, call=self)
            return outputs


PRIMITIVE = Primitive("jaxhetero_state")
PRIMITIVE.multiple_results = True


@functools.partial(jax.jit, static_argnames="call")
def _run_eagerly(*operands: jax.Array, call: StateCall) -> list[jax.Array]:
    outputs: list[jax.Array] = PRIMITIVE.bind(*operands, call=call)
    return outputs


def _abstract_eval(*operands: Any, call: StateCall) -> list[Any]:
    version = operands[-1]
    results = [version.update(shape=shape, dtype=np.dtype(dtype), weak_type=False) for shape, dtype in call.results]
    results.append(version.update(weak_type=False))
    if call.axis_name is None:
        return results
    return [without_varying_axis(result, call.axis_name) for result in results]


def _lower(ctx: Any, *operands: Any, call: StateCall) -> Any:
    if world.has_stand_in():  # as on a GPU
        return _lower_on_gpu(ctx, *operands, call=call)
    return _lower_call(ctx, *operands, call=call)


def _lower_on_gpu(ctx: Any, *operands: Any, call: StateCall) -> Any:
    """XLA converts to the dtype of the wire on the device, so that a lane copies half the bytes to the host."""
    if call.wire_dtype and call.leaf_count and not call.resumes and ctx.avals_in[0].dtype != call.wire_dtype:
        return mlir.lower_fun(_run_converted, multiple_results=True)(ctx, *operands, call=call)
    return _lower_call(ctx, *operands, call=call)


def _run_converted(*operands: jax.Array, call: StateCall) -> list[jax.Array]:
    count = call.leaf_count
    return call(*(leaf.astype(call.wire_dtype) for leaf in operands[:count]), *operands[count:])


def _lower_call(ctx: Any, *operands: Any, call: StateCall) -> Any:
    attributes = attributes_of(
        ctx,
        label=call.label,
        kind=call.kind,
        root=0,
        worker_count=call.worker_count,
        axis_name=call.axis_name,
        devices_along=1,
        in_groups=False,
        wire_dtype=call.wire_dtype,
        call_bytes=call.call_bytes,
        group=(),
    )
    if attributes.device_lanes.any():
        raise ConfigError(
            f"{call.label}: the mesh has several devices of one worker; an optimizer on reducers takes the gradients "
            "of one device of each worker"
        )
    state = np.array([call.number, call.slot_count, call.slot, call.resumes, call.is_backed_up], np.int64)
    attributes = replace(attributes, state=state, update=np.frombuffer(call.update, np.uint8))
    return lower_call(ctx, operands, attributes, _NAMES[call.kind], _aliases(ctx, operands, call))


def _aliases(ctx: Any, operands: Sequence[Any], call: StateCall) -> dict[int, int]:
    """New weights take the memory of their gradients; see ``primitive.lower``. A measure passes it on to them.

    In other memory, an update would wait for whatever had that last: often for the gradients of another bucket.
    """
    same = (ctx.avals_in[i].dtype == np.dtype(call.results[i][1]) for i in range(call.leaf_count))
    return {i: i for i, is_same in enumerate(same) if is_same and is_computed(operands[i])}


PRIMITIVE.def_impl(_run_eagerly)
PRIMITIVE.def_abstract_eval(_abstract_eval)
register_lowering(PRIMITIVE, _lower)
register_lowering(PRIMITIVE, _lower_on_gpu, platform="cuda")
