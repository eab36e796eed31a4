"""Trees of which each worker holds a part, made whole: for checkpoints and evaluations."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero import collectives, world
from jaxhetero.errors import ConfigError, MismatchError

T = TypeVar("T")


def _is_none(leaf: Any) -> bool:
    return leaf is None


def gather(tree: T) -> T:
    """The whole tree, on every worker. Every worker calls it with its part.

    Args:
      tree: a pytree of arrays. Leaves that another worker holds are None. Where several hold a leaf, that of the lowest
        rank is taken.

    Returns:
      The tree with all leaves. It takes the memory of the whole on every worker.

    Blocks until all workers have come.

    Raises:
      ConfigError: nobody holds a leaf.
      MismatchError: the trees of two workers have another structure.

    Example:
      Before a checkpoint, in a pipeline (here of one worker):

      >>> params = {"in": jnp.ones((2, 3)), "out": jnp.ones((3, 1))}
      >>> jax.tree.map(jnp.shape, jaxhetero.pipeline.gather(params))
      {'in': (2, 3), 'out': (3, 1)}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
    tables = _tables_of_all(_table(leaves))
    if any(len(table) != len(leaves) for table in tables):
        counts = ", ".join(str(len(table)) for table in tables)
        raise MismatchError(f"pipeline: gather was called with trees of {counts} leaves, in the order of the ranks")
    owned: dict[int, list[int]] = defaultdict(list)
    for number in range(len(leaves)):
        owners = [rank for rank, table in enumerate(tables) if table[number] is not None]
        if not owners:
            raise ConfigError(f"pipeline: gather found leaf {number} of the tree on no worker")
        owned[owners[0]].append(number)
    whole: dict[int, Any] = {}
    for owner, numbers in sorted(owned.items()):
        given = [_given(leaves[number], tables[owner][number]) for number in numbers]
        whole.update(zip(numbers, collectives.broadcast(given, root=owner, name="pipeline.gather"), strict=True))
    gathered: T = jax.tree.unflatten(structure, [whole[number] for number in range(len(leaves))])
    return gathered


def _table(leaves: list[Any]) -> list[Any]:
    """The shape and the dtype of each leaf that this worker holds."""
    return [None if leaf is None else [list(jnp.shape(leaf)), str(jnp.asarray(leaf).dtype)] for leaf in leaves]


def _tables_of_all(own: list[Any]) -> list[list[Any]]:
    if world.current().is_alone:
        return [own]
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    longest = int(collectives.pmax(np.int32(text.size), name="pipeline.gather"))
    padded = np.full(longest, ord(" "), np.uint8)
    padded[: text.size] = text
    return [json.loads(bytes(row)) for row in np.asarray(collectives.all_gather(padded, name="pipeline.gather"))]


def _given(leaf: Any, shape_and_dtype: Any) -> Any:
    """The leaf, or something of its shape where another worker holds it."""
    if leaf is not None:
        return leaf
    shape, dtype = shape_and_dtype
    return jnp.zeros(shape, dtype)
