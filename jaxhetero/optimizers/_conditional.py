"""An optimizer that runs in some steps and rests in the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxhetero.errors import ConfigError
from jaxhetero.optimizers._new_weights import NewWeights, is_new_weights


def update_if(
    condition: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    extra: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """``inner.update(updates, state, params, **extra)`` where ``condition`` holds; else no change and the old state.

    No change is zeros, or the old weights where ``inner`` gives new weights.

    Args:
      condition: bool[]. If ``inner`` has a collective, ``condition`` must be the same on every worker. Else some
        workers would wait for others that never come.
      inner, updates, state, params, extra: an optimizer and the arguments of its ``update``.

    ``optax.conditionally_mask`` does this too, but only where updates have the dtypes of the gradients.
    """

    def run() -> tuple[optax.Updates, optax.OptState]:
        result: tuple[optax.Updates, optax.OptState] = inner.update(updates, state, params, **extra)
        return result

    def skip() -> tuple[optax.Updates, optax.OptState]:
        shapes, _ = jax.eval_shape(run)
        return _no_change(shapes, params), state

    new_updates, new_state = jax.lax.cond(condition, run, skip)
    return new_updates, new_state


def _no_change(updates: optax.Updates, params: optax.Params) -> optax.Updates:
    """Updates of the same structure and shapes that leave ``params`` as they are."""
    if not any(map(is_new_weights, jax.tree.leaves(updates, is_leaf=is_new_weights))):
        return jax.tree.map(jnp.zeros_like, updates)
    if params is None:
        raise ConfigError("an optimizer on reducers that rests in some steps needs the parameters: update(..., params)")
    return jax.tree.map(lambda _, param: NewWeights(param), updates, params, is_leaf=is_new_weights)
