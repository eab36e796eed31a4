"""A sum where JAX's processes have met first, as a launcher told them. jaxhetero asks JAX for the rest."""

import jax

jax.distributed.initialize()

import jaxhetero  # noqa: E402

jaxhetero.initialize()
assert (jaxhetero.rank(), jaxhetero.size()) == (jax.process_index(), jax.process_count())
print(f"rank {jaxhetero.rank()} of {jaxhetero.size()}: {jax.jit(jaxhetero.psum)(1.0)}")
jaxhetero.shutdown()
