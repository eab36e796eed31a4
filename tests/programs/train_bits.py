"""Twenty training steps; prints a digest of the parameters, and of the same training in one process."""

import functools
import hashlib
import itertools
import json
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

STEPS = 20
Params = list[dict[str, jax.Array]]


def initial_params() -> Params:
    generator = np.random.default_rng(0)
    widths = [64, 257, 33, 10]
    return [
        {"weight": jnp.asarray(generator.normal(0, 0.1, (m, n)), jnp.float32), "bias": jnp.zeros(n, jnp.float32)}
        for m, n in itertools.pairwise(widths)
    ]


def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return generator.normal(size=(16, 64)).astype(np.float32), generator.normal(size=(16, 10)).astype(np.float32)


def loss(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        inputs = jnp.tanh(inputs @ layer["weight"] + layer["bias"])
    return jnp.mean((inputs @ params[-1]["weight"] + params[-1]["bias"] - targets) ** 2)


def update(params: Params, total: Params, workers: int) -> Params:
    return jax.tree.map(lambda p, g: p - 0.05 * (g / workers), params, total)


def digest(tree: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()


def train_distributed() -> Params:
    @jax.jit
    def step(params: Params, inputs: jax.Array, targets: jax.Array) -> Params:
        gradients = jax.grad(loss)(params, inputs, targets)
        return update(params, jaxhetero.psum(gradients, bucket_bytes=20_000), jaxhetero.size())

    params = initial_params()
    for number in range(STEPS):
        params = step(params, *batch(jaxhetero.rank(), number))
    return params


def train_in_one_process(workers: int) -> Params:
    gradients_of = jax.jit(jax.grad(loss))
    apply = jax.jit(functools.partial(update, workers=workers))
    params = initial_params()
    for number in range(STEPS):
        gradients = [gradients_of(params, *batch(rank, number)) for rank in range(workers)]
        params = apply(params, functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), gradients))
    return params


def main() -> None:
    jaxhetero.initialize()
    distributed = digest(train_distributed())
    alone = digest(train_in_one_process(jaxhetero.size())) if jaxhetero.rank() == 0 else None
    jaxhetero.shutdown()
    print(json.dumps({"distributed": distributed, "alone": alone}))


main()
