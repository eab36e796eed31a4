"""Clipping by the norm of gradients that lie on several workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxhetero._collectives.api import psum
from jaxhetero._collectives.wire_dtypes import sum_dtype
from jaxhetero.pipeline.layout import Layout
from jaxhetero.pipeline.places import Places
from jaxhetero.pipeline.rows import Holding

if TYPE_CHECKING:
    import optax


def clip_by_global_norm(
    max_norm: float, layout: Layout, holding: Holding, sharers: Mapping[int, int], places: Places
) -> optax.GradientTransformation:
    """Scale gradients down if their norm over all stages is larger than ``max_norm``.

    Args:
      layout: of the parameters.
      holding: what this worker holds.
      sharers: by the number of a parameter, how many workers of the pipeline have it.
    """
    import optax  # only who clips needs it

    workers = tuple(places.rank_at(place) for place in range(places.count))

    def update(grads: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        del params
        leaves = layout.leaves(grads, "the tree of gradients")
        squares = [
            jnp.sum(jnp.square(part.astype(sum_dtype(part.dtype)))) / sharers[number]
            for leaf, held in enumerate(leaves)
            if held is not None
            for number, part in holding.parts(leaf, holding.array(leaf, held))
        ]
        square = sum(squares, start=jnp.float32(0))
        if len(workers) > 1:
            square = psum(square, workers=workers, name="pipeline.clip_by_global_norm")
        norm = jnp.sqrt(square)
        factor = jnp.where(norm > max_norm, max_norm / norm, 1.0)
        with jax.numpy_dtype_promotion("standard"):  # of 16 bits, and the factor of 32
            return jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
