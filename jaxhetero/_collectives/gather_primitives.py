"""The primitives of ``all_gather`` and ``psum_scatter``, made of the primitives in ``primitive``.

Each is the transpose of the other. The gathered side always has a new first axis of all workers; ``collectives`` moves
that axis to where the user wants it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxhetero._collectives import rules
from jaxhetero._collectives.primitive import Kind, all_reduce
from jaxhetero._compat import without_varying_axis

_all_gather_p = Primitive("jaxhetero_all_gather")
_psum_scatter_p = Primitive("jaxhetero_psum_scatter")


def all_gather(
    bucket: Sequence[jax.Array], *, label: str, worker_count: int, axis_name: str | None, invariant: bool
) -> list[jax.Array]:
    """Stack each array of all workers along a new first axis, by rank.

    Args:
      bucket: arrays of one dtype.
      label, worker_count, axis_name: as in ``primitive.all_reduce``.
      invariant: the results no longer vary over ``axis_name``.
    """
    outputs: list[jax.Array] = _all_gather_p.bind(
        *bucket, label=label, worker_count=worker_count, axis_name=axis_name, invariant=invariant
    )
    return outputs


def psum_scatter(
    bucket: Sequence[jax.Array], *, label: str, worker_count: int, axis_name: str | None
) -> list[jax.Array]:
    """Sum over all workers; each keeps the row of its rank.

    Args:
      bucket: arrays of one dtype with a first axis of ``worker_count``.
      label, worker_count, axis_name: as in ``primitive.all_reduce``.
    """
    outputs: list[jax.Array] = _psum_scatter_p.bind(
        *bucket, label=label, worker_count=worker_count, axis_name=axis_name
    )
    return outputs


def _gather_by_broadcasts(
    *bucket: jax.Array, label: str, worker_count: int, axis_name: str | None, invariant: bool
) -> list[jax.Array]:
    """One broadcast from each rank: a worker sends its own arrays once, and receives those of every other worker."""
    del invariant
    rows = [
        all_reduce(
            bucket,
            label=f"{label} from rank {root}",
            kind=Kind.BROADCAST,
            root=root,
            worker_count=worker_count,
            axis_name=axis_name,
        )
        for root in range(worker_count)
    ]
    return [jnp.stack(leaves) for leaves in zip(*rows, strict=True)]


def _sum_and_slice(*bucket: jax.Array, label: str, worker_count: int, axis_name: str | None) -> list[jax.Array]:
    totals = all_reduce(bucket, label=label, kind=Kind.SUM, root=0, worker_count=worker_count, axis_name=axis_name)
    return [_row(total, axis_name) for total in totals]


def _row(array: jax.Array, axis_name: str | None) -> jax.Array:
    row: jax.Array = jax.lax.dynamic_index_in_dim(array, rules.own_index(axis_name), keepdims=False)
    return row


def _gather_abstract_eval(
    *bucket: Any, worker_count: int, axis_name: str | None, invariant: bool, **_: Any
) -> list[Any]:
    results = [aval.update(shape=(worker_count, *aval.shape), weak_type=False) for aval in bucket]
    return [without_varying_axis(aval, axis_name) for aval in results] if invariant and axis_name else results


def _scatter_abstract_eval(*bucket: Any, **_: Any) -> list[Any]:
    return [aval.update(shape=aval.shape[1:], weak_type=False) for aval in bucket]


def _gather_batch(bucket: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[Any]]:
    return all_gather(bucket, **params), [None if dim is None else dim + 1 for dim in dims]


def _scatter_batch(bucket: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[Any]]:
    arrays = [array if dim is None else jnp.moveaxis(array, dim, 1) for array, dim in zip(bucket, dims, strict=True)]
    return psum_scatter(arrays, **params), [None if dim is None else 0 for dim in dims]


def _gather_transpose(cotangents: Sequence[Any], *bucket: Any, invariant: bool, **params: Any) -> list[Any]:
    typed = any(rules.varies(operand.aval, params["axis_name"]) for operand in bucket)
    transpose = functools.partial(_own_rows, typed=typed) if invariant else psum_scatter
    return rules.map_nonzero(transpose, cotangents, rules.zero_cotangents(bucket), params, "cotangents")


def _own_rows(arrays: Sequence[jax.Array], *, typed: bool, axis_name: str | None, **_: Any) -> list[jax.Array]:
    """The transpose without a sum: the cotangent of a result that all workers share is itself shared."""
    return [_row(jax.lax.pcast(array, axis_name, to="varying") if typed else array, axis_name) for array in arrays]


def _scatter_transpose(cotangents: Sequence[Any], *bucket: Any, **params: Any) -> list[Any]:
    gather = functools.partial(all_gather, invariant=False)
    return rules.map_nonzero(gather, cotangents, rules.zero_cotangents(bucket), params, "cotangents")


rules.define(_all_gather_p, _gather_abstract_eval, _gather_batch)
rules.define(_psum_scatter_p, _scatter_abstract_eval, _scatter_batch)
rules.define_linear(_all_gather_p, all_gather, _gather_transpose)
rules.define_linear(_psum_scatter_p, psum_scatter, _scatter_transpose)
mlir.register_lowering(_all_gather_p, mlir.lower_fun(_gather_by_broadcasts, multiple_results=True))
mlir.register_lowering(_psum_scatter_p, mlir.lower_fun(_sum_and_slice, multiple_results=True))
