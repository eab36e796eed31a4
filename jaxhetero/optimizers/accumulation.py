"""Gradient accumulation with one all-reduce for each accumulated step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxhetero._collectives.wire_dtypes import sum_dtype
from jaxhetero.errors import ConfigError
from jaxhetero.optimizers._conditional import update_if


class AccumulationState(NamedTuple):
    """State of ``accumulate_gradients``.

    Example:
      >>> import optax
      >>> from jaxhetero.optimizers import accumulate_gradients
      >>> state = accumulate_gradients(optax.sgd(0.1), every=4).init({"w": jnp.ones(2, jnp.float16)})
      >>> state.mean
      {'w': Array([0., 0.], dtype=float32)}
    """

    micro_step: jax.Array
    """int32[]: the number of micro-batches in ``mean``, 0 to ``every - 1``."""
    mean: optax.Updates
    """The mean of this worker's gradients so far: shapes of the parameters, float32 or wider. Each worker has its
    own."""
    inner_state: optax.OptState
    """The state of the optimizer inside."""


def accumulate_gradients(inner: optax.GradientTransformation, every: int) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` once in ``every`` calls, on the mean of their gradients, and do nothing in the other calls.

    ``inner`` includes the all-reduce, so the workers exchange one gradient for every ``every`` micro-batches.
    ``optax.MultiSteps`` would exchange one in each call: it runs its optimizer each time and discards the updates that
    it does not need. A NaN also stays in its accumulator for ever.

    Args:
      inner: an optimizer. Its schedules count accumulated steps. It sees gradients of the dtypes that were passed in.
      every: micro-batches in a step, at least 1; the same on every worker.

    Returns:
      An optimizer whose updates change nothing except in the last of ``every`` calls. They are zeros, or, with
      ``on_reducers`` inside, the parameters, which ``update`` then needs. All micro-batches count the same, whatever
      their sizes. Gradients are accumulated in float32 or wider.

    Each worker accumulates its own gradients. Under ``jax.shard_map`` they are one more value that varies over the
    workers' axis: return them with ``check_vma=False``, or with an ``out_specs`` that says so.

    Raises:
      ConfigError: ``every`` is less than 1.

    Example:
      Two micro-batches with gradients 1 and 3, and one step with their mean:

      >>> import optax
      >>> from jaxhetero.optimizers import accumulate_gradients
      >>> sgd = optax.chain(jaxhetero.all_reduce_gradients(), optax.sgd(0.5))
      >>> optimizer = accumulate_gradients(sgd, every=2)
      >>> state = optimizer.init(jnp.float32(0))
      >>> for gradient in (jnp.float32(1), jnp.float32(3)):
      ...     update, state = optimizer.update(gradient, state)
      ...     print(update)
      0.0
      -1.0
    """
    if every < 1:
        raise ConfigError(f"accumulate_gradients: every is {every}; it must be at least 1")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> AccumulationState:
        return AccumulationState(jnp.zeros([], jnp.int32), jax.tree.map(_zeros, params), inner.init(params))

    def update(
        updates: optax.Updates, state: AccumulationState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, AccumulationState]:
        # A running mean: the sum of some float16 gradients could leave the range of float16, which inner gets.
        count = state.micro_step + 1
        with jax.numpy_dtype_promotion("standard"):  # of the count, and of 16 bits
            mean = jax.tree.map(lambda old, new: old + (new - old) / count, state.mean, updates)
        is_last = count == every
        gradients = jax.tree.map(lambda leaf, given: leaf.astype(given.dtype), mean, updates)
        new_updates, inner_state = update_if(is_last, inner, gradients, state.inner_state, params, extra)
        # A product with 0 would keep a NaN.
        kept = jax.tree.map(lambda leaf: jnp.where(is_last, 0, leaf), mean)
        return new_updates, AccumulationState(count % every, kept, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros(param: jax.Array) -> jax.Array:
    return jnp.zeros_like(param, dtype=sum_dtype(param.dtype))
