"""Updates that replace the weights, in place of those that are added to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NewWeights:
    """An update that replaces the weights: ``optax.apply_updates`` adds it, and the sum is what it holds."""

    weights: Any

    def __radd__(self, _: Any) -> Any:
        return self.weights


def is_new_weights(node: Any) -> bool:
    """For ``is_leaf`` of ``jax.tree.map``."""
    return isinstance(node, NewWeights)
