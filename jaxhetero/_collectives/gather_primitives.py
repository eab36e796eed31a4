"""The primitives of ``all_gather`` and ``psum_scatter``: one bucket in, one bucket out, one custom call.

Each is the transpose of the other. The gathered side always has a new first axis of all workers; ``collectives`` moves
that axis to where the user wants it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxhetero._collectives import rules
from jaxhetero._collectives.mesh_axes import is_in_rank_order
from jaxhetero._collectives.primitive import PRIMITIVES, Kind, abstract_eval, all_reduce, bind, lower, lower_on_stream
from jaxhetero._collectives.wire_dtypes import wire_bytes
from jaxhetero._compat import program_mesh, register_lowering


def all_gather(
    bucket: Sequence[jax.Array],
    *,
    label: str,
    worker_count: int,
    axis_name: str | None,
    devices_along: int,
    call_bytes: int,
    group: tuple[int, ...],
    invariant: bool,
) -> list[jax.Array]:
    """Stack each array of all workers, or of those of a group, along a new first axis, by rank.

    Args:
      bucket: arrays of one dtype.
      label, worker_count, axis_name, devices_along, group: as in ``primitive.all_reduce``.
      call_bytes: as there; the bytes of the results.
      invariant: the results no longer vary over ``axis_name``.
    """
    return _bind(
        bucket,
        kind=Kind.GATHER,
        label=label,
        worker_count=worker_count,
        axis_name=axis_name,
        devices_along=devices_along,
        in_groups=devices_along > 1,
        call_bytes=call_bytes,
        group=group,
        invariant=invariant,
    )


def psum_scatter(
    bucket: Sequence[jax.Array],
    *,
    label: str,
    worker_count: int,
    axis_name: str | None,
    devices_along: int,
    call_bytes: int,
    group: tuple[int, ...],
) -> list[jax.Array]:
    """Sum over all workers, or over those of a group; each keeps the row of its rank.

    Args:
      bucket: arrays of one dtype with a first axis of the number of workers times ``devices_along``.
      label, worker_count, axis_name, devices_along, call_bytes, group: as in ``primitive.all_reduce``.
    """
    return _bind(
        bucket,
        kind=Kind.SCATTER,
        label=label,
        worker_count=worker_count,
        axis_name=axis_name,
        devices_along=devices_along,
        in_groups=devices_along > 1,
        call_bytes=call_bytes,
        group=group,
        invariant=False,
    )


def _bind(bucket: Sequence[jax.Array], *, label: str, **params: Any) -> list[jax.Array]:
    params = {"root": 0, "wire_dtype": "", **params}
    with jax.named_scope(f"{label}, {wire_bytes(bucket, '')} bytes"):
        return bind(bucket, label=label, **params)


def _sum_and_slice(*bucket: jax.Array, **params: Any) -> list[jax.Array]:
    as_sum = {name: value for name, value in params.items() if name != "invariant"} | {"kind": Kind.SUM}
    return [_row(total, params["axis_name"]) for total in all_reduce(bucket, **as_sum)]


def _row(array: jax.Array, axis_name: str | None) -> jax.Array:
    row: jax.Array = jax.lax.dynamic_index_in_dim(array, rules.own_index(axis_name), keepdims=False)
    return row


def _gather_batch(bucket: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[Any]]:
    return bind(bucket, **params), [None if dim is None else dim + 1 for dim in dims]


def _scatter_batch(bucket: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[Any]]:
    arrays = [array if dim is None else jnp.moveaxis(array, dim, 1) for array, dim in zip(bucket, dims, strict=True)]
    return bind(arrays, **params), [None if dim is None else 0 for dim in dims]


def _gather_transpose(cotangents: Sequence[Any], *bucket: Any, **params: Any) -> list[Any]:
    typed = any(rules.varies(operand.aval, params["axis_name"]) for operand in bucket)
    transpose = functools.partial(_own_rows, typed=typed) if params["invariant"] else _bind
    as_scatter = {**params, "kind": Kind.SCATTER, "invariant": False}
    return rules.map_nonzero(transpose, cotangents, rules.zero_cotangents(bucket), as_scatter, "cotangents")


def _own_rows(arrays: Sequence[jax.Array], *, typed: bool, axis_name: str | None, **_: Any) -> list[jax.Array]:
    """The transpose without a sum: the cotangent of a result that all workers share is itself shared."""
    return [_row(jax.lax.pcast(array, axis_name, to="varying") if typed else array, axis_name) for array in arrays]


def _scatter_transpose(cotangents: Sequence[Any], *bucket: Any, **params: Any) -> list[Any]:
    as_gather = {**params, "kind": Kind.GATHER}
    return rules.map_nonzero(_bind, cotangents, rules.zero_cotangents(bucket), as_gather, "cotangents")


def _where_in_rank_order(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """``lowering``, but a sum and a slice where the place along the workers' axis may be another than the rank."""

    def rule(ctx: Any, *bucket: Any, **params: Any) -> Any:
        in_order = is_in_rank_order(program_mesh(ctx), params["axis_name"], params["devices_along"])
        chosen = lowering if in_order else mlir.lower_fun(_sum_and_slice, multiple_results=True)
        return chosen(ctx, *bucket, **params)

    return rule


rules.define(PRIMITIVES[Kind.GATHER], abstract_eval, _gather_batch)
rules.define(PRIMITIVES[Kind.SCATTER], abstract_eval, _scatter_batch)
rules.define_linear(PRIMITIVES[Kind.GATHER], _bind, _gather_transpose)
rules.define_linear(PRIMITIVES[Kind.SCATTER], _bind, _scatter_transpose)
register_lowering(PRIMITIVES[Kind.GATHER], lower)
register_lowering(PRIMITIVES[Kind.GATHER], lower_on_stream, platform="cuda")
register_lowering(PRIMITIVES[Kind.SCATTER], _where_in_rank_order(lower))
register_lowering(PRIMITIVES[Kind.SCATTER], _where_in_rank_order(lower_on_stream), platform="cuda")
