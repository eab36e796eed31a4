"""Which mesh axis is made of the workers, and which axes lie inside one worker."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxhetero._job import world
from jaxhetero.errors import ConfigError

AxisName = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ReducedAxes:
    """The axes that a collective reduces over: the workers, the devices inside each worker, or both."""

    worker_axis: str | None
    """The mesh axis along which the workers lie, one after the other; None where the mesh does not span workers."""
    local_axes: tuple[str, ...]
    """The axes whose devices all belong to one worker."""
    local_count: int
    """How many devices of one worker lie along ``local_axes``."""
    spans_workers: bool
    """Whether the collective reduces over the workers."""
    devices_along: int = 1
    """How many devices of each worker lie side by side along ``worker_axis``."""
    worker_position: int = 0
    """The position of the workers among the named axes, for collectives whose result depends on the order."""
    group: tuple[int, ...] = ()
    """The ranks of the workers that take part, in order; empty for all."""
    order: tuple[int, ...] = ()
    """Of each row of a gather or a scatter, its number in the order of the mesh; empty where all groups have that."""
    local_groups: tuple[tuple[int, ...], ...] = ()
    """Groups of places along ``local_axes``, as ``jax.lax`` takes them; empty for one of all."""

    @property
    def are_named(self) -> bool:
        """Whether the caller has named mesh axes."""
        return self.worker_axis is not None or self.local_axes != ()

    @property
    def count(self) -> int:
        """How many contributions a sum has."""
        return self.devices_per_worker * ((len(self.group) or world.capacity()) if self.spans_workers else 1)

    @property
    def devices_per_worker(self) -> int:
        """How many devices of one worker contribute."""
        return self.local_count * self.devices_along


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """``axis_name`` as a tuple, as given: no name, one, or several."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def classify_group(workers: Sequence[int], axis_name: AxisName, label: str) -> ReducedAxes:
    """The group of a call that names its workers by their ranks and no axes."""
    size = world.capacity()
    ranks = tuple(sorted(map(operator.index, workers)))
    if axis_name is not None:
        raise ConfigError(
            f"{label}: workers is {ranks} and axis_name is {axis_name!r}; name the workers by their ranks or by a mesh "
            "axis, not by both"
        )
    if len(set(ranks)) < len(ranks) or any(not 0 <= rank < size for rank in ranks):
        raise ConfigError(f"{label}: workers is {ranks}; it must be different ranks of 0..{size - 1}")
    if world.rank() not in ranks:
        raise ConfigError(
            f"{label}: workers is {ranks}, and this is rank {world.rank()}; only the workers of a group call"
        )
    group = ranks if len(ranks) < size else ()  # an op of all workers is one without a group
    return ReducedAxes(None, (), 1, spans_workers=len(ranks) > 1, group=group)


def classify(axis_name: AxisName, label: str, ranks: Sequence[int] | None = None) -> ReducedAxes:
    """Sort the axes of a call into the workers' axis and the axes inside a worker.

    ``ranks``: in place of axes, those of the workers that take part.

    A JAX process whose mesh has only its own devices reduces over all of ``axis_name`` and over the workers. In a
    global mesh, made with ``jax.distributed``, the workers' axis is the first axis with as many devices as there are
    workers, or else with a multiple of that. ``make_columns`` checks that when the program is compiled.
    """
    if ranks is not None:
        return classify_group(ranks, axis_name, label)
    names = axis_names(axis_name)
    if positional := [name for name in names if isinstance(name, int)]:
        raise ConfigError(
            f"{label}: axis_name has {positional[0]}, a position; reduce over array axes first, for example with "
            "jnp.sum, and name mesh axes here"
        )
    sizes = {name: int(jax.lax.axis_size(name)) for name in names}
    mesh_sizes = jax.sharding.get_abstract_mesh().shape
    # An axis of vmap may have the name of a mesh axis. This is seen only if their sizes differ.
    if foreign := [name for name, size in sizes.items() if mesh_sizes.get(name) != size]:
        raise ConfigError(
            f"{label}: axis {foreign[0]!r} is not one of a mesh under jax.shard_map but of jax.vmap; reduce over that "
            "with jax.lax first"
        )
    workers = world.capacity()
    process_count = jax.process_count()
    is_meant = workers > 1 or world.current().config.alone
    if process_count == 1 or (not names and is_meant):
        return ReducedAxes(None, names, math.prod(sizes.values()), spans_workers=workers > 1)
    if process_count != workers:
        hint = "" if is_meant else "; if each is meant to be alone, give jaxhetero.initialize(alone=True)"
        raise ConfigError(
            f"{label}: there are {process_count} JAX processes, but worker_count is {workers}; make every process "
            "of jax.distributed a worker of its own: call jaxhetero.initialize() after jax.distributed.initialize()"
            + hint
        )
    if jax.process_index() != world.rank():
        raise ConfigError(
            f"{label}: rank {world.rank()} is process {jax.process_index()} of jax.distributed; give every worker the "
            "same number in both"
        )
    candidates = [name for name, size in mesh_sizes.items() if size % workers == 0]
    worker_axis = min(candidates, key=lambda name: mesh_sizes[name] != workers, default=None)
    local = tuple(name for name in names if name != worker_axis)
    local_count = math.prod(sizes[name] for name in local)
    if local_count > jax.local_device_count():
        raise ConfigError(
            f"{label}: axes {', '.join(map(repr, local))} hold {local_count} devices, more than the "
            f"{jax.local_device_count()} of one worker; make the mesh with an axis of {workers} for the workers, "
            "first, and other axes for the devices of a worker"
        )
    if worker_axis not in names:
        return ReducedAxes(None, local, local_count, spans_workers=False)
    return ReducedAxes(
        worker_axis,
        local,
        local_count,
        spans_workers=True,
        devices_along=mesh_sizes[worker_axis] // workers,
        worker_position=names.index(worker_axis),
    )


Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh | None


def is_in_rank_order(mesh: Mesh, worker_axis: str | None, devices_along: int) -> bool:
    """Whether the next worker along ``worker_axis`` is the next rank, as far as ``mesh`` tells."""
    if mesh is None or worker_axis is None:
        return True
    return isinstance(mesh, jax.sharding.Mesh) and _is_ordered(_owners(_rows(mesh, worker_axis, devices_along)))


def make_columns(
    mesh: Mesh, worker_axis: str | None, devices_along: int, label: str, *, in_order: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The device ids of ``mesh`` and the column of each device: int64 arrays, empty where one device needs no column.

    The devices of a column, one in each worker, reduce together. ``in_order``: the next worker along ``worker_axis``
    must be the next rank, which a sum does not need. ``devices_along``: as in ``ReducedAxes``.
    """
    if mesh is None or mesh.size == 1:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        if devices_along == 1 and mesh.size == mesh.shape.get(worker_axis, 1) and not in_order:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)  # one device of each worker: one column
        # Without columns, a device would reduce with any device of another worker, whichever comes first.
        raise ConfigError(
            f"{label}: of the mesh of this jax.shard_map only the shape is known, and not which device is where in it, "
            "as inside another jax.shard_map; call the program in a block of jax.set_mesh(mesh)"
        )
    if worker_axis is None:
        ids = np.array([device.id for device in mesh.devices.flat], np.int64)
        return ids, np.arange(ids.size, dtype=np.int64)
    rows = _rows(mesh, worker_axis, devices_along)
    owners = _owners(rows)
    one_each = all(len(owner) == 1 for owner in owners) and len(set.union(*owners)) == len(owners)
    if not one_each or (in_order and not _is_ordered(owners)):
        raise ConfigError(
            f"{label}: along mesh axis {worker_axis!r} the devices do not belong to one worker each "
            "side by side; make the mesh with the workers as its first axis, in the order of jax.devices()"
        )
    ids = np.array([device.id for device in rows.flat], np.int64)
    return ids, np.tile(np.arange(rows.shape[1], dtype=np.int64), rows.shape[0])


def _rows(mesh: jax.sharding.Mesh, worker_axis: str, devices_along: int) -> np.ndarray:
    """The devices of each worker along ``worker_axis``."""
    count = mesh.shape[worker_axis] // devices_along
    return np.moveaxis(mesh.devices, mesh.axis_names.index(worker_axis), 0).reshape(count, -1)


def _owners(rows: np.ndarray) -> list[set[int]]:
    return [{device.process_index for device in row} for row in rows]


def _is_ordered(owners: list[set[int]]) -> bool:
    return owners == [{rank} for rank in range(len(owners))]
