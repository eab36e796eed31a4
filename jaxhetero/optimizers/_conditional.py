"""An optimizer that runs in some steps and rests in the others."""

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
    """``inner.update(updates, state, params, **extra)`` where ``condition`` holds; else zeros and the old state.

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
        return jax.tree.map(jnp.zeros_like, shapes), state

    new_updates, new_state = jax.lax.cond(condition, run, skip)
    return new_updates, new_state
