"""Which collectives of a program go over the workers, and along which axes of the program's own mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero._collectives.mesh_axes import classify
from jaxhetero._job import world
from jaxhetero.errors import ConfigError


@dataclass(frozen=True)
class Scope:
    """The meaning of axis names in the program that is rewritten.

    In a global mesh (``jax.distributed``), JAX knows the devices of all workers, and the mesh says which axes span
    workers. In all other programs JAX knows this worker's devices alone. There, the program is traced as if
    ``worker_axis`` held the devices of all workers, one worker after the other.
    """

    axis_name: str | None
    """The name that the user has given."""
    worker_axis: str | None
    """The axis that counts as over all workers; None in a global mesh."""
    local_count: int = 1
    """How many devices of this worker lie along ``worker_axis``."""
    in_mesh: bool = False
    """Whether the program's own mesh has that axis, with ``local_count`` devices."""
    unclear: tuple[str, ...] = ()
    """Axes of this worker's own mesh, one of which may be meant to go over the workers: nobody has said which."""

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """The axis as the program shall see it while it is traced."""
        return [] if self.worker_axis is None else [(self.worker_axis, self.local_count * world.size())]

    def spans_workers(self, axes: Sequence[Any], label: str) -> bool:
        """Whether a collective over these axes goes over the workers."""
        if self.worker_axis is not None:
            return self.worker_axis in axes
        mapped = mapped_axes()
        names = tuple(axis for axis in axes if axis in mapped)  # those of jax.vmap are within this device
        is_unclear = self.unclear if names else not mapped and any(isinstance(axis, str) for axis in axes)
        if is_unclear and world.size() > 1:
            raise ConfigError(
                f"offload: which axis goes over the workers is not clear for {label}, which goes over {listed(axes)}; "
                "give offload the argument axis_name"
            )
        return jax.process_count() > 1 and names != () and classify(names, label).spans_workers

    def is_without_workers(self) -> bool:
        """Whether the mesh has no axis that could span the workers, as one that has devices of one worker alone."""
        sizes = jax.sharding.get_abstract_mesh().shape.values()
        return self.worker_axis is None and bool(sizes) and all(size % world.size() for size in sizes)

    def mesh_axes(self, axes: Sequence[str]) -> tuple[str, ...] | None:
        """Those of ``axes`` that the program's own mesh has; None for none."""
        return tuple(name for name in axes if self.in_mesh or name != self.worker_axis) or None

    def own_index(self) -> Any:
        """This device's place along ``worker_axis``."""
        # Behind a barrier, XLA computes nothing from it while it compiles: it makes the same program on all workers.
        first = jax.lax.optimization_barrier(jnp.int32(world.rank() * self.local_count))
        return first + jax.lax.axis_index(self.worker_axis) if self.in_mesh else first


def make_scope(axis_name: str | None, mapped: Mapping[str, int], free: Sequence[str] = ()) -> Scope:
    """The scope of a program.

    Args:
      axis_name: the axis that the user says goes over all workers.
      mapped: the axes of the mesh in which the program runs, and how many devices lie along each; see ``mapped_axes``.
      free: the axes of the program that nothing maps.
    """
    if axis_name is None and len(free) > 1:
        raise ConfigError(
            f"offload: nothing maps the axes {listed(free)}; give offload the argument axis_name, the one of them that "
            "goes over all workers"
        )
    if jax.process_count() == 1:
        found = axis_name if axis_name is not None or len(mapped) != 1 else next(iter(mapped))
        if found is not None and found in mapped:
            return Scope(axis_name, found, mapped[found], in_mesh=True)
    elif axis_name in mapped or (axis_name is None and mapped):
        return Scope(axis_name, None)
    name = axis_name if axis_name is not None else next(iter(free), None)
    return Scope(axis_name, name, unclear=tuple(mapped) if axis_name is None else ())


def mapped_axes() -> dict[str, int]:
    """The axes of the mesh under whose ``jax.shard_map`` or ``jax.pmap`` the caller runs, and their devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.manual_axes}


def is_for_this_worker(mesh: Any) -> bool:
    """Whether ``mesh`` has devices of this worker alone, although JAX knows those of all: its sums are local ones."""
    return jax.process_count() > 1 and isinstance(mesh, jax.sharding.Mesh) and not mesh.is_multi_process


def listed(names: Iterable[str]) -> str:
    """``'a', 'b'``."""
    return ", ".join(sorted(map(repr, names)))


def check_axis_name(axis_name: str | None) -> None:
    """``ConfigError`` for anything but one name, or None."""
    if axis_name is not None and not isinstance(axis_name, str):
        raise ConfigError(f"offload: axis_name is {axis_name!r}; it must be the name of one axis")
