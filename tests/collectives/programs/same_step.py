"""One train step, written once for any ``pmean``: with jax.lax's on a global mesh, and with ours in every way there is.

Those are plain jit and a global mesh or, where no coordinator of ``jax.distributed`` is given, a mesh in each process.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero

STEPS = 5
Params = dict[str, jax.Array]
OPTIMIZER = optax.adam(1e-2)


def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return generator.normal(size=(8, 16)).astype(np.float32), generator.normal(size=(8, 3)).astype(np.float32)


def loss(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["first"])
    return jnp.mean((hidden @ params["second"] - targets) ** 2)


def make_step(pmean: Callable[[Any], Any], varying: Callable[[Any], Any] = lambda tree: tree) -> Callable[..., Any]:
    def step(params: Params, state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(varying(params), inputs, targets)
        gradients, value = pmean((gradients, value))
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def train(step: Callable[..., Any], place: Callable[[Any], Any] = lambda batch: batch) -> str:
    """A digest of the parameters and the loss after some steps."""
    generator = np.random.default_rng(0)
    params = {name: generator.normal(0, 0.3, shape) for name, shape in {"first": (16, 32), "second": (32, 3)}.items()}
    params = jax.tree.map(np.float32, params)
    state = OPTIMIZER.init(params)
    compiled = jax.jit(step)
    for number in range(STEPS):
        params, state, value = compiled(params, state, *place(batch(jaxhetero.rank(), number)))
    leaves = [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves((params, value))]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def main() -> None:
    rank, size = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    is_global = len(sys.argv) > 1
    if is_global:
        jax.distributed.initialize(sys.argv[1], size, rank)
    jaxhetero.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("workers"))

    def place(arrays: Any) -> Any:
        return [jax.make_array_from_process_local_data(rows, array) for array in arrays]

    digests = {"plain jit": train(make_step(jaxhetero.pmean))}
    for library in (jax.lax, jaxhetero) if is_global else (jaxhetero,):
        for check_vma in (True, False):

            def varying(tree: Any, cast: bool = check_vma) -> Any:
                return jax.lax.pcast(tree, "workers", to="varying") if cast else tree

            step = make_step(lambda tree, lib=library: lib.pmean(tree, "workers"), varying)
            specs = (jax.P(), jax.P(), jax.P("workers"), jax.P("workers"))
            shard = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check_vma)
            digests[f"{library.__name__}, check_vma={check_vma}"] = train(shard, place)
    jaxhetero.shutdown()
    print(json.dumps(digests))


main()
