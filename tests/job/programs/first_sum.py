"""The first thing that anybody tries: a sum over the workers, inside a jitted function. Fails where it is wrong."""

import jax
import jax.numpy as jnp

import jaxhetero

jaxhetero.initialize()
total = jax.jit(jaxhetero.psum)(jnp.arange(5.0) + jaxhetero.rank())
expected = jaxhetero.size() * jnp.arange(5.0) + sum(range(jaxhetero.size()))
assert (total == expected).all(), total
print(f"rank {jaxhetero.rank()} of {jaxhetero.size()}: {total}")
jaxhetero.shutdown()
