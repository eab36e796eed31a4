"""Groups of places along the axes of a collective, as ``axis_index_groups`` of ``jax.lax`` names them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxhetero._collectives.mesh_axes import AxisName, ReducedAxes, axis_names, classify
from jaxhetero._job import world
from jaxhetero.errors import ConfigError

IndexGroups = Sequence[Sequence[int]] | None
Groups = tuple[tuple[int, ...], ...]


def classify_in_groups(
    axis_name: AxisName,
    axis_index_groups: IndexGroups,
    label: str,
    workers: Sequence[int] | None = None,
    *,
    of_one_size: bool = True,
) -> ReducedAxes:
    """As ``classify``, for a collective inside the group of each place.

    Groups are made of whole workers, of which this worker knows its own group, or each lies inside one worker.
    """
    axes = classify(axis_name, label, workers)
    if axis_index_groups is None:
        return axes
    if workers is not None:
        raise ConfigError(f"{label}: both workers and axis_index_groups name groups; give one of them")
    groups = check_groups(axis_index_groups, axes, label, of_one_size=of_one_size)
    if not axes.spans_workers:
        return _inside(axes.local_axes, groups)
    owners = [{_worker_of(place, axes) for place in group} for group in groups]
    own = next(index for index, ranks in enumerate(owners) if world.rank() in ranks)
    if all(len(ranks) == 1 for ranks in owners):
        if axes.worker_axis is not None:
            return _inside(axis_names(axis_name), groups)
        return _inside(axes.local_axes, _alike_in_workers(groups, axes, label))
    if any(len(group) < len(ranks) * axes.devices_per_worker for group, ranks in zip(groups, owners, strict=True)):
        raise ConfigError(
            f"{label}: axis_index_groups {groups} cuts workers, of which each has {axes.devices_per_worker} devices "
            f"along {axis_name!r}; make groups of whole workers, or groups inside each, or reduce over the devices of "
            "a worker with jax.lax first"
        )
    ranks, group = sorted(owners[own]), groups[own]
    are_sorted = all(list(group) == sorted(group) for group in groups)
    return replace(
        axes,
        group=tuple(ranks) if len(ranks) < world.capacity() else (),
        order=() if are_sorted else tuple(sorted(group).index(place) for place in group),
    )


def check_groups(
    axis_index_groups: Sequence[Sequence[int]], axes: ReducedAxes, label: str, *, of_one_size: bool
) -> Groups:
    """The groups, if each place of ``axes`` is in one of them."""
    groups = tuple(tuple(map(operator.index, group)) for group in axis_index_groups)
    if sorted(place for group in groups for place in group) != list(range(axes.count)) or () in groups:
        raise ConfigError(
            f"{label}: axis_index_groups is {groups}; each of the places 0..{axes.count - 1} must be in one group"
        )
    if of_one_size and len({len(group) for group in groups}) > 1:
        raise ConfigError(f"{label}: axis_index_groups is {groups}; the groups must be of one size")
    return groups


def _alike_in_workers(groups: Groups, axes: ReducedAxes, label: str) -> Groups:
    """The groups inside each worker, by places among its own devices, where JAX knows these alone."""
    by_worker: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_worker.setdefault(group[0] // axes.local_count, []).append(
            tuple(place % axes.local_count for place in group)
        )
    alike = {tuple(sorted(own)) for own in by_worker.values()}
    if len(alike) > 1:  # XLA may order calls otherwise in another program, and workers would wait for each other
        raise ConfigError(
            f"{label}: axis_index_groups is {groups}, groups that lie inside each worker and differ from worker to "
            "worker; in a mesh of a worker's own devices give every worker the same groups, in the same order"
        )
    return alike.pop()


def _inside(names: tuple[str, ...], groups: Groups) -> ReducedAxes:
    """A collective that XLA runs inside each worker."""
    if all(len(group) == 1 for group in groups):
        return ReducedAxes(None, (), 1, spans_workers=False)
    return ReducedAxes(None, names, len(groups[0]), spans_workers=False, local_groups=groups)


def _worker_of(place: int, axes: ReducedAxes) -> int:
    """The worker that has a place, where the workers are in the order of their ranks."""
    sizes = [int(jax.lax.axis_size(name)) for name in axes.local_axes]
    sizes.insert(axes.worker_position, world.capacity() * axes.devices_along)
    return int(np.unravel_index(place, sizes)[axes.worker_position]) // axes.devices_along


def refuse_groups(axis_index_groups: IndexGroups, label: str) -> None:
    """``ConfigError`` for groups where the result must be the same on all devices, which that of groups is not."""
    if axis_index_groups is not None:
        raise ConfigError(f"{label}: with axis_index_groups the result differs along the axis, and its type must not")
