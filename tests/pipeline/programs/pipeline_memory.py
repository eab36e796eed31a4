"""What a worker holds at its fullest in a step, by schedule, over what the report says: counted in arrays of JAX."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from jaxhetero.pipeline.runner import StageRunner
from jaxhetero.pipeline.schedules import NAMES

# A microbatch keeps arrays of all of a stage's layers. There are so many that the messages of all microbatches, each of
# one array, are little beside that, even if all of them come early.
LAYERS, WIDTH, ROWS, MICROBATCHES = 72, 48, 32, 6


class Meter:
    """The most bytes of live arrays between two tasks, and the shapes that a microbatch keeps."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self.kept_shapes: set[tuple[int, ...]] = set()
        for name in ("forward", "backward", "weights"):
            self._watch(name)

    def _watch(self, name: str) -> None:
        original = getattr(StageRunner, name)

        def method(runner: StageRunner, *arguments: Any, **options: Any) -> Any:
            results = original(runner, *arguments, **options)
            self.most_bytes = max(self.most_bytes, live_bytes())
            for kept in runner._microbatches.values():
                self.kept_shapes.update(array.shape for array in kept.values())
            return results

        setattr(StageRunner, name, method)


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def loss_fn(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in kernels:
        x = x + jnp.tanh(x.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.mean(x * x)


jaxhetero.initialize()
kernels = [np.full((WIDTH, WIDTH), 0.01, np.float32) for _ in range(LAYERS)]
x = np.ones((MICROBATCHES * ROWS, WIDTH), np.float32)
meter = Meter()
ratios = {}
for name in NAMES:
    several = 2 if name in ("virtual", "breadth_first") else 1
    grad_fn = jaxhetero.pipeline.value_and_grad(
        loss_fn, stages=jaxhetero.size(), microbatches=MICROBATCHES, schedule=name, stages_per_worker=several
    )
    report = grad_fn.cut(kernels, x)
    params = jax.tree.map(jnp.asarray, grad_fn.own(kernels))
    jax.block_until_ready(grad_fn(params, x))  # compiled
    before = live_bytes() - sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    meter.most_bytes = 0
    jax.block_until_ready(grad_fn(params, x))
    ratios[name] = (meter.most_bytes - before) / report.memory_bytes(jaxhetero.rank())
    del params
print(json.dumps({"ratios": ratios, "keeps_kernels": (WIDTH, WIDTH) in meter.kept_shapes}), flush=True)
jaxhetero.shutdown()
