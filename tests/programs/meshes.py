"""psum, pmean and broadcast under jax.shard_map: on one global mesh, or on a mesh of this process alone."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

KIND, JAX_COORDINATOR = sys.argv[1:3]
P = jax.P


def make_array(mesh: jax.sharding.Mesh, rank: int, local_devices: int) -> jax.Array:
    """Row ``i`` of the global array is ``[i, i + 1, i + 2]``; this worker holds its own."""
    row = np.arange(3, dtype=np.float32)[None] + rank
    return jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, P("workers")), row)


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
    x = make_array(mesh, rank, jax.local_device_count())

    results = {}
    for check_vma in (True, False):

        def shard(x: jax.Array) -> dict[str, jax.Array]:
            return {
                "psum": jaxhetero.psum(x, "workers"),
                "psum of one": jaxhetero.psum(jnp.ones(2), "workers"),
                "pmean": jaxhetero.pmean(x, "workers"),
                "broadcast": jaxhetero.broadcast(x, 1, "workers"),
            }

        step = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("workers"), out_specs=P(), check_vma=check_vma))
        outputs = step(x)
        results[str(check_vma)] = {name: np.asarray(y.addressable_data(0)).tolist() for name, y in outputs.items()}
    jaxhetero.shutdown()
    print(json.dumps(results))


main()
