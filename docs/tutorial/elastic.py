"""Fits a line on all workers of an elastic job, one of which may be killed at any time.

jaxhetero launch --workers 4 --reducers 2 --elastic 2:4 -- python docs/tutorial/elastic.py
"""

import time

import jax
import jax.numpy as jnp

import jaxhetero

STEPS, BATCH = 600, 64


def loss(weights, x, y):
    """How far the line is from the points."""
    return jnp.mean((x @ weights - y) ** 2)


@jax.jit
def train_step(weights, x, y):
    """New weights, and how many workers have taken part."""
    gradient, who = jaxhetero.pmean(jax.grad(loss)(weights, x, y), weight=x.shape[0], who=True)
    return weights - 0.05 * gradient, who.count


def batch_of(step, index, size):
    """This worker's rows of the step's batch, as if there were always as many."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), index)
    x = jax.random.normal(key, (BATCH, 3))
    return x, x @ jnp.array([1.0, -2.0, 0.5])


jaxhetero.initialize()
weights, step = jnp.zeros(3), 0
# One that comes to a running job compiles before the others wait for it.
train_step = train_step.lower(weights, *batch_of(0, 0, 1)).compile()
while step < STEPS:
    weights, step, team = jaxhetero.elastic.gate(weights, step)
    weights, count = train_step(weights, *batch_of(step, team.index, team.size))
    step += 1
    time.sleep(0.05)  # so that there is time to look
    if team.is_first and step % 20 == 0:
        print(f"step {step}: {count} of ranks {team.ranks} have taken part, weights {weights}")
jaxhetero.shutdown()
