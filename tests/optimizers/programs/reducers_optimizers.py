"""Steps of optimizers on reducers; prints a digest of the weights and states of each, and what was wrong.

Arguments: the number of steps, the weights' dtype, the gradients' dtype, and names of optimizers (none: all).
"""

import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import on_reducers
from tests.optimizers.optimizer_zoo import OPTIMIZERS, SIGNS, recorded, weights

COPIES = np.float32([[1], [-2], [3], [0.5]])


def large(tree: dict[str, Any]) -> dict[str, Any]:
    """Reducers share what has 16384 elements, as the kernel then has."""
    return tree | {"kernel": np.kron(COPIES, tree["kernel"])}


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def train(tx: optax.GradientTransformation, steps: int, weights_dtype: str, wire_dtype: str) -> dict[str, str]:
    optimizer = on_reducers(
        tx, mean=False, weights_dtype=weights_dtype, wire_dtype=wire_dtype or None, bucket_bytes=4096
    )
    params = jax.tree.map(jnp.asarray, large(weights(jaxhetero.rank())))  # those of rank 0 count
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for gradients in map(large, recorded(steps, jaxhetero.rank())):
        params, state = step(params, state, gradients)
    kept, opt_state = jax.jit(optimizer.pull)(state)
    again = optimizer.pull(optimizer.push(kept, opt_state))
    return {"sent": digest(params), "kept": digest(kept), "state": digest(opt_state), "again": digest(again)}


def main() -> None:
    steps, weights_dtype, wire_dtype, *names = sys.argv[1:]
    known = OPTIMIZERS | SIGNS
    jaxhetero.initialize()
    print(json.dumps({name: train(known[name], int(steps), weights_dtype, wire_dtype) for name in names or known}))


if __name__ == "__main__":
    main()
