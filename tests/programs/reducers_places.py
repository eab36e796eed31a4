"""An optimizer on reducers in every place where it may be used; prints the weights of each as bytes, and refusals."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import on_reducers

STEPS = 3


def gradients(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    return {"w": random.standard_normal((40, 50), np.float32), "b": random.standard_normal(50, np.float32)}


def train(place: Any) -> str:
    """Steps of AdamW; ``place`` makes a step of what takes one."""
    axis_name, wrap = place
    optimizer = on_reducers(optax.adamw(0.1), axis_name)
    params = {"w": jnp.ones((40, 50)), "b": jnp.zeros(50)}
    state = optimizer.init(params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = wrap(step)
    for number in range(STEPS):
        params, state = run(params, state, gradients(jaxhetero.rank(), number))
    return np.asarray(params["w"]).tobytes().hex()[:64]


def in_shard_map(step: Any) -> Any:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.PartitionSpec()
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))


def refusal(call: Any) -> str:
    try:
        call()
    except jaxhetero.errors.ConfigError as error:
        return str(error)
    return "nothing was refused"


def main() -> None:
    jaxhetero.initialize()
    places = {
        "eager": (None, lambda step: step),
        "jit": (None, jax.jit),
        "donated": (None, lambda step: jax.jit(step, donate_argnums=(0, 1))),
        "offload": (None, lambda step: jax.jit(jaxhetero.offload(step))),
        "shard_map": ("d", in_shard_map),
    }
    trained = {name: train(place) for name, place in places.items()}
    params = {"w": jnp.ones((3, 3))}
    refusals = {
        "random numbers": refusal(lambda: on_reducers(optax.contrib.muon(0.1)).init(params)),
        "integers": refusal(lambda: on_reducers(optax.sgd(0.1)).init({"w": jnp.ones(3, jnp.int32)})),
        "dtype": refusal(lambda: on_reducers(optax.sgd(0.1), weights_dtype=jnp.float16).init(params)),
        "backups": refusal(lambda: on_reducers(optax.sgd(0.1), backups=2)),
        "state": refusal(lambda: on_reducers(optax.sgd(0.1)).push(params, optax.adam(0.1).init(params))),
    }
    print(json.dumps({"trained": trained, "refusals": refusals}))


main()
