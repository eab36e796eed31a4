"""psum, pmean and broadcast under jax.shard_map: on one global mesh, or on a mesh of this process alone."""

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

KIND, JAX_COORDINATOR = sys.argv[1:3]
P = jax.P


def make_array(mesh: jax.sharding.Mesh, rank: int) -> jax.Array:
    """Row ``i`` of the global array is ``[i, i + 1, i + 2]``; this worker holds its own."""
    row = np.arange(3, dtype=np.float32)[None] + rank
    return jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, P("workers")), row)


def assert_gradients_are_those_of_lax(mesh: jax.sharding.Mesh, x: jax.Array, check_vma: bool) -> None:
    """One train step, written with either library and with the hook on replicated parameters."""
    weights = jnp.arange(3.0)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x * weights) ** 2)

    def gradients(library: Any) -> Any:
        def shard(weights: jax.Array, x: jax.Array) -> Any:
            local = jax.lax.pcast(weights, "workers", to="varying")
            return {
                "of the values": jax.grad(lambda x: library.psum(loss(weights, x), "workers") ** 2)(x)[0],
                "of the parameters": library.pmean(jax.grad(loss)(local, x), "workers"),
            }

        specs = {"of the values": P("workers"), "of the parameters": P()}
        return jax.jit(
            jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("workers")), out_specs=specs, check_vma=check_vma)
        )(weights, x)

    def hook(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: loss(jaxhetero.replicated(w, "workers", mean=True), x))(weights)

    ours, theirs = gradients(jaxhetero), gradients(jax.lax)
    hooked = jax.jit(jax.shard_map(hook, mesh=mesh, in_specs=(P(), P("workers")), out_specs=P(), check_vma=check_vma))
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name].addressable_data(0), array.addressable_data(0), rtol=1e-6)
    parameters = theirs["of the parameters"].addressable_data(0)
    np.testing.assert_allclose(hooked(weights, x).addressable_data(0), parameters, rtol=1e-6)


def main() -> None:
    rank, size = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    if KIND == "global":
        jax.distributed.initialize(JAX_COORDINATOR, size, rank)
    if KIND == "global" and os.environ.get("SETTINGS_FROM_JAX"):
        for name in ("RANK", "WORKER_COUNT", "COORDINATOR", "TOKEN"):
            os.environ.pop(f"JAXHETERO_{name}")
    jaxhetero.initialize()
    assert (jaxhetero.rank(), jaxhetero.size()) == (rank, size)
    mesh = jax.make_mesh((jax.device_count(),), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    x = make_array(mesh, rank)

    results = {}
    for check_vma in (True, False):

        def shard(x: jax.Array) -> dict[str, jax.Array]:
            return {
                "psum": jaxhetero.psum(x, "workers"),
                "psum of a constant": jaxhetero.psum(np.ones(2), "workers"),
                "psum of what does not vary": jaxhetero.psum(
                    jnp.ones(2, int) + 0 * jaxhetero.psum(x[0, :2], "workers").astype(int), "workers"
                ),
                "number of workers": jnp.zeros(jaxhetero.psum(1, "workers")),
                "pmean": jaxhetero.pmean(x, "workers"),
                "broadcast": jaxhetero.broadcast(x, 1, "workers"),
            }

        step = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("workers"), out_specs=P(), check_vma=check_vma))
        outputs = step(x)
        results[str(check_vma)] = {name: np.asarray(y.addressable_data(0)).tolist() for name, y in outputs.items()}
        if KIND == "global":
            assert_gradients_are_those_of_lax(mesh, x, check_vma)
    jaxhetero.shutdown()
    print(json.dumps(results))


main()
