"""JAX's own switches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxhetero import optimizers
from tests.support.cluster import run


def test_what_is_ours_works_under_each() -> None:
    """Collectives, their derivatives, optimizers, a pipeline; initialize and shutdown under the strictest guard."""
    for result in run("switches.py", workers=2, reducers=1):
        assert result["wrong"] == {}
        assert result["count"] > 40


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: optimizers.accumulate_gradients(inner, every=2),
        lambda inner: optimizers.static_loss_scale(inner, 8),
        lambda inner: optax.chain(optimizers.error_feedback(jnp.bfloat16), inner),
    ],
)
def test_optimizers_leave_no_promotion_to_jax(wrap: Callable[..., Any], dtype: str) -> None:
    params = {"w": jnp.ones((2, 3), dtype)}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        tx = wrap(optax.sgd(0.5))
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params, state, params)
    np.testing.assert_allclose(updates["w"].astype(float), -0.5 / (8 if hasattr(state, "loss_scale") else 1))
