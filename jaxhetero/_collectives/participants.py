"""Who has taken part in a sum. In an elastic job that is known only when the sum is there.

Each bucket carries a row with a place for every rank, where each worker puts 1 in its own, and its weight in another
one. The total of the row tells the participants of this very bucket, on every device alike: what a worker contributes
counts wholly or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero._collectives import rules
from jaxhetero._collectives.mesh_axes import ReducedAxes
from jaxhetero._collectives.wire_dtypes import is_narrow_float, round_for_wire, sum_dtype
from jaxhetero._job import world


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Who:
    """Who has taken part in a collective: arrays that are the same on all workers.

    Example:
      >>> total, who = jaxhetero.psum(jnp.ones(3), who=True)
      >>> int(who.count), bool(who.same)
      (1, True)
    """

    count: jax.Array
    """How many workers have taken part in all buckets: int32."""
    weight: jax.Array
    """The sum of their weights: float32. A worker that gives none has 1."""
    same: jax.Array
    """Whether all buckets have the same participants: bool. They have not if a worker was lost between two of them."""
    ranks: jax.Array
    """For each rank, whether it has taken part in all buckets: a vector of bool."""


class Tally:
    """Counts the participants of one call of a sum, and makes it a mean.

    Args:
      weight: of this worker's contribution, a scalar; None for 1.
      mean: whether sums are divided by the weights of their participants.
      local_axes: the mesh axes inside the worker that the sum goes over as well.
    """

    def __init__(self, weight: Any, mean: bool, local_axes: tuple[str, ...]) -> None:
        self._mean = mean
        self._has_weight = weight is not None
        # Of all devices of the worker. As a float: sums of small integers, or of 16 bits, may have no room in those.
        self._weight = None if weight is None else _sum_locally(_as_float(weight), local_axes)
        self._devices = 1
        for name in local_axes:
            self._devices *= int(jax.lax.axis_size(name))
        self._rows: list[jax.Array] = []

    def own_row(self, dtype: Any) -> jax.Array:
        """What this worker adds to a bucket."""
        with jax.transfer_guard("allow"):
            own = jnp.arange(world.capacity(), dtype=jnp.int32) == rules.own_rank()
            if self._weight is None:
                return own.astype(dtype)
            return jnp.concatenate([own.astype(dtype), jnp.where(own, self._weight, 0).astype(dtype)])

    def count(
        self,
        totals: Sequence[jax.Array],
        rows: Sequence[jax.Array],
        buckets: Sequence[Sequence[int]],
        shared: ReducedAxes | None,
    ) -> list[jax.Array]:
        """Take the rows of all buckets; the sums, or the means.

        Args:
          totals: of all leaves.
          rows: the total of each bucket's row.
          buckets: the leaves of each bucket.
          shared: where each device of a worker has a part of the leaves, and rows of its own, the axes of the call.
        """
        results = list(totals)
        for bucket, row in zip(buckets, rows, strict=True):
            self._rows += _of_all_devices(row, shared)
            for index in bucket if self._mean else ():
                results[index] = self._divided(results[index], row)
        return results

    def who(self) -> Who:
        """Whom the buckets have counted."""
        if not self._rows:  # nothing was sent
            ranks = jnp.ones(world.capacity(), bool)
            return Who(jnp.int32(world.capacity()), jnp.float32(world.capacity()), jnp.bool_(True), ranks)
        present = jnp.stack([self._present(row) for row in self._rows])
        ranks = present.all(axis=0)
        weights = self._weights(self._rows[0]).astype(jnp.float32)
        return Who(
            count=ranks.sum(dtype=jnp.int32),
            weight=jnp.where(ranks, weights, 0).sum(),
            same=(present == ranks).all(),
            ranks=ranks,
        )

    def _present(self, row: jax.Array) -> jax.Array:
        return row[: world.capacity()] != 0

    def _weights(self, row: jax.Array) -> jax.Array:
        """Of each rank."""
        return jnp.real(row[world.capacity() :] if self._has_weight else row[: world.capacity()])

    def _divided(self, total: jax.Array, row: jax.Array) -> jax.Array:
        """A mean has the dtype that a division by a number has."""
        weights = self._weights(row)
        dtype = sum_dtype(weights.dtype) if jnp.issubdtype(weights.dtype, jnp.floating) else jnp.float32
        divisor = weights.astype(dtype).sum() * (1 if self._has_weight else self._devices)
        if self._has_weight:  # no quotient by infinity, which would be 0 and look like a mean
            divisor = jnp.where(jnp.isfinite(divisor), divisor, jnp.nan)
        result = _quotient_dtype(total.dtype)
        # As XLA divides by a constant, in a job that is not elastic.
        wide = total.astype(jnp.promote_types(result, dtype)) * (1 / divisor)
        return wide.astype(result)


def weighted(leaf: Any, weight: Any, wire_dtype: Any = None) -> jax.Array:
    """A leaf's contribution to a mean with weights: floats stay what they are, and integers become floats.

    The weight is rounded as that in the row of the bucket will be, so that a mean of equal leaves is that leaf.
    """
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        array = array.astype(_quotient_dtype(array.dtype))
    factor = _as_float(weight).astype(array.dtype)
    if is_narrow_float(wire_dtype):
        factor = round_for_wire(factor, wire_dtype)
    return array * factor


def _as_float(weight: Any) -> jax.Array:
    array = jnp.asarray(weight)
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(sum_dtype(array.dtype) if floating else _quotient_dtype(array.dtype))


def _quotient_dtype(dtype: Any) -> Any:
    return jax.eval_shape(jnp.true_divide, jax.ShapeDtypeStruct((), dtype), 1).dtype


def _sum_locally(weight: jax.Array, local_axes: tuple[str, ...]) -> jax.Array:
    if not local_axes:
        return weight
    varying = [name for name in local_axes if not rules.varies(jax.typeof(weight), name)]
    weight = jax.lax.pcast(weight, tuple(varying), to="varying") if varying else weight
    total: jax.Array = jax.lax.psum(weight, local_axes)
    return total


def _of_all_devices(row: jax.Array, shared: ReducedAxes | None) -> list[jax.Array]:
    if shared is None:
        return [row]
    rows = jax.lax.all_gather(row, shared.local_axes, axis=0, to="invarying").reshape(-1, row.size)
    return list(rows)
