"""A training of a small model with the parts of all trainers, slowed down; prints what came of it as JSON.

Its state counts how often each microbatch has been in a step.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import jaxhetero
from models.common.batches import BatchSplit
from models.common.command import RunOptions
from models.common.optimizer import GradientConfig, distributed
from models.common.stages import split_over_replicas
from models.common.steps import data_parallel_step
from models.common.training import Training

MICROBATCHES = 6
STEPS, STEP_S = int(sys.argv[1]), float(sys.argv[2])


class State(NamedTuple):
    params: Any
    counts: jax.Array
    opt_state: Any


def piece(state: State, number: jax.Array) -> dict[str, Any]:
    batch = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (8, 16))

    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch @ params["first"]) @ params["second"] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    counts = state.counts + MICROBATCHES * (jnp.arange(state.counts.size) == number)
    return {"loss": loss, "grads": grads, "counts": counts}


def batches(split: BatchSplit, first_step: int) -> Iterator[tuple[np.uint32]]:
    for step in range(first_step, STEPS):
        time.sleep(STEP_S)
        for index in range(split.accumulate_every):
            yield (np.uint32(split.piece(step, index)),)


jaxhetero.initialize()
options = RunOptions(microbatches=MICROBATCHES)
split = split_over_replicas(8 * MICROBATCHES, 0, options)
optimizer = distributed(optax.adamw(1e-2), GradientConfig(), instead=optax.identity())
generator = np.random.default_rng(0)
params = {name: jnp.asarray(generator.normal(size=(16, 16)), jnp.float32) for name in ("first", "second")}
result = Training(
    title="small model",
    unit="rows",
    split=split,
    step_count=STEPS,
    stretch_steps=STEPS,
    evaluate_every=1,
    label=lambda step: (
        print(f"process {os.getpid()} of rank {jaxhetero.rank()} is in at step {step}", flush=True) or ""
    ),
    state=State(params, jnp.zeros(STEPS * MICROBATCHES), optimizer.init(params)),
    train_step=data_parallel_step(piece, optimizer, GradientConfig(), split, options, ("counts",)),
    batches=batches,
    learning_rate=lambda step: 1e-2,
    evaluate=lambda state: {"other_count": float(jnp.sum(jnp.round(state.counts[MICROBATCHES:]) != 1))},
    identity={},
    advice="",
).run(options, Console(quiet=True))
jaxhetero.shutdown()
print(json.dumps([result.weights_digest, result.losses[1:], result.scores["other_count"]]), flush=True)
