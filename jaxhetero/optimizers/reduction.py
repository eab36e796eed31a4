"""Gradients summed over the workers, as an optax transformation."""

from __future__ import annotations

from typing import Any

import optax

from jaxhetero._collectives import api
from jaxhetero._collectives.mesh_axes import AxisName


def all_reduce_gradients(
    axis_name: AxisName = None,
    *,
    mean: bool = True,
    wire_dtype: Any = None,
    bucket_bytes: int = api.DEFAULT_BUCKET_BYTES,
) -> optax.GradientTransformation:
    """Replace each worker's gradients by their mean over all workers. Chain it in front of any optimizer.

    Args:
      axis_name, wire_dtype, bucket_bytes: as in ``jaxhetero.psum``.
      mean: ``False`` gives the sum instead of the mean.

    Returns:
      A transformation without state. Its updates have the shapes and dtypes of the gradients.

    Errors and blocking are those of ``jaxhetero.psum``, which refuses gradients that JAX has summed already.

    Example:
      >>> import optax
      >>> optimizer = optax.chain(jaxhetero.all_reduce_gradients(), optax.sgd(0.5))
      >>> params = {"w": jnp.ones(2)}
      >>> opt_state = optimizer.init(params)
      >>> updates, opt_state = optimizer.update({"w": jnp.array([1.0, 2.0])}, opt_state, params)
      >>> optax.apply_updates(params, updates)
      {'w': Array([0.5, 0. ], dtype=float32)}
    """
    reduce = api.pmean if mean else api.psum

    def update(updates: optax.Updates, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        del params
        label = "all_reduce_gradients"
        return reduce(updates, axis_name, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, name=label), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
