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
    mistake = sys.argv[1]
    jaxhetero.initialize()
    rate = 0.1 * (1 + jaxhetero.rank()) if mistake == "rates" else 0.1
    optimizer = on_reducers(optax.inject_hyperparams(optax.sgd)(learning_rate=rate), backups=0)
    params = {"w": jnp.ones((200, 200))}
    state = optimizer.init(params)
    if mistake == "rates":
        state = state._replace(own=jax.tree.map(lambda number: jnp.full_like(number, rate), state.own))
    step = jax.jit(optimizer.update)

    def run(state: Any) -> Any:
        updates, state = step(params, state, params)
        jax.block_until_ready(updates)
        return state

    after = run(state)
    if mistake == "twice":
        run(state)
    print("running", flush=True)
    while mistake == "lost":
        after = run(after)
        time.sleep(0.01)


main()
