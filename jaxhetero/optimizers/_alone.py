"""An optimizer on reducers in a world of one worker, which has none: it runs here, and its state is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Alone:
    """``tx`` on weights in float32, with the functions of an optimizer on reducers. A state is weights and state."""

    tx: optax.GradientTransformation
    weights_dtype: Any

    def init(self, params: Any) -> tuple[Any, Any]:
        """The state for new weights."""
        return self.push(params, self.tx.init(params))

    def push(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """The state for these."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params), opt_state

    def pull(self, kept: tuple[Any, Any]) -> tuple[Any, Any]:
        """What it consists of."""
        return kept

    def update(self, gradients: Any, kept: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        """New weights, as workers get them, and the next state."""
        weights, opt_state = kept
        gradients = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), gradients)
        updates, opt_state = self.tx.update(gradients, opt_state, weights)
        weights = optax.apply_updates(weights, updates)
        return jax.tree.map(lambda leaf: leaf.astype(self.weights_dtype), weights), (weights, opt_state)
