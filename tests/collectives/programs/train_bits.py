"""Training steps; prints a digest of the parameters, and of as many steps of the same training in one process.

Every other step is one of fully sharded data parallelism: each worker updates its row of the parameters, with its row
of the summed gradient, and gathers those of the others.

Twenty steps; or, where the first argument names a file, until rank 0 finds that file there.
"""

import functools
import hashlib
import itertools
import json
import operator
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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


def step_numbers() -> Iterator[int]:
    if len(sys.argv) < 2:
        yield from range(STEPS)
        return
    end = Path(sys.argv[1])
    count = jax.jit(lambda here: jaxhetero.psum(here, name="end"))
    for number in itertools.count():
        if count(jnp.int32(jaxhetero.rank() == 0 and end.exists())) > 0:
            return
        yield number


def train_distributed() -> tuple[Params, list[float]]:
    """The parameters, and for each step when it ended."""

    size = jaxhetero.size()

    def rows(leaf: jax.Array) -> jax.Array:
        return jnp.pad(leaf.reshape(-1), (0, -leaf.size % size)).reshape(size, -1)

    @jax.jit
    def step(params: Params, inputs: jax.Array, targets: jax.Array) -> Params:
        gradients = jax.grad(loss)(params, inputs, targets)
        return update(params, jaxhetero.psum(gradients, bucket_bytes=20_000), size)

    @jax.jit
    def sharded_step(params: Params, inputs: jax.Array, targets: jax.Array) -> Params:
        gradients = jax.grad(loss)(params, inputs, targets)
        own_sums = jaxhetero.psum_scatter(jax.tree.map(rows, gradients), bucket_bytes=20_000)
        own = update(jax.tree.map(lambda leaf: rows(leaf)[jaxhetero.rank()], params), own_sums, size)
        stacks = jaxhetero.all_gather(own, bucket_bytes=20_000)
        return jax.tree.map(lambda stack, leaf: stack.reshape(-1)[: leaf.size].reshape(leaf.shape), stacks, params)

    params = initial_params()
    ends = []
    for number in step_numbers():
        run = sharded_step if number % 2 else step
        params = jax.block_until_ready(run(params, *batch(jaxhetero.rank(), number)))
        ends.append(time.time())
        if number == 2:
            print("running", flush=True)
    return params, ends


def train_in_one_process(workers: int, steps: int) -> Params:
    gradients_of = jax.jit(jax.grad(loss))
    apply = jax.jit(functools.partial(update, workers=workers))
    params = initial_params()
    for number in range(steps):
        gradients = [gradients_of(params, *batch(rank, number)) for rank in range(workers)]
        params = apply(params, functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), gradients))
    return params


def main() -> None:
    jaxhetero.initialize()
    params, ends = train_distributed()
    views = jaxhetero.metrics().view_count
    rank, size = jaxhetero.rank(), jaxhetero.size()
    jaxhetero.shutdown()
    alone = digest(train_in_one_process(size, len(ends))) if rank == 0 else None
    print(json.dumps({"distributed": digest(params), "alone": alone, "views": views, "ends": ends}))


main()
