"""An optimizer on reducers in every place where it may be used; prints the weights of each as bytes, and refusals."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

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


def train_linen() -> str:
    """The same in flax's TrainState."""
    params = {"w": jnp.ones((40, 50)), "b": jnp.zeros(50)}
    state = TrainState.create(apply_fn=None, params=params, tx=on_reducers(optax.adamw(0.1)))
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for number in range(STEPS):
        state = step(state, gradients(jaxhetero.rank(), number))
    return np.asarray(state.params["w"]).tobytes().hex()[:64]


class Weights(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((40, 50)))
        self.b = nnx.Param(jnp.zeros(50))


def train_nnx() -> str:
    """The same in flax's nnx.Optimizer."""
    model = Weights()
    optimizer = nnx.Optimizer(model, on_reducers(optax.adamw(0.1)), wrt=nnx.Param)
    structure = jax.tree.structure(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model: Any, optimizer: Any, grads: Any) -> None:
        optimizer.update(model, jax.tree.unflatten(structure, jax.tree.leaves(grads)))

    for number in range(STEPS):
        step(model, optimizer, gradients(jaxhetero.rank(), number))
    return np.asarray(model.w[...]).tobytes().hex()[:64]


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
    trained |= {"linen": train_linen(), "nnx": train_nnx()}
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
