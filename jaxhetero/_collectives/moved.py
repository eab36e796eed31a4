"""Arrays of any dtype in *words*, arrays of a dtype that the wire takes: for collectives that move, and add nothing.

Sums are another matter: see ``wire_dtypes.check_dtype``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero._collectives.wire_dtypes import is_float8

Tree = TypeVar("Tree")
Back = Callable[[jax.Array], Any]

# Dtypes of fewer than 8 bits, and bools, each with one that holds the same values.
_WORDS = {
    "bool": "uint8",
    **dict.fromkeys(("int1", "int2", "int4"), "int8"),
    **dict.fromkeys(("uint1", "uint2", "uint4"), "uint8"),
    "float4_e2m1fn": "float8_e4m3fn",
}


def as_words(leaf: Any) -> tuple[jax.Array, Back]:
    """``leaf`` in words, and the way back, which gives the same bits.

    An element is one word. That of a typed key array is several, along new last axes: count axes from the front. Both
    ways are as differentiable as ``leaf`` is.

    Args:
      leaf: an array or a number, of any dtype.

    Returns:
      An array of words, and a function from words to elements. Axes of what this function gets may have been added,
      moved or made longer, but for the new last axes of keys.
    """
    array = jnp.asarray(leaf)
    dtype = array.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return _key_words(array)
    if dtype == jax.dtypes.float0:  # what JAX has for gradients of integers: a shape, and nothing in it
        return jnp.zeros(array.shape, jnp.uint8), lambda moved: np.zeros(moved.shape, jax.dtypes.float0)
    words = _WORDS.get(str(dtype))
    if words is None:
        return array, lambda moved: moved
    return array.astype(words), lambda moved: moved.astype(dtype)


def word_type(type_: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, Back]:
    """What ``as_words`` gives for an array of this type."""
    backs: list[Back] = []

    def words(array: jax.Array) -> jax.Array:
        array, back = as_words(array)
        backs.append(back)
        return array

    return jax.eval_shape(words, type_), backs[0]


def said_by_no_word(tree: Any) -> str:
    """`` of float8_e5m2``: the dtypes in ``tree`` that its words do not tell from others, for the name of an op.

    Workers that give different ones then have different ops, and are told so. A bool counts as its byte.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")}
    unsaid = [str(dtype) for dtype in dtypes if str(dtype) in _WORDS.keys() - {"bool"} or _is_of_bytes(dtype)]
    return f" of {', '.join(sorted(unsaid))}" if unsaid else ""


def _is_of_bytes(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended)) or is_float8(dtype)


def in_words(move: Callable[[list[jax.Array]], list[jax.Array]], tree: Tree) -> Tree:
    """``tree`` with what ``move`` makes of its leaves in words."""
    leaves, structure = jax.tree.flatten(tree)
    words = [as_words(leaf) for leaf in leaves]
    moved = move([array for array, _ in words])
    results: Tree = jax.tree.unflatten(structure, [back(array) for (_, back), array in zip(words, moved, strict=True)])
    return results


def _key_words(keys: jax.Array) -> tuple[jax.Array, Back]:
    impl = jax.random.key_impl(keys)
    return jax.random.key_data(keys), lambda moved: jax.random.wrap_key_data(moved, impl=impl)
