"""Steps of an emulated accelerator without communication, then with local_steps; prints what the exchanges cost.

Arguments: megabytes of weights, seconds of a step, steps, every, fragments, overlap.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp

import jaxhetero

LAYERS = 16
megabytes, step_s = map(float, sys.argv[1:3])
steps, every, fragments, overlap = map(int, sys.argv[3:])

jaxhetero.initialize()
local = jaxhetero.optimizers.local_steps(every=every, fragments=fragments, overlap=overlap)
params = [jnp.ones(int(megabytes * 1e6 / 4 / LAYERS)) for _ in range(LAYERS)]
own_step = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 0.999, params))


def run(exchanges: bool, first: int, count: int) -> float:
    global params, state
    jaxhetero.barrier()
    began = time.perf_counter()
    for step in range(first, first + count):
        params = jax.block_until_ready(own_step(params))
        time.sleep(step_s)
        if exchanges:
            params, state = local.exchange(params, state, step)
    jax.block_until_ready(params)
    return (time.perf_counter() - began) / count


state = local.init(params)
run(True, 0, every)  # compiles
alone_s = run(False, 0, steps)
sent = jaxhetero.metrics().sent_bytes
local_s = run(True, every, steps)
sent = jaxhetero.metrics().sent_bytes - sent
params, state = local.settle(params, state)
print(json.dumps({"alone_s": alone_s, "local_s": local_s, "sent_of_a_sum": sent / steps / (megabytes * 1e6)}))
jaxhetero.shutdown()
