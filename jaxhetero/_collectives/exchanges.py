"""Collectives that exchange arrays between the workers, and add nothing."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxhetero._collectives import exchange_primitive
from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES
from jaxhetero._collectives.index_groups import IndexGroups, check_groups
from jaxhetero._collectives.labels import op_label
from jaxhetero._collectives.mesh_axes import AxisName, ReducedAxes, axis_names, classify
from jaxhetero._collectives.moved import in_words
from jaxhetero._collectives.reduce_tree import make_varying, map_buckets, prepare_leaves
from jaxhetero._collectives.wire_dtypes import describe_leaf
from jaxhetero._job import world
from jaxhetero.errors import ConfigError

Tree = TypeVar("Tree")


def ppermute(
    x: Tree,
    axis_name: AxisName = None,
    perm: Sequence[tuple[int, int]] | None = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """Send ``x`` from worker to worker, as ``jax.lax.ppermute``: a ring, a shift, a pipeline's hand-over.

    The bytes go from the one worker to the other and through no reducer, if each worker has one device along
    ``axis_name`` and arrays lie on the host. Elsewhere, each device receives what all have, and keeps its own.

    Args:
      x: a pytree of arrays or numbers of any dtype. All workers must call with the same structure, shapes and dtypes.
      axis_name: as in ``psum``. Without it, the places that ``perm`` names are the ranks. Several axes are
        named in the order of the mesh. In a mesh of this process's own devices, those of rank 0 come first.
      perm: pairs of a source and a target, ``(0, 1)`` to send from place 0 to place 1; the same on all workers. No
        place is the source of two pairs, or the target of two.
      bucket_bytes, name: as in ``psum``.

    Returns:
      A pytree like ``x``, of the same shapes and dtypes: what the source of the own place has, and zeros where there is
      none. The transpose sends the other way.

    Does not block: as with any JAX computation, the caller waits when it looks at the result.

    Raises:
      NotInitializedError: before ``jaxhetero.initialize()``.
      ConfigError: for a ``perm`` that is none; else as in ``psum``.
      jax.errors.JaxRuntimeError: when the program runs and a peer fails, or has posted something else
        (``MismatchError``); see ``jaxhetero.errors``.

    Example:
      Each worker gets what its left neighbour has:

      >>> n = jaxhetero.size()
      >>> jaxhetero.ppermute(jnp.float32(3), perm=[(rank, (rank + 1) % n) for rank in range(n)])
      Array(3., dtype=float32)
      >>> jaxhetero.ppermute(jnp.float32(3), perm=[])
      Array(0., dtype=float32)
    """
    label = op_label("ppermute", name)
    world.refuse_elastic(label)
    if perm is None:
        raise ConfigError(f"{label}: perm is missing; give pairs of a source and a target")
    if not is_in_mesh_order(axis_names(axis_name)):
        raise ConfigError(f"{label}: axis_name is {axis_name!r}; name several axes in the order of the mesh")
    axes = classify(axis_name, label)
    sources = _sources(perm, axes.count, label)
    if not axes.spans_workers and axes.are_named:
        moved: Tree = jax.lax.ppermute(x, axis_name, [tuple(pair) for pair in perm])
        return moved

    def send(words: list[jax.Array]) -> list[jax.Array]:
        if not axes.spans_workers:
            return [array if sources == (0,) else jnp.zeros_like(array) for array in words]
        return _map_buckets(
            functools.partial(exchange_primitive.permute, axes=axes, sources=sources), words, axes, label, bucket_bytes
        )

    return in_words(send, x)


def pshuffle(
    x: Tree,
    axis_name: AxisName = None,
    perm: Sequence[int] | None = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """``ppermute`` to each place from the place ``perm[place]``, as ``jax.lax.pshuffle``.

    Args:
      x, axis_name, bucket_bytes, name: as in ``ppermute``.
      perm: the source of each place; each place is one source.

    Shapes, dtypes, blocking and errors are those of ``ppermute``.

    Example:
      The last worker's value goes to the first, and so on:

      >>> jaxhetero.pshuffle(jnp.arange(2), perm=list(reversed(range(jaxhetero.size()))))
      Array([0, 1], dtype=int32)
    """
    label = op_label("pshuffle", name)
    if perm is None or sorted(perm) != list(range(len(perm))):
        raise ConfigError(f"{label}: perm is {perm}; it must have each place once")
    pairs = [(source, place) for place, source in enumerate(perm)]
    return ppermute(x, axis_name, pairs, bucket_bytes=bucket_bytes, name=label)


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: IndexGroups = None,
    tiled: bool = False,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Any:
    """Cut ``x`` in as many parts as there are workers, and send each worker its part, as ``jax.lax.all_to_all``.

    A worker sends all of ``x`` but its own part, and receives as much. The bytes go as in ``ppermute``.

    Args:
      x: a pytree of arrays of any dtype. All workers must call with the same structure, shapes and dtypes.
      axis_name: as in ``ppermute``; ``None`` in a program that runs on one device.
      split_axis: the axis of ``x`` that is cut. Its size is the number of places, or, if ``tiled``, a multiple.
      concat_axis: the axis of the result along which the received parts lie, in the order of their places.
      axis_index_groups: as in ``psum``, but of one size: an exchange inside each group, in the order of the group. Any
        groups will do.
      tiled: ``True`` keeps ``split_axis``, shorter by the number of places, and joins the parts along their own
        ``concat_axis``. Else ``split_axis`` is gone, and ``concat_axis`` is new.
      bucket_bytes, name: as in ``psum``.

    Returns:
      A pytree like ``x``, with leaves of as many elements. The transpose is an exchange with the axes swapped.

    Blocking and errors are those of ``ppermute``.

    Example:
      Of ``n`` workers, each has ``n`` rows, and gets the row of its rank from each of them:

      >>> jaxhetero.all_to_all(jnp.arange(jaxhetero.size()), None, 0, 0)
      Array([0], dtype=int32)
      >>> jaxhetero.all_to_all(jnp.ones((2, 6)), None, 1, 0, tiled=True).shape     # (2 * n, 6 / n)
      (2, 6)
    """
    label = op_label("all_to_all", name)
    world.refuse_elastic(label)
    axes = classify(axis_name, label)
    everybody = [range(axes.count)]
    groups = check_groups(everybody if axis_index_groups is None else axis_index_groups, axes, label, of_one_size=True)
    for leaf in jax.tree.leaves(x):
        _check_split(leaf, split_axis, concat_axis, len(groups[0]), label, tiled=tiled)
    if not axes.spans_workers and axes.are_named:
        return jax.lax.all_to_all(
            x, axis_name, split_axis, concat_axis, axis_index_groups=axis_index_groups, tiled=tiled
        )

    def send(words: list[jax.Array]) -> list[jax.Array]:
        rows = [_split(array, split_axis, len(groups[0])) for array in words]
        if axes.spans_workers:
            exchange = functools.partial(exchange_primitive.all_to_all, axes=axes, groups=groups)
            rows = _map_buckets(exchange, rows, axes, label, bucket_bytes)
        return [_concatenate(array, split_axis, concat_axis, tiled=tiled) for array in rows]

    return in_words(send, x)


def pswapaxes(
    x: Any,
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: IndexGroups = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Any:
    """Swap the axis of the workers with an axis of ``x``, as ``jax.lax.pswapaxes``: ``all_to_all`` over ``axis`` alone.

    Arguments, shapes, blocking and errors are those of ``all_to_all``.

    Example:
      >>> jaxhetero.pswapaxes(jnp.arange(jaxhetero.size()), None, 0)
      Array([0], dtype=int32)
    """
    return all_to_all(
        x,
        axis_name,
        axis,
        axis,
        axis_index_groups=axis_index_groups,
        bucket_bytes=bucket_bytes,
        name=op_label("pswapaxes", name),
    )


def is_in_mesh_order(names: Sequence[str]) -> bool:
    """Whether ``jax.lax.ppermute`` numbers places along these axes by their names.

    In another order it numbers them by the mesh, and since 0.12 it refuses them.
    """
    in_mesh = [name for name in jax.sharding.get_abstract_mesh().shape if name in names]
    return len(in_mesh) < len(names) or in_mesh == list(names)


def _sources(perm: Sequence[tuple[int, int]], count: int, label: str) -> tuple[int, ...]:
    """For each place, the place that sends to it, or -1."""
    pairs = [(operator.index(source), operator.index(target)) for source, target in perm]
    sources, targets = dict(pairs), {target: source for source, target in pairs}
    are_places = all(0 <= place < count for pair in pairs for place in pair)
    if not are_places or len(sources) < len(pairs) or len(targets) < len(pairs):
        raise ConfigError(
            f"{label}: perm is {pairs}; it must be pairs of places in 0..{count - 1}, each of them the source of one "
            "pair at most, and the target of one"
        )
    return tuple(targets.get(place, -1) for place in range(count))


def _map_buckets(
    exchange: Callable[..., list[jax.Array]],
    words: list[jax.Array],
    axes: ReducedAxes,
    label: str,
    bucket_bytes: int,
) -> list[jax.Array]:
    leaves, _ = prepare_leaves(words, label, bucket_bytes, are_summed=False)
    arrays = [make_varying(leaf, axes) for leaf in leaves]
    return map_buckets(lambda bucket, label: exchange(bucket, label=label), arrays, axes, label, bucket_bytes)


def _check_split(leaf: Any, split_axis: int, concat_axis: int, count: int, label: str, *, tiled: bool) -> None:
    ndim = jnp.ndim(leaf)
    if not (0 <= split_axis < ndim and 0 <= concat_axis < ndim):
        raise ConfigError(
            f"{label}: split_axis is {split_axis} and concat_axis is {concat_axis}; both must be axes of "
            f"{describe_leaf(leaf)}, counted from the front"
        )
    size = jnp.shape(leaf)[split_axis]
    if size % count if tiled else size != count:
        raise ConfigError(
            f"{label}: axis {split_axis} of {describe_leaf(leaf)} cannot be split over {count}; its size must be "
            f"{'a multiple of that' if tiled else 'that, or pass tiled=True'}"
        )


def _split(array: jax.Array, axis: int, count: int) -> jax.Array:
    """``[..., count * size, ...]`` to ``[count, ..., size, ...]``."""
    shape = array.shape
    return jnp.moveaxis(array.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :]), axis, 0)


def _concatenate(rows: jax.Array, split_axis: int, concat_axis: int, *, tiled: bool) -> jax.Array:
    """From ``[count, ..., size, ...]`` to the result of ``all_to_all``."""
    if not tiled:
        return jnp.moveaxis(rows.squeeze(1 + split_axis), 0, concat_axis)
    placed = jnp.moveaxis(rows, 0, concat_axis)
    shape = placed.shape
    joined = shape[concat_axis] * shape[concat_axis + 1]
    return placed.reshape(*shape[:concat_axis], joined, *shape[concat_axis + 2 :])
