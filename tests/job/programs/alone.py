"""A user's first script: no setting at all. Given an address, JAX's processes meet there after ``initialize()``."""

import sys

import jax
import jax.numpy as jnp

import jaxhetero
from jaxhetero.errors import ConfigError

try:
    jaxhetero.initialize()
    if len(sys.argv) > 1:
        address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        jax.distributed.initialize(address, count, number)
    print(f"the sum is {float(jaxhetero.psum(jnp.ones(()), name='loss'))}", flush=True)
except ConfigError as error:
    print(error, flush=True)
