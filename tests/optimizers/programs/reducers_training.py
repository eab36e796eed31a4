"""Steps of optimizers on reducers, until rank 0 finds a file; prints whether the weights are those of a transcription.

Arguments: the file, and names of optimizers, which may end in the dtype of the wire: "adamw in int8".
"""

import itertools
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import on_reducers
from jaxhetero.optimizers._programs import lower
from tests.optimizers.optimizer_zoo import OPTIMIZERS
from tests.optimizers.update_machine import Job, NativePasses, in_numbers

SHAPES = {"matrix": (150, 401), "bias": (401,), "scale": ()}


def values(*seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def summed(step: int, wire_dtype: str) -> dict[str, np.ndarray]:
    parts = [values(rank, step) for rank in range(jaxhetero.size())]
    if wire_dtype:
        parts = [{name: in_numbers(leaf, wire_dtype) for name, leaf in part.items()} for part in parts]
    return {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in SHAPES}


def main() -> None:
    end, *names = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    jaxhetero.initialize()
    rank = jaxhetero.rank()
    start = values(99)
    parts = {name: name.partition(" in ")[::2] for name in names}
    optimizers = {
        name: on_reducers(OPTIMIZERS[tx], mean=False, wire_dtype=wire_dtype or None)
        for name, (tx, wire_dtype) in parts.items()
    }

    @jax.jit
    def step(weights: Any, states: Any, gradients: Any, here: jax.Array) -> Any:
        moved, after = {}, {}
        for name, optimizer in optimizers.items():
            updates, after[name] = optimizer.update(gradients, states[name])
            moved[name] = optax.apply_updates(weights[name], updates)
        return moved, after, jaxhetero.psum(here, name="end")

    weights = {name: jax.tree.map(jnp.asarray, start) for name in names}
    states = {name: optimizer.init(weights[name]) for name, optimizer in optimizers.items()}
    ends = []
    for number in itertools.count():
        weights, states, is_over = step(
            weights, states, values(rank, number), jnp.int32(rank == 0 and Path(end).exists())
        )
        jax.block_until_ready(weights)
        ends.append(time.time())
        if is_over:
            break
        if number == 2:
            print("running", flush=True)
    kept = {name: optimizer.pull(states[name])[0] for name, optimizer in optimizers.items()}
    views = jaxhetero.metrics().view_count
    wrong = []
    for name in names:
        tx, wire_dtype = OPTIMIZERS[parts[name][0]], parts[name][1]
        job = Job(lower(tx, start), NativePasses(), start, tx.init(start))
        for number in range(len(ends)):
            job.step(summed(number, wire_dtype))
        for tree in (weights[name], kept[name]):
            leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)]
            if any(a.tobytes() != b.tobytes() for a, b in zip(leaves, job.weights, strict=True)):
                wrong.append(name)
    jaxhetero.shutdown()
    print(json.dumps({"distributed": str(wrong), "alone": "[]", "views": views, "ends": ends}))


main()
