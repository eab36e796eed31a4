"""Bytes for each weight that a worker's device has after steps of AdamW, beside bfloat16 weights and gradients."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxhetero
from jaxhetero.optimizers import on_reducers

COUNT, STEPS = 1 << 16, 3


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def added_bytes(optimizer: optax.GradientTransformation, kept_dtype: Any) -> float:
    """``kept_dtype``: of the weights that ``optimizer`` changes, which are rounded for the model."""
    before = live_bytes()
    weights = jnp.ones(COUNT, jnp.bfloat16)
    kept = weights.astype(kept_dtype)
    state = jax.jit(optimizer.init)(kept)

    @jax.jit
    def step(kept: Any, state: Any) -> Any:
        gradients = jnp.ones(COUNT, jnp.bfloat16)
        updates, state = optimizer.update(gradients.astype(kept_dtype), state, kept)
        kept = optax.apply_updates(kept, updates)
        return kept.astype(jnp.bfloat16), kept, state

    for _ in range(STEPS):
        weights, kept, state = jax.block_until_ready(step(kept, state))
    if kept_dtype == jnp.bfloat16:
        del kept  # the weights of the model themselves
    return (live_bytes() - before - weights.nbytes) / COUNT


def main() -> None:
    jaxhetero.initialize()
    tx = optax.adamw(1e-3)
    reducers = added_bytes(on_reducers(tx, weights_dtype=jnp.bfloat16), jnp.bfloat16)
    workers = added_bytes(optax.chain(jaxhetero.all_reduce_gradients(), tx), jnp.float32)
    print(json.dumps({"reducers": reducers, "workers": workers}))


main()
