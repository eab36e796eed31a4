"""The primitives of rounds that outlive a program: one starts a bucket's round, the other one takes its total.

Both have an effect. JAX must not drop a start that nobody finishes, and must not run either a second time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.primitive import CallAttributes, attributes_of, next_stream
from jaxhetero._collectives.rules import as_program
from jaxhetero._collectives.state_primitive import StateCall, state_attributes
from jaxhetero._collectives.wire_dtypes import wire_bytes
from jaxhetero._compat import (
    SideEffect,
    lower_on_gpu_stream,
    operation_name,
    program_device_count,
    register_lowering,
    without_varying_axis,
)
from jaxhetero._job import ffi
from jaxhetero.config import cuda_stand_in
from jaxhetero.errors import ConfigError

_START = Primitive("jaxhetero_psum_start")
_DONE = Primitive("jaxhetero_psum_done")

# A ticket, as xla_ffi/worker/pending_rounds.h declares it.
_TICKET = {"shape": (4,), "dtype": np.dtype(np.uint32), "weak_type": False}
_TICKET_BYTES = 16


@dataclass(frozen=True)
class StartAttributes(CallAttributes):
    """The attributes of a start; xla_ffi/ffi/pending_handler.h declares those that other calls lack."""

    priority: np.int64


@dataclass(frozen=True)
class DoneAttributes:
    """The attributes of the other call, which the same file declares by the same names."""

    label: str
    worker_count: np.int64
    carries: np.int64


@dataclass(frozen=True)
class RoundCall(ABC):
    """A bucket whose round outlives its program.

    Attributes:
      label: the name of the op in messages and traces.
      worker_count, axis_name, group, wire_dtype: as in ``primitive.all_reduce``.
      priority: of all rounds that run, workers push those with the lowest first; the same on all workers.
      bucket: shapes and dtypes of what the round gives.
    """

    label: str
    worker_count: int
    axis_name: str | None
    group: tuple[int, ...]
    wire_dtype: str
    priority: int
    bucket: tuple[tuple[tuple[int, ...], str], ...]

    @abstractmethod
    def attributes(self, ctx: Any, *, by_number_on_host: bool = False) -> CallAttributes:
        """Those of the start, but for its own."""

    @abstractmethod
    def check_gpu(self) -> None:
        """``ConfigError`` if a GPU's lane cannot start the round."""

    @property
    @abstractmethod
    def converted(self) -> RoundCall:
        """The same call, for arrays that XLA converts before it and after it."""

    def start(self, operands: Sequence[jax.Array]) -> jax.Array:
        """Begin the round; its ticket."""
        with jax.named_scope(f"{self.label}, {wire_bytes(operands, self.wire_dtype)} bytes"):
            (ticket,) = _START.bind(*operands, call=self)
        started: jax.Array = ticket
        return started

    def done(self, ticket: jax.Array) -> list[jax.Array]:
        """The total of the round."""
        with jax.named_scope(self.label):
            bucket: list[jax.Array] = _DONE.bind(ticket, call=self)
        return bucket


@dataclass(frozen=True)
class PendingSum(RoundCall):
    """The round of a sum.

    Attributes:
      devices_along, call_bytes: as in ``primitive.all_reduce``.
    """

    devices_along: int
    call_bytes: int

    def attributes(self, ctx: Any, *, by_number_on_host: bool = False) -> CallAttributes:
        """See the base."""
        return attributes_of(
            ctx,
            label=self.label,
            kind=Kind.SUM,
            root=0,
            worker_count=self.worker_count,
            axis_name=self.axis_name,
            devices_along=self.devices_along,
            in_groups=False,
            wire_dtype=self.wire_dtype,
            call_bytes=self.call_bytes,
            group=self.group,
            by_number_on_host=by_number_on_host,
        )

    def check_gpu(self) -> None:
        """See the base."""

    @property
    def converted(self) -> PendingSum:
        """See the base."""
        bucket = tuple((shape, self.wire_dtype) for shape, _ in self.bucket)
        return replace(self, wire_dtype="", bucket=bucket)


@dataclass(frozen=True)
class PendingState(RoundCall):
    """The round of an optimizer on reducers, which gives what ``state`` does, the version included."""

    state: StateCall

    @classmethod
    def of(cls, state: StateCall, priority: int) -> PendingState:
        """The call of ``state``, of which a later one takes the results."""
        if state.is_shared:
            raise ConfigError(
                f"{state.label}: each worker has several devices; across_steps around on_reducers is for one device of "
                "each worker"
            )
        return cls(
            label=state.label,
            worker_count=state.worker_count,
            axis_name=state.devices.worker_axis,
            group=(),
            wire_dtype=state.wire_dtype,
            priority=priority,
            bucket=(*state.results[state.leaf_count if state.kind is Kind.MEASURE else 0 :], ((), "uint32")),
            state=state,
        )

    def attributes(self, ctx: Any, *, by_number_on_host: bool = False) -> CallAttributes:
        """See the base."""
        return state_attributes(ctx, self.state, by_number_on_host=by_number_on_host)

    def check_gpu(self) -> None:
        """See the base."""
        raise ConfigError(f"{self.label}: across_steps around on_reducers is for arrays of the CPU")

    def start(self, operands: Sequence[jax.Array]) -> jax.Array:
        """See the base."""
        return super().start(self.state.rounded(operands))

    @property
    def converted(self) -> PendingState:
        """See the base."""
        return self


def _start_type(*bucket: Any, call: RoundCall) -> tuple[list[Any], set[SideEffect]]:
    return [bucket[0].update(**_TICKET)], {SideEffect(f"psum_start of {call.label}")}


def _done_type(ticket: Any, *, call: RoundCall) -> tuple[list[Any], set[SideEffect]]:
    bucket = [ticket.update(shape=shape, dtype=np.dtype(dtype)) for shape, dtype in call.bucket]
    if call.axis_name is not None and not call.group:
        bucket = [without_varying_axis(aval, call.axis_name) for aval in bucket]
    return bucket, {SideEffect(f"psum_done of {call.label}")}


def _start_attributes(ctx: Any, call: RoundCall, *, by_number_on_host: bool = False) -> StartAttributes:
    attributes = call.attributes(ctx, by_number_on_host=by_number_on_host)
    return StartAttributes(**vars(attributes), priority=np.int64(call.priority))


def _start_converted(*bucket: jax.Array, call: RoundCall) -> list[jax.Array]:
    return [call.converted.start([array.astype(call.wire_dtype) for array in bucket])]


def _done_converted(ticket: jax.Array, *, call: RoundCall) -> list[jax.Array]:
    arrays = zip(call.converted.done(ticket), call.bucket, strict=True)
    return [array.astype(dtype) for array, (_, dtype) in arrays]


# As for other collectives, on a GPU XLA converts to the dtype of the wire, and here the call itself does.
_lower_start_converted = mlir.lower_fun(_start_converted, multiple_results=True)
_lower_done_converted = mlir.lower_fun(_done_converted, multiple_results=True)


def _lower_start(ctx: Any, *bucket: Any, call: RoundCall) -> Any:
    if cuda_stand_in():
        call.check_gpu()
    if cuda_stand_in() and call.wire_dtype:  # as on a GPU
        return _lower_start_converted(ctx, *bucket, call=call)
    return _lower(ctx, bucket, ffi.START, _start_attributes(ctx, call), _START)


def _lower_start_on_stream(ctx: Any, *bucket: Any, call: RoundCall) -> Any:
    call.check_gpu()
    if call.wire_dtype:
        return _lower_start_converted(ctx, *bucket, call=call)
    attributes = _start_attributes(ctx, call, by_number_on_host=True)

    def run(*bucket: Any) -> Any:
        return _lower(ctx, bucket, ffi.START, attributes, _START)[0]

    return [lower_on_gpu_stream(ctx, next_stream(), run, *bucket)]


def _lower_done(ctx: Any, ticket: Any, *, call: RoundCall) -> Any:
    if (devices := program_device_count(ctx)) > 1:
        raise ConfigError(
            f"{call.label}: this program runs on {devices} devices; use psum_done inside jax.shard_map over the axes "
            "that psum_start was used over"
        )
    if cuda_stand_in():
        return _lower_done_on_gpu(ctx, ticket, call=call)
    return _lower_done_on_host(ctx, ticket, call=call)


def _lower_done_on_gpu(ctx: Any, ticket: Any, *, call: RoundCall) -> Any:
    return (_lower_done_converted if call.wire_dtype else _lower_to_packed)(ctx, ticket, call=call)


def _lower_done_on_host(ctx: Any, ticket: Any, *, call: RoundCall) -> Any:
    """Has a first call carry the ticket to the memory of the total, where the second one finds it.

    XLA's CPU runtime gives the memory of an operand to what comes later in the program, and that waits until the call
    is over. Of tickets, it would be another bucket's scalar that waits for this bucket's total.
    """
    if wire_bytes(ctx.avals_out, None) < _TICKET_BYTES:
        return _lower_done_call(ctx, ticket, call=call)
    carry = jax.ffi.ffi_lowering(ffi.DONE)(ctx, ticket, **vars(_done_attributes(call, carries=True)))
    aliases = {index: index for index in range(len(ctx.avals_out))}
    rule = jax.ffi.ffi_lowering(ffi.DONE, has_side_effect=True, operand_output_aliases=aliases)
    with operation_name(ctx, f"{_DONE.name}_{wire_bytes(ctx.avals_out, None)}_bytes"):
        return rule(ctx.replace(avals_in=ctx.avals_out), *carry, **vars(_done_attributes(call)))


def _done_attributes(call: RoundCall, *, carries: bool = False) -> DoneAttributes:
    return DoneAttributes(call.label, np.int64(call.worker_count), np.int64(carries))


def _lower_done_call(ctx: Any, ticket: Any, *, call: RoundCall) -> Any:
    attributes = _done_attributes(call)
    return _lower(ctx, (ticket,), ffi.DONE, attributes, _DONE)


# The other call on a GPU, whose one result has all arrays side by side, in the same shape as in ``primitive``: so XLA
# compiles what is made of it alike. Why one: see ``primitive.run_on_stream``.
_packed = Primitive("jaxhetero_packed_done")


def _packed_type(ticket: Any, *, call: RoundCall) -> Any:
    shapes = [shape for shape, _ in call.bucket]
    shape = shapes[0] if len(shapes) == 1 else (1, sum(map(math.prod, shapes)))
    return ticket.update(shape=shape, dtype=np.dtype(call.bucket[0][1]))


def _take_apart(ticket: jax.Array, *, call: RoundCall) -> list[jax.Array]:
    packed = _packed.bind(ticket, call=call)
    if len(call.bucket) == 1:
        return [packed]
    results, end = [], 0
    for shape, _ in call.bucket:
        start, end = end, end + math.prod(shape)
        results.append(jax.lax.slice_in_dim(packed, start, end, axis=1).reshape(shape))
    return results


def _lower_packed_on_stream(ctx: Any, ticket: Any, *, call: RoundCall) -> Any:
    def run(ticket: Any) -> Any:
        return _lower_done_call(ctx, ticket, call=call)[0]

    return [lower_on_gpu_stream(ctx, next_stream(), run, ticket)]


_lower_to_packed = mlir.lower_fun(_take_apart, multiple_results=True)


def _lower(ctx: Any, operands: Sequence[Any], target: str, attributes: Any, primitive: Primitive) -> Any:
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True)
    arrays = ctx.avals_out if primitive is _DONE else ctx.avals_in
    with operation_name(ctx, f"{primitive.name}_{wire_bytes(arrays, None)}_bytes"):
        return rule(ctx, *operands, **vars(attributes))


def _refuse_batch(bucket: Sequence[Any], dims: Sequence[Any], *, call: RoundCall) -> Any:
    del bucket, dims
    raise ConfigError(f"{call.label}: jax.vmap cannot go through psum_start and psum_done; call them outside of it")


def _jvp(primitive: Primitive) -> Any:
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: RoundCall) -> Any:
        if any(not isinstance(tangent, ad.Zero) for tangent in tangents):
            raise ConfigError(
                f"{call.label}: psum_start has no derivative, since its total may come in another program; start what "
                "has been differentiated, or give it jax.lax.stop_gradient(x)"
            )
        outputs = primitive.bind(*primals, call=call)
        return outputs, [ad.Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]

    return jvp


for _primitive, _type in ((_START, _start_type), (_DONE, _done_type)):
    _primitive.multiple_results = True
    _primitive.def_impl(as_program(_primitive, ("call",)))
    _primitive.def_effectful_abstract_eval(_type)
    batching.primitive_batchers[_primitive] = _refuse_batch
    ad.primitive_jvps[_primitive] = _jvp(_primitive)
register_lowering(_START, _lower_start)
register_lowering(_START, _lower_start_on_stream, platform="cuda")
register_lowering(_DONE, _lower_done)
register_lowering(_DONE, _lower_done_on_gpu, platform="cuda")
_packed.def_abstract_eval(_packed_type)
register_lowering(_packed, _lower_done_call)
register_lowering(_packed, _lower_packed_on_stream, platform="cuda")
