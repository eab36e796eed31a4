"""Arrays of PRNG keys, as those of integers that they wrap."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_key(leaf: Any) -> bool:
    """Whether it is a typed array of PRNG keys, as ``jax.random.key`` makes them."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def words_of(keys: Any) -> jax.Array:
    """The array of integers in an array of keys.

    Why: ``jax.random.key_data`` is a program, which a worker that survives would compile when another one joins. Since
    0.10, and before: the attribute is as old as typed keys.
    """
    words: jax.Array = keys._base_array
    return words
