"""Pipelines of trees with None of the user's in them, and of stages that send each other values of any dtype."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero

WIDTH, LAYERS, ROWS, MICROBATCHES = 8, 8, 4, 2


def normal(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape)


def worst(found: Any, wanted: Any) -> float:
    """The largest difference; the trees must be the same, None included."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted), (found, wanted)
    return max(
        float(jnp.max(jnp.abs(a - b))) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    )


def none_is_the_users() -> dict[str, Any]:
    """In parameters, a batch and a state; with an optimizer, clipping, and a checkpoint."""
    params = [
        {"kernel": 0.5 * normal(i, WIDTH, WIDTH), "bias": None if i % 2 else jnp.zeros(WIDTH), "act": None}
        for i in range(LAYERS)
    ]
    batch = {"x": normal(9, ROWS, WIDTH), "mask": None}
    state = {"unused": None, "mean": jnp.zeros(WIDTH)}

    def loss(params: Any, batch: Any, state: Any) -> Any:
        x = batch["x"]
        state = {"unused": None, "mean": 0.5 * state["mean"] + 0.5 * x.mean(0)}
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + (0 if layer["bias"] is None else layer["bias"]))
        return jnp.mean(x**2), (None, state)

    settings = {"state_argnum": 2, "has_aux": True, "microbatches": MICROBATCHES}
    grad_fn = jaxhetero.pipeline.value_and_grad(loss, stages=jaxhetero.size(), **settings)
    grad_fn.cut(jax.eval_shape(lambda: params), batch, state)
    own = grad_fn.own(params)
    assert jax.tree.structure(grad_fn.init(lambda: params)) == jax.tree.structure(own)
    (_, (aux, own_state)), grads = grad_fn(own, batch, state)
    assert aux is None
    assert jax.tree.structure(grads) == jax.tree.structure(own)
    tx = optax.chain(grad_fn.clip_by_global_norm(0.01), optax.adam(1e-2))
    updates, opt_state = tx.update(grads, tx.init(own), own)
    trained = optax.apply_updates(own, updates)

    parts = [{"x": part, "mask": None} for part in jnp.split(batch["x"], MICROBATCHES)]
    wanted, wanted_state = None, state
    for part in parts:
        gradients, (_, wanted_state) = jax.grad(loss, has_aux=True)(params, part, wanted_state)
        wanted = gradients if wanted is None else jax.tree.map(jnp.add, wanted, gradients)
    wanted = jax.tree.map(lambda leaf: leaf / MICROBATCHES, wanted)
    alone = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2))
    wanted_updates, wanted_opt_state = alone.update(wanted, alone.init(params), params)
    gathered = jaxhetero.pipeline.gather(opt_state)
    again = jaxhetero.pipeline.part(gathered, opt_state)
    whole = jaxhetero.pipeline.gather(trained)
    assert jax.tree.structure(grad_fn.own(whole)) == jax.tree.structure(own)
    return {
        "parted": jax.tree.structure(own) != jax.tree.structure(params),
        "gradients": worst(jaxhetero.pipeline.gather(grads), wanted),
        "state": worst(jaxhetero.pipeline.gather(own_state), wanted_state),
        "trained": worst(whole, optax.apply_updates(params, wanted_updates)),
        "opt_state": worst(gathered, wanted_opt_state),
        "part": worst(again, opt_state),
    }


def stages_send_every_dtype() -> dict[str, Any]:
    """What the first layer makes is used by the last one: a key, a mask, and numbers of 4 and 8 bits."""
    params = [0.5 * normal(i, WIDTH, WIDTH) for i in range(LAYERS)]
    x, whole_key = normal(9, ROWS, WIDTH), jax.random.key(3)
    keys = jax.random.split(jax.random.key(4, impl="rbg"), MICROBATCHES)

    def loss(params: Any, x: Any, keys: Any, whole_key: Any) -> Any:
        h = jnp.tanh(x @ params[0])
        mask, narrow, codes = h > 0, h.astype(jnp.float8_e4m3fn), (4 * h).astype(jnp.int4)
        # Of the parameters, so that no other stage can compute it for itself.
        drawn = jax.random.fold_in(keys[0], (1000 * jnp.abs(h[0, 0])).astype(jnp.int32))
        for kernel in params[1:-1]:
            h = jnp.tanh(h @ kernel)
        h = jnp.where(mask, h, narrow.astype(h.dtype)) + codes.astype(h.dtype)
        h = h * jax.random.bernoulli(drawn, 0.5, h.shape) + jax.random.normal(whole_key, h.shape)
        return jnp.mean((h @ params[-1]) ** 2)

    settings = {"whole_argnums": (3,), "microbatches": MICROBATCHES}
    grad_fn = jaxhetero.pipeline.value_and_grad(loss, stages=jaxhetero.size(), **settings)
    report = grad_fn.cut(params, x, keys, whole_key)
    _, grads = grad_fn(grad_fn.own(params), x, keys, whole_key)
    step = jax.grad(loss)
    size = ROWS // MICROBATCHES
    of_parts = [step(params, x[i * size : (i + 1) * size], keys[i : i + 1], whole_key) for i in range(MICROBATCHES)]
    wanted = jax.tree.map(lambda *leaves: sum(leaves) / MICROBATCHES, *of_parts)
    count = size * WIDTH
    return {
        # The activations, and a bool, a float8, an int4 for each, and a key.
        "received": report.stages[-1].received_bytes == count * (4 + 3) + 16,
        "gradients": worst(jaxhetero.pipeline.gather(grads), wanted),
    }


def gathered_keys() -> dict[str, Any]:
    """A tree that is no part of the model: each worker holds one leaf, of a dtype of its own."""
    names = ("key", "int4", "float8")
    whole = {
        "key": jax.random.key(7, impl="rbg"),
        "int4": jnp.arange(4, dtype=jnp.int4),
        "float8": jnp.ones(2, "float8_e5m2"),
    }
    own = {
        name: leaf if i % jaxhetero.size() == jaxhetero.rank() else None for i, (name, leaf) in enumerate(whole.items())
    }
    found = jaxhetero.pipeline.gather({**own, "nobody": None})
    same = [found[name].dtype == whole[name].dtype for name in names]
    same.append(np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(whole["key"])))
    same.append(np.array_equal(found["int4"].astype(int), whole["int4"].astype(int)))
    return {"same": all(same), "nobody": found["nobody"] is None}


def main() -> None:
    jaxhetero.initialize()
    found = {case.__name__: case() for case in (none_is_the_users, stages_send_every_dtype, gathered_keys)}
    print(json.dumps(found), flush=True)
    jaxhetero.shutdown()


main()
