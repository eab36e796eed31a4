"""A small network of NNX modules with BatchNorm along the devices: the step changes them in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from lax_steps import AXIS

WIDTH, ROWS = 16, 8


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, axis_name=AXIS, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))[:, 0]


def make_modules() -> tuple[Network, nnx.Optimizer]:
    model = Network(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def make_batch(place: int, step: int) -> np.ndarray:
    """What the device at ``place`` among all learns from."""
    return np.random.default_rng([place, step]).normal(place, 1, (ROWS, 3)).astype(np.float32)


def train_step(model: Network, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    def loss_fn(model: Network) -> jax.Array:
        return jnp.mean((model(rows) - jnp.sin(rows.sum(axis=1))) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, lax.pmean(grads, AXIS))
    return lax.pmean(loss, AXIS)


def functional_step(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
    """The same step from values to values."""
    model, optimizer = nnx.merge(*state)
    loss = train_step(model, optimizer, rows)
    return nnx.split((model, optimizer)), loss
