"""The devices of one worker that share a call: their arrays are summed, one makes the call, all get its results."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero._collectives.axis_groups import AxisGroups
from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.mesh_axes import ReducedAxes


@dataclass(frozen=True)
class WorkerDevices:
    """The devices of each worker under ``jax.shard_map``.

    Attributes:
      worker_axis: the mesh axis of the workers; None where the mesh does not span workers.
      along: how many devices of each worker lie side by side along that axis.
      axes: the other axes, in the order of the mesh.
      count: of the devices of a worker.
    """

    worker_axis: str | None = None
    along: int = 1
    axes: tuple[str, ...] = ()
    count: int = 1

    @classmethod
    def of(cls, axes: ReducedAxes) -> WorkerDevices:
        """Those that a collective over ``axes`` reduces over."""
        names = tuple(name for name in jax.sharding.get_abstract_mesh().shape if name in axes.local_axes)
        return cls(axes.worker_axis, axes.devices_along, names, axes.devices_per_worker)

    @property
    def own_number(self) -> jax.Array:
        """The number of this device among those of its worker, which is its column: see ``mesh_axes.make_columns``."""
        number = jnp.int32(0) if self.along == 1 else jax.lax.axis_index(self.worker_axis) % self.along
        for name in self.axes:
            number = number * jax.lax.axis_size(name) + jax.lax.axis_index(name)
        return number

    def sum(self, array: jax.Array) -> jax.Array:
        """Over the devices of each worker."""
        if array.size == 0:  # XLA refuses empty arrays
            return array
        if self.worker_axis is not None and self.along > 1:
            (array,) = AxisGroups(self.worker_axis, self.along).run([array], Kind.SUM, list)
        return jax.lax.psum(array, self.axes) if self.axes else array

    def share(self, array: jax.Array, number: int) -> jax.Array:
        """What the device of this number has, for all devices of its worker, bit by bit."""
        unsigned = np.dtype(f"uint{8 * array.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(array, unsigned)
        shared = self.sum(jnp.where(self.own_number == number, bits, jnp.zeros_like(bits)))
        return jax.lax.bitcast_convert_type(shared, array.dtype)
