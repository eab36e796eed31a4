"""Gradient accumulation that meets the other workers once per accumulated step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxhetero.errors import ConfigError
from jaxhetero.optimizers._conditional import update_if


class AccumulationState(NamedTuple):
    """State of ``accumulate_gradients``."""

    micro_step: jax.Array
    """int32[]: micro-batches in ``mean``, 0 to ``every - 1``."""
    mean: optax.Updates
    """The mean of this worker's gradients so far: shapes of the parameters, float32 or wider. Not the same on every
    worker."""
    inner_state: optax.OptState


def accumulate_gradients(inner: optax.GradientTransformation, every: int) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` in every ``every``-th call, on the mean of the gradients since, and do nothing in the others.

    ``inner`` includes the all-reduce, so the workers exchange one gradient per ``every`` micro-batches::

        optimizer = accumulate_gradients(optax.chain(jaxhetero.all_reduce_gradients(), optax.sgd(0.1)), every=4)

    ``optax.MultiSteps`` would reduce in every call, because it runs its optimizer in every call and discards what it
    does not need; and a NaN, once in its accumulator, stays there.

    Args:
      inner: an optimizer. Its schedules count accumulated steps. It sees gradients of the dtypes that were passed in.
      every: micro-batches per step, at least 1; the same on every worker.

    Returns:
      An optimizer whose updates are zeros except in every ``every``-th call. All micro-batches count the same, whatever
      their sizes. Gradients are accumulated in float32 or wider.

    The accumulated gradients are each worker's own. Under ``jax.shard_map`` they are one more value that varies over
    the workers' axis: return them with ``check_vma=False``, or with an ``out_specs`` that says so.
    """
    if every < 1:
        raise ConfigError(f"accumulate_gradients: every is {every}; it must be at least 1")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> AccumulationState:
        return AccumulationState(jnp.zeros([], jnp.int32), jax.tree.map(_zeros, params), inner.init(params))

    def update(
        updates: optax.Updates, state: AccumulationState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, AccumulationState]:
        # A running mean: a sum of float16-sized gradients could leave the range that inner's dtype has.
        count = state.micro_step + 1
        mean = jax.tree.map(lambda old, new: old + (new - old) / count, state.mean, updates)
        is_last = count == every
        gradients = jax.tree.map(lambda leaf, given: leaf.astype(given.dtype), mean, updates)
        new_updates, inner_state = update_if(is_last, inner, gradients, state.inner_state, params, extra)
        # Not a product with 0, which would keep a NaN.
        kept = jax.tree.map(lambda leaf: jnp.where(is_last, 0, leaf), mean)
        return new_updates, AccumulationState(count % every, kept, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros(param: jax.Array) -> jax.Array:
    return jnp.zeros_like(param, dtype=jnp.promote_types(param.dtype, jnp.float32))
