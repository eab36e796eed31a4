"""An optimizer on reducers whose gradients go in 8 and 4 bits.

Prints for each dtype of the wire whether training has the bits that it has with gradients that NumPy has rounded, and
the bytes that a worker sent over those of its gradients.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import across_steps, error_feedback, on_reducers
from tests.optimizers.update_machine import NUMBERS, in_numbers

STEPS = 3
SHAPES: dict[str, tuple[int, ...]] = {"w": (300, 171), "b": (63,), "s": (), "e": (0,), "half": (7, 100)}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))


def gradients(step: int) -> dict[str, Any]:
    """With blocks of very different sizes, of zeros, and one with a NaN."""
    random = np.random.default_rng([jaxhetero.rank(), step])
    tree: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        size = np.exp(random.normal(0, 4, shape))
        tree[name] = np.asarray(random.standard_normal(shape) * size).astype(np.float32)
    tree["w"].reshape(-1)[1000:1200] = 0
    tree["w"].reshape(-1)[5000] = np.nan
    tree["half"] = tree["half"].astype(jnp.bfloat16)
    return tree


def params() -> dict[str, jax.Array]:
    return {name: jnp.full(shape, 0.5, jnp.bfloat16 if name == "half" else None) for name, shape in SHAPES.items()}


def digest(tree: Any) -> list[bytes]:
    # The bits of a NaN are no one's promise.
    return [np.nan_to_num(np.asarray(leaf, np.float32), nan=7.0).tobytes() for leaf in jax.tree.leaves(tree)]


def trained(optimizer: optax.GradientTransformation, rounded: str = "") -> list[bytes]:
    weights = params()
    state = optimizer.init(weights)
    update = jax.jit(optimizer.update)
    for step in range(STEPS):
        given = gradients(step)
        if rounded:
            given = {name: in_numbers(leaf, rounded) for name, leaf in given.items()}
        updates, state = update(given, state, weights)
        weights = optax.apply_updates(weights, updates)
    return digest(weights)


def trained_across(tx: optax.GradientTransformation, wire_dtype: str) -> list[bytes]:
    training = across_steps(on_reducers(tx, wire_dtype=wire_dtype))
    state = training.init(params())
    send = jax.jit(lambda state, grads: training.send(training.weights(state)[1], grads))
    for step in range(STEPS):
        state = send(state, gradients(step))
    return digest(training.settle(state)[0])


def check(wire_dtype: str) -> dict[str, bool]:
    adam, clipped = optax.adam(0.01), CLIPPED
    feedback = optax.chain(error_feedback(wire_dtype), on_reducers(adam))
    expected = trained(on_reducers(adam), wire_dtype)
    return {
        "one stage": trained(on_reducers(adam, wire_dtype=wire_dtype)) == expected,
        "rounded": trained(on_reducers(adam)) != expected,
        "small buckets": trained(on_reducers(adam, wire_dtype=wire_dtype, bucket_bytes=1)) == expected,
        "two stages": trained(on_reducers(clipped, wire_dtype=wire_dtype)) == trained(on_reducers(clipped), wire_dtype),
        "across steps": trained_across(adam, wire_dtype) == expected,
        # What it has rounded is not rounded again.
        "error feedback": trained(optax.chain(error_feedback(wire_dtype), on_reducers(adam, wire_dtype=wire_dtype)))
        == trained(feedback),
    }


def sent(wire_dtype: str) -> float:
    optimizer = on_reducers(optax.sgd(0.1), wire_dtype=wire_dtype)
    weights = jnp.zeros(1 << 20)
    state = optimizer.init(weights)
    gradient = np.random.default_rng(jaxhetero.rank()).standard_normal(1 << 20, np.float32)
    update = jax.jit(optimizer.update)
    _, state = jax.block_until_ready(update(gradient, state))
    before = jaxhetero.metrics().sent_bytes
    jax.block_until_ready(update(gradient, state))
    return (jaxhetero.metrics().sent_bytes - before) / gradient.nbytes


def main() -> None:
    jaxhetero.initialize()
    equal = {wire_dtype: check(wire_dtype) for wire_dtype in NUMBERS}
    parts = {wire_dtype: sent(wire_dtype) for wire_dtype in NUMBERS}
    print(json.dumps({"equal": equal, "sent": parts}))


main()
