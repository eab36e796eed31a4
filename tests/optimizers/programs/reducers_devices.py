"""An optimizer on reducers, on workers of two devices each.

Prints for each optimizer whether its weights, and what ``pull`` gives, have the bits of a worker of one device that
has added the devices' gradients up itself; the bytes that a worker sent, over those of its gradients; and refusals. A
worker that is alone runs the optimizer itself, in another program: its weights are to be near.

Arguments: "own", "global" or "flat" for the mesh, and the coordinator of jax.distributed.
"""

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import on_reducers

KIND, JAX_COORDINATOR = sys.argv[1:3]
DEVICES, STEPS = 2, 3
BUCKET_BYTES = 40_000  # so that each device makes some of the calls
P = jax.P
TX = {"sgd": optax.sgd(0.1), "lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.01))}
TX["lamb in int8"] = TX["lamb"]
WIRE_DTYPES = {"lamb in int8": jnp.int8}
NAMES = {"own": ("devices",), "global": ("workers", "devices"), "flat": ("devices",)}[KIND]


def make_mesh() -> jax.sharding.Mesh:
    size = jaxhetero.size()
    shape = {"own": (DEVICES,), "global": (size, DEVICES), "flat": (size * DEVICES,)}[KIND]
    return jax.make_mesh(shape, NAMES, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def weights() -> dict[str, jax.Array]:
    return {f"w{number}": jnp.full((100, 100), 1.0 + number) for number in range(3)} | {"b": jnp.zeros(50)}


def gradients(step: int) -> dict[str, np.ndarray]:
    """A row for each device of this worker."""
    random = np.random.default_rng([jaxhetero.rank(), step])
    return {name: random.standard_normal((DEVICES, *leaf.shape), np.float32) for name, leaf in weights().items()}


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(tree)]


def is_same(got: np.ndarray, wanted: np.ndarray) -> bool:
    if jaxhetero.size() == 1:
        return np.allclose(got, wanted, rtol=1e-5, atol=1e-6)
    return got.tobytes() == wanted.tobytes()


def expected(name: str) -> list[np.ndarray]:
    """What workers of one device have after the steps: the weights, and what ``pull`` gives."""
    optimizer = on_reducers(TX[name], bucket_bytes=BUCKET_BYTES, wire_dtype=WIRE_DTYPES.get(name))
    params = weights()
    state = optimizer.init(params)
    for step in range(STEPS):
        grads = {key: rows[0] / DEVICES + rows[1] / DEVICES for key, rows in gradients(step).items()}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return arrays((params, optimizer.pull(state)))


def trained(name: str, check_vma: bool) -> tuple[list[np.ndarray], float]:
    """The same on all devices; and the bytes sent in the last step, over those of the gradients."""
    mesh = make_mesh()
    optimizer = on_reducers(TX[name], NAMES, bucket_bytes=BUCKET_BYTES, wire_dtype=WIRE_DTYPES.get(name))
    rows = jax.sharding.NamedSharding(mesh, P(NAMES))

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(jax.tree.map(lambda row: row[0], grads), state, params)
        return optax.apply_updates(params, updates), state

    def spread(step: Any, *in_specs: Any) -> Any:
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=check_vma))

    everywhere = jax.sharding.NamedSharding(mesh, P())
    params = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(everywhere, np.asarray(leaf)), weights())
    state = spread(optimizer.init, P())(params)
    run = spread(step, P(), P(), P(NAMES))
    for number in range(STEPS):
        grads = {key: jax.make_array_from_process_local_data(rows, row) for key, row in gradients(number).items()}
        jax.block_until_ready(params)
        before = jaxhetero.metrics().sent_bytes
        params, state = run(params, state, grads)
    jax.block_until_ready(params)
    sent = jaxhetero.metrics().sent_bytes - before
    pulled = spread(optimizer.pull, P())(state)
    return arrays((params, pulled)), sent / sum(leaf.nbytes for leaf in weights().values())


def refusals() -> dict[str, str]:
    """Of an axis that is not named, and of gradients that JAX has summed."""
    mesh = jax.make_mesh((1, 2), ("a", "b"), devices=jax.local_devices(), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = {"w": jnp.ones(4)}
    told = {}
    for name, axes in (("unnamed", "a"), ("summed", ("a", "b"))):
        optimizer = on_reducers(optax.sgd(0.1), axes)

        def step(params: Any, state: Any, x: Any, optimizer: Any = optimizer) -> Any:
            grads = jax.grad(lambda params: jnp.sum(params["w"] * x))(params)
            return optimizer.update(grads, state, params)[1]

        run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("b")), out_specs=P(), check_vma=name == "summed")
        try:
            jax.jit(run)(params, optimizer.init(params), jnp.ones(8))
        except jaxhetero.errors.ConfigError as error:
            told[name] = str(error)
    return told


def main() -> None:
    rank, size = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if KIND != "own":
        jax.distributed.initialize(JAX_COORDINATOR, size, rank)
    jaxhetero.initialize()
    result: dict[str, Any] = {"equal": {}, "sent": {}}
    for name in TX:
        wanted = expected(name)
        for check_vma in (False,) if name == "sgd" else (False, True):
            got, result["sent"][f"{name} {check_vma}"] = trained(name, check_vma)
            result["equal"][f"{name} {check_vma}"] = all(is_same(*pair) for pair in zip(got, wanted, strict=True))
    if KIND == "own":
        result["refusals"] = refusals()
    print(json.dumps(result))


main()
