"""Programs that an optimizer on reducers has to refuse; the argument says which."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxhetero
from jaxhetero.optimizers import on_reducers


def main() -> None:
    mistake, devices = sys.argv[1], 2 if sys.argv[1] == "lost on two devices" else 1
    jax.config.update("jax_num_cpu_devices", devices)
    jaxhetero.initialize()
    rate = 0.1 * (1 + jaxhetero.rank()) if mistake == "rates" else 0.1
    axis_name = "devices" if devices > 1 else None
    wire_dtype = (jnp.int4, jnp.int8)[jaxhetero.rank()] if mistake == "wire" else None
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    optimizer = on_reducers(tx, axis_name, wire_dtype=wire_dtype, backups=0)
    params = {"w": jnp.ones((200, 200))}
    state = optimizer.init(params)
    if mistake == "rates":
        state = state._replace(own=jax.tree.map(lambda number: jnp.full_like(number, rate), state.own))
    step = optimizer.update
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
        everywhere = jax.sharding.PartitionSpec()
        step = jax.shard_map(step, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    step = jax.jit(step)

    def run(state: Any) -> Any:
        updates, state = step(params, state, params)
        jax.block_until_ready(updates)
        return state

    after = run(state)
    if mistake == "twice":
        run(state)
    if mistake == "replaced":
        optimizer.push(*optimizer.pull(after))
        run(after)
    print("running", flush=True)
    while mistake.startswith("lost"):
        after = run(after)
        time.sleep(0.01)


main()
