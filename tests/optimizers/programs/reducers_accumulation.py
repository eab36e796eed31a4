"""Training with two pieces in a step, with the optimizer on reducers and on workers; prints what came of it.

One piece of one worker has an infinite gradient. The loss scale, by which gradients are multiplied, is halved then.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import accumulate_gradients, dynamic_loss_scale, on_reducers, scale_loss
from tests.optimizers.optimizer_zoo import recorded, weights

STEPS, PIECES, SPOILT = 4, 2, 3


def train(optimizer: optax.GradientTransformation) -> dict[str, Any]:
    optimizer = accumulate_gradients(optimizer, PIECES)
    params = jax.tree.map(jnp.asarray, weights())
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params: Any, state: Any, gradients: Any) -> Any:
        scale = scale_loss(jnp.float32(1), state)
        updates, state = optimizer.update(jax.tree.map(lambda leaf: leaf * scale, gradients), state, params)
        return optax.apply_updates(params, updates), state

    rounds, moved = [], []
    for number, gradients in enumerate(recorded(STEPS * PIECES, jaxhetero.rank())):
        if number == SPOILT and jaxhetero.rank() == 1:
            gradients["bias"][7] = np.inf
        before, old = jaxhetero.metrics().round_count, params
        params, state = step(params, state, gradients)
        jax.block_until_ready(params)
        rounds.append(jaxhetero.metrics().round_count > before)
        moved.append(any(np.any(old[name] != params[name]) for name in params))
    return {
        "weights": {name: np.asarray(leaf).ravel().tolist() for name, leaf in params.items()},
        "rounds": rounds,
        "moved": moved,
        "scale": float(scale_loss(jnp.float32(1), state)),
        "skipped": int(optax.tree.get(state, "skipped_count")),
        "steps": int(optax.tree.get(state, "count")),
    }


def main() -> None:
    jaxhetero.initialize()
    tx = dynamic_loss_scale(optax.adam(1e-2), 1024)
    on_workers = optax.chain(jaxhetero.all_reduce_gradients(), tx)
    print(json.dumps({"reducers": train(on_reducers(tx)), "workers": train(on_workers)}))


main()
