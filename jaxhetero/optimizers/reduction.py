"""Gradients summed over the workers, as an optax transformation."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxhetero import collectives
from jaxhetero._compat import varying_axes
from jaxhetero._mesh import AxisName, axis_names
from jaxhetero.errors import ConfigError


def all_reduce_gradients(
    axis_name: AxisName = None,
    *,
    mean: bool = True,
    wire_dtype: Any = None,
    bucket_bytes: int = collectives.DEFAULT_BUCKET_BYTES,
) -> optax.GradientTransformation:
    """Replace each worker's gradients by their mean over all workers. Chain it in front of any optimizer::

        optimizer = optax.chain(jaxhetero.all_reduce_gradients(), optax.sgd(0.1))

    Args:
      axis_name, wire_dtype, bucket_bytes: as in ``jaxhetero.psum``.
      mean: ``False`` gives the sum instead.

    Errors and blocking are those of ``jaxhetero.psum``; and ``ConfigError`` for gradients that JAX has summed already,
    which a second sum would make too large. The transformation has no state.
    """
    reduce = collectives.pmean if mean else collectives.psum

    def update(updates: optax.Updates, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        del params
        label = "all_reduce_gradients"
        _refuse_sums(updates, axis_name)
        return reduce(updates, axis_name, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, name=label), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _refuse_sums(gradients: optax.Updates, axis_name: AxisName) -> None:
    """Where types say so: the gradient of a parameter that does not vary along an axis is the sum along it."""
    for name in axis_names(axis_name):
        if not isinstance(name, str) or name not in varying_axes(jax.typeof(jax.lax.axis_index(name))):
            continue  # a position, refused later; or check_vma=False: nothing says it, and JAX sums nothing
        for path, gradient in jax.tree.leaves_with_path(gradients):
            if name not in varying_axes(jax.typeof(gradient)):
                raise ConfigError(
                    f"all_reduce_gradients: the gradient at {jax.tree_util.keystr(path) or 'the root'} is summed along "
                    f"{name!r} already: in jax.shard_map with check_vma=True JAX sums the gradients of parameters that "
                    "are the same everywhere. Take them of jaxhetero.replicated(params, axis_name, mean=True) instead "
                    "and leave all_reduce_gradients out, or of jax.lax.pcast(params, axis_name, to='varying')"
                )
