"""A training whose gradients are reduced across steps; prints digests beside those of the ordinary step.

Arguments: the optimizer, perhaps with " on reducers" behind it; the dtype on the wire or "-"; and perhaps a file: after
step 20, with rounds on their way, rank 0 says so and waits until the file is there, and so does rank 1 before it starts
the same rounds.
"""

import hashlib
import io
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero import optimizers

STEPS = 50
PAUSE, RESTART = 20, 30
BUCKET_BYTES = 100_000
OPTIMIZERS = {
    "sgd": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS), weight_decay=0.01),
    "lamb": optimizers.lamb(3e-3, max_grad_norm=None),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(3e-3)),
}
Params = list[dict[str, jax.Array]]


def initial_params() -> Params:
    generator = np.random.default_rng(0)
    return [
        {"weight": jnp.asarray(generator.normal(0, 0.1, (m, n)), jnp.float32), "bias": jnp.zeros(n, jnp.float32)}
        for m, n in itertools.pairwise([64, 257, 129, 65, 10])
    ]


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([jaxhetero.rank(), step])
    return generator.normal(size=(16, 64)).astype(np.float32), generator.normal(size=(16, 10)).astype(np.float32)


def loss_fn(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        inputs = jnp.tanh(inputs @ layer["weight"] + layer["bias"])
    return jnp.mean((inputs @ params[-1]["weight"] + params[-1]["bias"] - targets) ** 2)


def digest(tree: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()


def on_reducers(tx: optax.GradientTransformation, wire_dtype: Any) -> optimizers.ReducersOptimizer:
    return optimizers.on_reducers(tx, wire_dtype=wire_dtype, bucket_bytes=BUCKET_BYTES)


def ordinary(tx: optax.GradientTransformation, wire_dtype: Any) -> tuple[Any, list[float]]:
    reduces = isinstance(tx, optimizers.ReducersOptimizer)

    @jax.jit
    def train_step(params: Params, opt_state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        if not reduces:
            grads = jaxhetero.pmean(grads, wire_dtype=wire_dtype, bucket_bytes=BUCKET_BYTES)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = initial_params()
    opt_state = tx.init(params)
    losses = []
    for step in range(STEPS):
        params, opt_state, loss = train_step(params, opt_state, *batch(step))
        losses.append(float(loss))
    return (tx.pull(opt_state) if reduces else (params, opt_state)), losses


def across(tx: optax.GradientTransformation, wire_dtype: Any, pause: Path | None) -> tuple[Any, list[float]]:
    """Half-way it starts again from a checkpoint. No step waits for the one before."""
    reduces = isinstance(tx, optimizers.ReducersOptimizer)
    options = {} if reduces else {"wire_dtype": wire_dtype, "bucket_bytes": BUCKET_BYTES}
    optimizer = optimizers.across_steps(tx, **options)

    def settle(state: Any) -> tuple[Any, Any]:
        """The weights, and the state of the optimizer as optax has it."""
        params, opt_state = optimizer.settle(state)
        return tx.pull(opt_state) if reduces else (params, opt_state)

    def train_step(state: Any, inputs: jax.Array, targets: jax.Array) -> Any:
        params, state = optimizer.weights(state)
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        return optimizer.send(state, grads), loss

    run = jax.jit(train_step, donate_argnums=0)
    state = optimizer.init(initial_params())
    losses = []
    for step in range(STEPS):
        if step == PAUSE and pause is not None:
            if jaxhetero.rank() == 0:
                state, loss = jax.block_until_ready(run(state, *batch(step)))
                assert jaxhetero.metrics().pending_count > 0
                print("pending", flush=True)
            while not pause.exists():
                time.sleep(0.01)
            if jaxhetero.rank() == 0:
                losses.append(loss)
                continue
        if step == RESTART:
            params, opt_state = restored(settle(state))
            state = optimizer.init(params, tx.push(params, opt_state) if reduces else opt_state)
        state, loss = run(state, *batch(step))
        losses.append(loss)
    return settle(state), [float(loss) for loss in losses]


def restored(tree: Any) -> Any:
    """What a checkpoint gives back."""
    file = io.BytesIO()
    leaves, structure = jax.tree.flatten(tree)
    np.savez(file, *leaves)
    file.seek(0)
    return jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in np.load(file).values()])


def main() -> None:
    jaxhetero.initialize()
    name, at_reducers = sys.argv[1].removesuffix(" on reducers"), sys.argv[1].endswith(" on reducers")
    wire_dtype = None if sys.argv[2] == "-" else sys.argv[2]
    tx = on_reducers(OPTIMIZERS[name], wire_dtype) if at_reducers else OPTIMIZERS[name]
    trained, losses = across(tx, wire_dtype, Path(sys.argv[3]) if len(sys.argv) > 3 else None)
    ordinary_tx = on_reducers(OPTIMIZERS[name], wire_dtype) if at_reducers else tx
    expected, expected_losses = ordinary(ordinary_tx, wire_dtype)
    views = jaxhetero.metrics().view_count
    jaxhetero.shutdown()
    different = [step for step in range(STEPS) if losses[step] != expected_losses[step]]
    result = {"across": digest(trained), "ordinary": digest(expected), "different": different, "views": views}
    print(json.dumps(result))


main()
