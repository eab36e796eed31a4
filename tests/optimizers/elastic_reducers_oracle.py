"""What ``programs/reducers_elastic.py`` comes to, operation by operation, given the history of the job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxhetero import optimizers
from jaxhetero._collectives.buckets import make_buckets
from jaxhetero.optimizers._programs import lower
from tests.optimizers.update_machine import Job, NativePasses, in_numbers

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.01),
    "lamb": optimizers.lamb(1e-2),
}
WIRE_DTYPES = {"momentum": "int8"}
# The largest leaf is cut among reducers, and the others have a bucket of their own.
SHAPES = {"bias": (401,), "matrix": (150, 401), "scale": ()}
BUCKET_BYTES = 64 << 10

Tree = dict[str, Any]
# For each optimizer, step and leaf, the ranks that have taken part.
History = dict[str, list[list[list[int]]]]


def values(*seed: int) -> Tree:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def first_weights() -> Tree:
    return values(99)


def contribution(rank: int, step: int, weights: Tree) -> Tree:
    """What depends on the weights, so that a wrong bit anywhere stays."""
    own = values(rank, step)
    return {name: own[name] + np.asarray(weights[name]) * np.float32(0.25) for name in SHAPES}


def history_of(lines: Iterable[str], names: Sequence[str], steps: int) -> History:
    """From what the coordinator has written: in each step, each bucket of an optimizer has one round of gradients."""
    views = [json.loads(line) for line in lines]
    buckets = make_buckets(first_weights(), BUCKET_BYTES)
    history: History = {name: [[[] for _ in SHAPES] for _ in range(steps)] for name in names}
    for view in views:  # a later one says it for all rounds that were not complete when it began
        complete = {op["op"].split(" (")[0]: op["complete"] for op in view["rounds"]}
        for name in names:
            kind = "measure" if name == "lamb" else "update"
            for number, leaves in enumerate(buckets):
                for step in range(complete.get(f"{name} bucket {number} {kind}", 0), steps):
                    for leaf in leaves:
                        history[name][step][leaf] = view["members"]
    return history


def replay(name: str, history: Sequence[Sequence[Sequence[int]]]) -> str:
    """The digest of the weights and states of one optimizer."""
    tx, params = OPTIMIZERS[name], first_weights()
    state = tx.init(params)
    update = lower(tx, params)
    job = Job(update, NativePasses(), params, state)
    for step, participants in enumerate(history):
        flat = zip(SHAPES.items(), job.weights, strict=True)
        weights = {leaf: array.reshape(shape) for (leaf, shape), array in flat}
        parts = {rank: contribution(rank, step, weights) for ranks in participants for rank in ranks}
        if name in WIRE_DTYPES:
            parts = {
                rank: {leaf: in_numbers(array, WIRE_DTYPES[name]) for leaf, array in part.items()}
                for rank, part in parts.items()
            }
        means = {}
        for leaf, ranks in zip(SHAPES, participants, strict=True):
            total = parts[ranks[0]][leaf]
            for rank in ranks[1:]:
                total = total + parts[rank][leaf]
            means[leaf] = total * np.float32(1 / np.float32(len(ranks)))
        job.step(means)
    leaves = jax.tree.leaves(state)
    for index, value in zip(update.worker_states, job.worker_states, strict=True):
        leaves[index] = np.asarray(value)
    for leaf, arrays in zip(update.leaves, job.states, strict=True):
        for index, array in zip(leaf.states, arrays, strict=True):
            leaves[index] = array
    return digest(job.weights, job.weights, leaves)


def digest(*trees: Any) -> str:
    """Of the weights that workers have, those that reducers keep, and the state."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]
