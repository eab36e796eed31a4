"""Which collectives of a program go over the workers, and along which axes of the program's own mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero import world
from jaxhetero._collectives.mesh_axes import classify
from jaxhetero.errors import ConfigError


@dataclass(frozen=True)
class Scope:
    """The meaning of axis names in the program that is rewritten.

    In a global mesh (``jax.distributed``), JAX knows the devices of all workers, and the mesh says which axes span
    workers. In all other programs JAX knows this worker's devices alone. There, ``worker_axis`` is the name that the
    user has given: the program is traced as if that axis held the devices of all workers, one worker after the other.
    """

    worker_axis: str | None
    """The axis that counts as over all workers; None in a global mesh."""
    local_count: int
    """How many devices of this worker lie along ``worker_axis``."""
    in_mesh: bool
    """Whether the program's own mesh has that axis, with ``local_count`` devices."""

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """The axis as the program shall see it while it is traced."""
        return [] if self.worker_axis is None else [(self.worker_axis, self.local_count * world.size())]

    def spans_workers(self, axes: Sequence[Any], label: str) -> bool:
        """Whether a collective over these axes goes over the workers."""
        if self.worker_axis is not None:
            return self.worker_axis in axes
        names = tuple(axis for axis in axes if isinstance(axis, str))
        return jax.process_count() > 1 and classify(names, label).spans_workers

    def mesh_axes(self, axes: Sequence[str]) -> tuple[str, ...] | None:
        """Those of ``axes`` that the program's own mesh has; None for none."""
        return tuple(name for name in axes if self.in_mesh or name != self.worker_axis) or None

    def own_index(self) -> Any:
        """This device's place along ``worker_axis``."""
        # Behind a barrier, XLA computes nothing from it while it compiles: it makes the same program on all workers.
        first = jax.lax.optimization_barrier(jnp.int32(world.rank() * self.local_count))
        return first + jax.lax.axis_index(self.worker_axis) if self.in_mesh else first


def make_scope(axis_name: str | None) -> Scope:
    """The scope of a program that is traced in the mesh of the caller.

    Args:
      axis_name: the axis that the user says goes over all workers.
    """
    if axis_name is None:
        return Scope(None, 1, in_mesh=False)
    size = _size_in_mesh(axis_name)
    if size is None:
        return Scope(axis_name, 1, in_mesh=False)
    if jax.process_count() > 1:  # an axis of a global mesh
        return Scope(None, 1, in_mesh=False)
    return Scope(axis_name, size, in_mesh=True)


def _size_in_mesh(axis_name: str) -> int | None:
    try:
        return int(jax.lax.axis_size(axis_name))
    except NameError:
        return None


def check_axis_name(axis_name: str | None) -> None:
    """``ConfigError`` for anything but one name, or None."""
    if axis_name is not None and not isinstance(axis_name, str):
        raise ConfigError(f"offload: axis_name is {axis_name!r}; it must be the name of one axis")
