"""Reductions along an axis on which several devices of each worker lie side by side.

XLA reduces inside each worker, between the devices of a group. Then each device of a worker reduces its part of the
bucket with the devices at its place in the other workers, so that each byte is sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero._collectives.kinds import Kind

Bind = Callable[[Sequence[jax.Array]], list[jax.Array]]


def extreme(
    array: jax.Array, axes: str | tuple[str, ...], kind: Kind, groups: Sequence[Sequence[int]] | None = None
) -> jax.Array:
    """The maximum or minimum over the devices of a worker, or of each group; NaN where one of them has it."""
    reduce: Any = jax.lax.pmax if kind is Kind.MAX else jax.lax.pmin
    found: jax.Array = reduce(array, axes, axis_index_groups=groups)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return found
    # XLA's all-reduce on the CPU keeps or loses a NaN depending on which device has it.
    has_nan = jax.lax.pmax(jnp.isnan(array), axes, axis_index_groups=groups)
    return jnp.where(has_nan, jnp.nan, found)


@dataclass(frozen=True)
class AxisGroups:
    """The devices of ``axis_name`` in groups of ``size`` neighbours, one group for each worker."""

    axis_name: str
    size: int

    def run(self, bucket: Sequence[jax.Array], kind: Kind, between_workers: Bind) -> list[jax.Array]:
        """Reduce, gather or scatter a bucket along the whole axis.

        Args:
          bucket: as for the primitive of ``kind``; where that has a row for each worker, there is one for each device.
          kind: of the collective. A broadcast takes what the first device of a group has.
          between_workers: the same collective between the devices at the same place of each group.
        """
        if kind is Kind.GATHER:
            return [self._join_rows(row) for row in between_workers(bucket)]
        if kind is Kind.SCATTER:
            return between_workers([self._sum_rows(rows) for rows in bucket])
        parts = [self.own_part(array, kind) for array in bucket]
        return [self.join_parts(part, whole) for part, whole in zip(between_workers(parts), bucket, strict=True)]

    @property
    def _lists(self) -> list[list[int]]:
        devices = range(jax.lax.axis_size(self.axis_name))
        return [list(devices[begin : begin + self.size]) for begin in devices[:: self.size]]

    def own_part(self, array: jax.Array, kind: Kind) -> jax.Array:
        """This device's equal part of its worker's reduced array, as a vector; padding at the end is zeros."""
        if kind is Kind.BROADCAST and array.size > 0:  # XLA refuses empty arrays
            array = jax.lax.all_gather(array, self.axis_name, axis_index_groups=self._lists)[0]
        elif kind is not Kind.SUM:
            array = extreme(array, self.axis_name, kind, self._lists)
        flat = jnp.pad(array.reshape(-1), (0, -array.size % self.size))
        if kind is Kind.SUM and array.size > 0:
            part: jax.Array = jax.lax.psum_scatter(flat, self.axis_name, tiled=True, axis_index_groups=self._lists)
            return part
        own = jax.lax.axis_index(self.axis_name) % self.size
        row: jax.Array = jax.lax.dynamic_index_in_dim(flat.reshape(self.size, -1), own, keepdims=False)
        return row

    def join_parts(self, part: jax.Array, whole: jax.Array) -> jax.Array:
        """The array that has the parts of these devices, in the shape of ``whole``."""
        if whole.size == 0:
            return whole
        joined = jax.lax.all_gather(part, self.axis_name, tiled=True, axis_index_groups=self._lists)
        shaped: jax.Array = joined[: whole.size].reshape(whole.shape)
        return shaped

    def _join_rows(self, rows: jax.Array) -> jax.Array:
        """From ``[workers, ...]`` on each device to ``[devices, ...]``."""
        if rows.size == 0:
            return jnp.zeros((rows.shape[0] * self.size, *rows.shape[1:]), rows.dtype)
        joined: jax.Array = jax.lax.all_gather(rows, self.axis_name, axis=1, axis_index_groups=self._lists)
        return joined.reshape(-1, *rows.shape[1:])

    def _sum_rows(self, rows: jax.Array) -> jax.Array:
        """From ``[devices, ...]`` to the sums of this device's ``[workers, ...]``."""
        by_worker = rows.reshape(rows.shape[0] // self.size, self.size, *rows.shape[1:])
        if rows.size == 0:
            return by_worker[:, 0]
        own: jax.Array = jax.lax.psum_scatter(
            by_worker, self.axis_name, scatter_dimension=1, axis_index_groups=self._lists
        )
        return own
