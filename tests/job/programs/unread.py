"""Launches steps that depend on each other, keeps the last result or none, and shuts down at once.

Argument: "kept" or "dropped". Rank 0 is late, so the first round waits for it while the other worker shuts down.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

STEPS = 8

jaxhetero.initialize()


@jax.jit
def step(x: jax.Array) -> jax.Array:
    for _ in range(20):
        x = jnp.cos(x @ x)
    return jaxhetero.psum(x)


x = jax.block_until_ready(step(jnp.eye(400)))
if jaxhetero.rank() == 0:
    time.sleep(1)
for _ in range(STEPS):
    x = step(x)
if sys.argv[1] == "dropped":
    del x
with jax.transfer_guard("disallow"):  # of the program, which shutting down must not mind
    jaxhetero.shutdown()
print(json.dumps(float(np.abs(np.asarray(x)).sum()) if sys.argv[1] == "kept" else None))
