"""Trees of which each worker holds a part: made whole for checkpoints and evaluations, and parted again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero._collectives import api
from jaxhetero._job import world
from jaxhetero.errors import ConfigError, MismatchError
from jaxhetero.pipeline.rows import Rows, is_leaf, take_rows

T = TypeVar("T")


def gather(tree: T) -> T:
    """The whole tree, on every worker. Every worker calls it with its part.

    Args:
      tree: a pytree of arrays, such as parameters or the state of an optimizer. Leaves that another worker holds are
        None; of stacked ones there may be ``Rows``. Where several hold the same, that of the lowest rank is taken. What
        is None on all workers stays None.

    Returns:
      The tree with all leaves. It takes the memory of the whole on every worker.

    Blocks until all workers have come.

    Raises:
      ConfigError: nobody holds some rows of a leaf.
      MismatchError: the trees of two workers have another structure.

    Example:
      Before a checkpoint, in a pipeline (here of one worker):

      >>> params = {"in": jnp.ones((2, 3)), "out": jnp.ones((3, 1))}
      >>> jax.tree.map(jnp.shape, jaxhetero.pipeline.gather(params))
      {'in': (2, 3), 'out': (3, 1)}
    """
    with jax.transfer_guard("allow"):  # for what tells of the leaves, and for what stands for those of others
        return _gather(tree)


def _gather(tree: T) -> T:
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    tables = _tables_of_all([_entry(leaf) for leaf in leaves])
    if any(len(table) != len(leaves) for table in tables):
        counts = ", ".join(str(len(table)) for table in tables)
        raise MismatchError(f"pipeline: gather was called with trees of {counts} leaves, in the order of the ranks")
    givers = [_givers(number, entries) for number, entries in enumerate(zip(*tables, strict=True))]
    received: list[list[tuple[_Entry, Any]]] = [[] for _ in leaves]
    for rank in sorted({rank for ranks in givers for rank in ranks}):
        numbers = [number for number, ranks in enumerate(givers) if rank in ranks]
        given = [_given(leaves[number], tables[rank][number]) for number in numbers]
        arrays = api.broadcast(given, root=rank, name="pipeline.gather")
        for number, array in zip(numbers, arrays, strict=True):
            received[number].append((tables[rank][number], array))
    whole = [_whole(arrays) for arrays in received]
    gathered: T = jax.tree.unflatten(structure, whole)
    return gathered


def part(tree: Any, like: T) -> T:
    """Of a whole tree, what this worker holds; the inverse of ``gather``. Does not block.

    ``Pipeline.own`` does so for parameters. This is for what has another structure, such as the state of an optimizer.

    Args:
      tree: a pytree of arrays. Where ``like`` has None or ``Rows``, there may be the same.
      like: the tree that is wanted, of arrays or of ``jax.ShapeDtypeStruct``.

    Returns:
      A tree with the structure of ``like`` and arrays of ``tree``.

    Example:
      After a checkpoint was loaded, of a worker with the last rows of a stacked leaf:

      >>> like = {"in": None, "blocks": jaxhetero.pipeline.Rows(jnp.zeros((2, 3)), ((6, 8),), 8)}
      >>> own = jaxhetero.pipeline.part({"in": jnp.ones((2, 3)), "blocks": jnp.ones((8, 3))}, like)
      >>> own["blocks"].array.shape
      (2, 3)
    """

    def own(wanted: Any, given: Any) -> Any:
        if isinstance(wanted, Rows) and not isinstance(given, Rows):
            return Rows(take_rows(given, wanted.ranges), wanted.ranges, wanted.length)
        return None if wanted is None else given

    parted: T = jax.tree.map(own, like, tree, is_leaf=is_leaf)
    return parted


_KEY = "key of "
# What a worker holds of a leaf, as JSON: nothing; or the shape and the dtype of its array, and if these are rows, their
# ranges and the length of the leaf.
_Entry = Any


def _entry(leaf: Any) -> _Entry:
    if leaf is None:
        return None
    array = _array(leaf)
    ranges, length = (list(map(list, leaf.ranges)), leaf.length) if isinstance(leaf, Rows) else (None, None)
    return [list(jnp.shape(array)), _dtype_name(jnp.asarray(array)), ranges, length]


def _array(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, Rows) else leaf


def _tables_of_all(own: list[_Entry]) -> list[list[_Entry]]:
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    if world.current().is_alone:
        return [json.loads(bytes(text))]
    longest = int(api.pmax(np.int32(text.size), name="pipeline.gather"))
    padded = np.full(longest, ord(" "), np.uint8)
    padded[: text.size] = text
    return [json.loads(bytes(row)) for row in np.asarray(api.all_gather(padded, name="pipeline.gather"))]


def _givers(number: int, entries: Sequence[_Entry]) -> list[int]:
    """The lowest ranks that hold a leaf together."""
    for rank, entry in enumerate(entries):
        if entry is not None and entry[2] is None:
            return [rank]
    givers: list[int] = []
    missing: set[int] | None = None
    for rank, entry in enumerate(entries):
        if entry is None:
            continue
        missing = set(range(entry[3])) if missing is None else missing
        rows = {row for begin, end in entry[2] for row in range(begin, end)}
        if not missing.isdisjoint(rows):
            givers.append(rank)
            missing -= rows
    if missing:
        raise ConfigError(f"pipeline: gather found rows {sorted(missing)} of leaf {number} of the tree on no worker")
    return givers


def _given(leaf: Any, entry: _Entry) -> Any:
    """The array of the leaf, or something of its shape on a worker that does not hold what the giver holds."""
    if _entry(leaf) == entry:
        return _array(leaf)
    shape, dtype, _, _ = entry
    return _zeros(shape, dtype)


def _dtype_name(array: jax.Array) -> str:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return f"{_KEY}{jax.random.key_impl(array)}" if is_key else str(array.dtype)


def _zeros(shape: Sequence[int], dtype_name: str) -> jax.Array:
    if dtype_name.startswith(_KEY):
        return jnp.broadcast_to(jax.random.key(0, impl=dtype_name.removeprefix(_KEY)), shape)
    return jnp.zeros(shape, dtype_name)


def _whole(arrays: Sequence[tuple[_Entry, Any]]) -> Any:
    """A leaf, of the arrays of those that gave it; None of nobody."""
    if not arrays:
        return None
    (shape, dtype, ranges, length), array = arrays[0]
    if ranges is None:
        return array
    whole = _zeros((length, *shape[1:]), dtype)
    for (_, _, own_ranges, _), rows in arrays:
        first = 0
        for begin, end in own_ranges:
            whole = whole.at[begin:end].set(rows[first : first + end - begin])
            first += end - begin
    return whole
