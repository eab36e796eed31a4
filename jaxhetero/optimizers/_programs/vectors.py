"""What primitives of JAX do with small arrays of which each item is a value of a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from jaxhetero._compat import bind

Items: TypeAlias = "NDArray[Any]"  # of objects

# An array with more items is left whole: a scalar for each would make programs too large.
MOST_ITEMS = 4096
# Primitives that move items and change none, with the number of operands that have items; None: all of them.
MOVES: Mapping[str, int | None] = {
    "broadcast_in_dim": 1,
    "concatenate": None,
    "copy": 1,
    "dynamic_slice": 1,
    "gather": 1,
    "reshape": 1,
    "rev": 1,
    "slice": 1,
    "split": 1,
    "squeeze": 1,
    "stack": None,
    "transpose": 1,
    "unstack": 1,
}
# Primitives that combine items along axes, with the primitive of two items.
FOLDS: Mapping[str, Any] = {
    "reduce_and": jax.lax.and_p,
    "reduce_max": jax.lax.max_p,
    "reduce_min": jax.lax.min_p,
    "reduce_or": jax.lax.or_p,
    "reduce_prod": jax.lax.mul_p,
    "reduce_sum": jax.lax.add_p,
}


def as_items(value: Any, shape: Sequence[int] = ()) -> Items:
    """An array that has a value everywhere."""
    items = np.empty(tuple(shape), object)
    items.fill(value)
    return items


def moved(primitive: Any, params: dict[str, Any], operands: Sequence[Items], others: Sequence[Any]) -> list[Items]:
    """The results of one of ``MOVES``; ``others`` are numbers, such as indices. JAX moves the places of the items."""
    every = np.concatenate([items.ravel() for items in operands])
    places = np.split(np.arange(every.size, dtype=np.int32), np.cumsum([items.size for items in operands])[:-1])
    shaped = [place.reshape(items.shape) for place, items in zip(places, operands, strict=True)]
    with jax.ensure_compile_time_eval():
        found = [np.asarray(result) for result in bind(primitive, params, [*shaped, *others])]
    return [every[place] if place.shape else as_items(every[place]) for place in found]


def folded(combine: Callable[[Any, Any], Any], items: Items, axes: Sequence[int]) -> Items:
    """The items of each place combined along axes."""
    rest = [axis for axis in range(items.ndim) if axis not in axes]
    rows = items.transpose(*axes, *rest).reshape(-1, *(items.shape[axis] for axis in rest))
    return np.asarray(functools.reduce(mapped(combine), rows), object)


def mapped(function: Callable[..., Any]) -> Callable[..., Items]:
    """The function on each item of arrays."""
    return lambda *arrays: np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays), object)
