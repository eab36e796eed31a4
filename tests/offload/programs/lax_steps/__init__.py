"""Train steps that are written for ``jax.lax``, as flax's examples are. Nothing in this folder knows of jaxhetero."""

from typing import Any

import jax
import numpy as np

AXIS = "batch"


def make_variables(model: Any, sample: Any) -> Any:
    """What ``model.init`` gives, but drawn by NumPy: XLA would compile for seconds."""
    generator = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        if name in ("scale", "var"):
            return np.ones(leaf.shape, np.float32)
        if name in ("bias", "mean"):
            return np.zeros(leaf.shape, np.float32)
        return generator.normal(0, 0.2, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0), sample))
