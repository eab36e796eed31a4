"""An optimizer that runs in some steps only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def update_if(
    condition: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    extra: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """``inner.update(updates, state, params, **extra)`` where ``condition`` holds; else zeros and the state as it was.

    Args:
      condition: bool[]. If ``inner`` holds a collective, every worker must have the same one, or some would wait for
        others that never come.
      inner, updates, state, params, extra: an optimizer and what its ``update`` takes.

    ``optax.conditionally_mask`` does this for optimizers whose updates have the dtypes of their gradients only.
    """

    def run() -> tuple[optax.Updates, optax.OptState]:
        result: tuple[optax.Updates, optax.OptState] = inner.update(updates, state, params, **extra)
        return result

    def skip() -> tuple[optax.Updates, optax.OptState]:
        shapes, _ = jax.eval_shape(run)
        return jax.tree.map(jnp.zeros_like, shapes), state

    new_updates, new_state = jax.lax.cond(condition, run, skip)
    return new_updates, new_state
