"""Sums a bucket of so many bytes so many times; prints the median time of a round, in seconds."""

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

import jaxhetero

SIZE, ROUNDS = int(sys.argv[1]), int(sys.argv[2])

jaxhetero.initialize()
step = jax.jit(jaxhetero.psum)
operand = jnp.ones(SIZE // 4)
times = []
for _ in range(ROUNDS + 3):
    began = time.perf_counter()
    step(operand).block_until_ready()
    times.append(time.perf_counter() - began)
print(json.dumps({"median_s": statistics.median(times[3:])}))
jaxhetero.shutdown()
