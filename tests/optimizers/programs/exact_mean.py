"""Steps of eight microbatches, dealt to the workers in an order of the argument's; prints what comes of them."""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from jaxhetero.optimizers import ExactMean

MICROBATCHES = 8
STEPS = 5

jax.config.update("jax_enable_x64", True)
DTYPES = {"wide": "float64", "plain": "float32", "narrow": "bfloat16", "none": "float32"}
SIZES = np.random.default_rng(0).lognormal(sigma=4, size=(40, 25))


def gradients(step: int, microbatch: int) -> dict[str, np.ndarray]:
    """Of all sizes: between the elements of a leaf, and from one step to the next."""
    generator = np.random.default_rng((step, microbatch))
    size = [1.0, 1.7, 0.3, 1e-6, 0.9e-6][step]
    found = {name: size * SIZES * generator.normal(size=SIZES.shape) for name in DTYPES}
    found["none"][...] = 0
    return {name: np.asarray(jnp.asarray(leaf, DTYPES[name])) for name, leaf in found.items()}


def error_of(mean: np.ndarray, step: int) -> float:
    """Of float32, as a share of the largest number."""
    given = np.stack([gradients(step, microbatch)["plain"] for microbatch in range(MICROBATCHES)]).astype(np.float64)
    return float(np.abs(mean - given.mean(0)).max() / np.abs(given).max())


jaxhetero.initialize()
means = ExactMean(MICROBATCHES)
sums = means.init(gradients(0, 0))
add, finish = jax.jit(means.add), jax.jit(means.mean)
seed, steps = int(sys.argv[1]), []
for step in range(STEPS):
    # All workers have the same idea of who takes what; some take nothing.
    random = np.random.default_rng((seed, step))
    takers = random.integers(jaxhetero.size(), size=MICROBATCHES)
    for microbatch in random.permutation(MICROBATCHES).tolist():
        if takers[microbatch] == jaxhetero.rank():
            sums = add(sums, gradients(step, microbatch))
    mean, is_whole, fits, sums = finish(sums)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(mean))).hexdigest()
    error = error_of(np.asarray(mean["plain"]), step) if fits else 0
    steps.append([bool(is_whole), bool(fits), digest, error])
jaxhetero.shutdown()
print(json.dumps(steps))
