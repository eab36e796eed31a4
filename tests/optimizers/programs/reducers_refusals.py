"""What users do with an optimizer on reducers beside a training step; prints what came of each case.

That is "right", the text of a ConfigError, or another exception with its name.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import accumulate_gradients, on_reducers

STEPS = 4
SGD = optax.sgd(0.1)
Tree = dict[str, Any]


def parameters(value: float = 1.0, *dtypes: Any) -> Tree:
    kernel, half, bias = dtypes or (jnp.float32,) * 3
    return {
        "kernel": jnp.full((4, 3), value, kernel),
        "half": jnp.full(5, -value, half),
        "bias": jnp.full(3, 2 * value, bias),
    }


def gradients(params: Tree, factor: float) -> Tree:
    """Those of a worker, of which the mean over two workers is 1.5 times as much as those for a factor of 1."""
    numbers = {name: np.arange(1, 1 + leaf.size).reshape(leaf.shape) / 16 for name, leaf in params.items()}
    return {name: jnp.asarray(factor * numbers[name], leaf.dtype) for name, leaf in params.items()}


def mean() -> float:
    return float(np.mean([1.0 + rank for rank in range(jaxhetero.size())]))


def own() -> float:
    return 1.0 + jaxhetero.rank()


def in_float32(tree: Tree) -> Tree:
    return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in tree.items()}


def trained(tx: optax.GradientTransformation, params: Tree, step: Any = jax.jit, factor: float = 1.0) -> Tree:
    """By ``tx`` as it is, on float32."""
    params = in_float32(params)
    state = tx.init(params)
    for _ in range(STEPS):
        updates, state = step(tx.update)(gradients(params, factor * mean()), state, params)
        params = optax.apply_updates(params, updates)
    return params


def check(got: Tree, wanted: Tree, rtol: float = 1e-5) -> None:
    for name, leaf in wanted.items():
        np.testing.assert_allclose(np.asarray(got[name], np.float32), leaf, rtol=rtol, atol=1e-6)


def is_like_workers(
    tx: optax.GradientTransformation, *dtypes: Any, gradient_dtypes: Any = (), rtol: float = 1e-5, **options: Any
) -> None:
    """The weights after some steps, and those that the reducers keep, are those of the optimizer on workers."""
    optimizer = on_reducers(tx, **options)
    params = parameters(1.0, *dtypes)
    state = optimizer.init(params)
    for _ in range(STEPS):
        grads = gradients(params, own())
        for name, dtype in zip(grads, gradient_dtypes, strict=False):
            grads[name] = grads[name].astype(dtype)
        updates, state = jax.jit(optimizer.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    wanted = trained(tx, parameters(1.0, *dtypes))
    check(params, wanted, rtol)
    check(optimizer.pull(state)[0], wanted, min(rtol, 4e-3))


MIXED = (jnp.bfloat16, jnp.float16, jnp.float32)
DTYPES: dict[str, Callable[[], Any]] = {
    "mixed": lambda: is_like_workers(optax.adamw(0.1), *MIXED, rtol=1e-2),
    "mixed, weights in bfloat16": lambda: is_like_workers(
        optax.adamw(0.1), *MIXED, rtol=1e-2, weights_dtype=jnp.bfloat16
    ),
    "mixed, float16 on the wire": lambda: is_like_workers(optax.adamw(0.1), *MIXED, rtol=1e-2, wire_dtype=jnp.float16),
    "gradients of other dtypes": lambda: is_like_workers(
        optax.sgd(0.1, momentum=0.9), gradient_dtypes=(jnp.float16, jnp.bfloat16), rtol=1e-2
    ),
    "gradients of float32": lambda: is_like_workers(
        optax.adamw(0.1), *MIXED, gradient_dtypes=(jnp.float32,) * 3, rtol=1e-2
    ),
    "whole gradients": lambda: stepped(on_reducers(SGD), grads={"w": np.ones(3, int)}),
}


def norms(tree: Tree) -> jax.Array:
    return jnp.stack([jnp.linalg.norm(leaf) for leaf in jax.tree.leaves(tree)])


def uneven(grads: Tree) -> Tree:
    """The kernel's norm waits for that of the bias, and that of the other leaf for the kernel's; each has a bucket."""
    kernel = grads["kernel"] / (1 + jnp.linalg.norm(grads["bias"]))
    half = grads["half"] / (1 + jnp.linalg.norm(kernel))
    return {"kernel": kernel, "half": half, "bias": grads["bias"] / (1 + jnp.linalg.norm(half))}


def scaled(function: Callable[[Tree], Tree]) -> optax.GradientTransformation:
    stateless = optax.stateless(lambda updates, _: function(updates))
    return optax.chain(stateless, SGD)


SUMS: dict[str, Callable[[], Any]] = {
    "the norm of norms": lambda: is_like_workers(
        scaled(lambda g: jax.tree.map(lambda leaf: leaf / jnp.linalg.norm(norms(g)), g))
    ),
    "sums of other leaves": lambda: is_like_workers(scaled(uneven), bucket_bytes=16),
    "apply_if_finite inside": lambda: is_like_workers(optax.apply_if_finite(optax.adam(0.1), 3)),
}


def stepped(optimizer: Any, grads: Any = None, **extra: Any) -> None:
    """A step from ones, by 0.1 times gradients of ones."""
    params = {"w": jnp.ones(3)}
    grads = grads or {"w": jnp.full(3, own())}
    updates, _ = optimizer.update(grads, optimizer.init(params), params, **extra)
    check(optax.apply_updates(params, updates), {"w": np.full(3, 1 - 0.1 * mean())})


def taken(take: Callable[[Tree, Tree], Any]) -> Any:
    """What becomes of parameters of ones and updates."""
    optimizer, params = on_reducers(SGD), {"w": jnp.ones(3)}
    updates, _ = optimizer.update({"w": jnp.full(3, own())}, optimizer.init(params), params)
    return take(params, updates)


def applied(take: Callable[[Tree, Tree], Any]) -> None:
    check(taken(take), {"w": np.full(3, 1 - 0.1 * mean())})


def scanned() -> None:
    optimizer, params = on_reducers(SGD), {"w": jnp.ones(3)}

    def step(carry: Any, _: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update({"w": jnp.full(3, own())}, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=3)
    check(params, {"w": np.full(3, 1 - 0.3 * mean())})


def in_shard_map(params: Tree, updates: Tree) -> Tree:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    same = jax.shard_map(lambda tree: tree, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    applied: Tree = optax.apply_updates(params, jax.jit(same)(updates))
    return applied


def looked_ahead() -> None:
    optimizer = optax.lookahead(on_reducers(SGD), 2, 0.5)
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(3)})
    optimizer.update({"w": jnp.ones(3)}, optimizer.init(params), params)


TAKEN: dict[str, Callable[[], Any]] = {
    "apply_updates": lambda: applied(optax.apply_updates),
    "jitted apply_updates": lambda: applied(jax.jit(optax.apply_updates)),
    "a sum by hand": lambda: applied(lambda p, u: jax.tree.map(lambda a, b: a + b, p, u)),
    "NumPy's parameters": lambda: applied(
        lambda p, u: optax.apply_updates(jax.tree.map(np.asarray, p), jax.device_put(u))
    ),
    "shard_map": lambda: applied(in_shard_map),
    "scan": scanned,
    "donated": lambda: applied(jax.jit(optax.apply_updates, donate_argnums=1, keep_unused=True)),
    "in front": lambda: stepped(optax.chain(optax.identity(), on_reducers(SGD))),
    "behind, identity": lambda: stepped(optax.chain(on_reducers(SGD), optax.identity())),
    "partition": lambda: stepped(optax.partition({"a": on_reducers(SGD), "b": optax.set_to_zero()}, {"w": "a"})),
    "behind, scale": lambda: stepped(optax.chain(on_reducers(SGD), optax.scale(0.5))),
    "behind, weight decay": lambda: stepped(optax.chain(on_reducers(SGD), optax.add_decayed_weights(0.1))),
    "behind, ema": lambda: stepped(optax.chain(on_reducers(SGD), optax.ema(0.9))),
    "MultiSteps": lambda: stepped(optax.MultiSteps(on_reducers(SGD), 2)),
    "apply_if_finite": lambda: stepped(optax.apply_if_finite(on_reducers(SGD), 2)),
    "lookahead": looked_ahead,
    "inject_hyperparams": lambda: stepped(
        optax.inject_hyperparams(lambda learning_rate: on_reducers(optax.sgd(learning_rate)))(0.1)
    ),
    "their norm": lambda: taken(lambda _, updates: optax.tree.norm(updates)),
    "incremental_update": lambda: taken(lambda params, updates: optax.incremental_update(updates, params, 0.1)),
    "a map": lambda: taken(lambda _, updates: jax.tree.map(lambda u: 0.5 * u, updates)),
    "a difference": lambda: taken(lambda params, updates: jax.tree.map(lambda p, u: p - 0.5 * u, params, updates)),
    "a decay by hand": lambda: taken(lambda params, updates: jax.tree.map(lambda p, u: 0.9 * p + u, params, updates)),
    "a branch": lambda: taken(lambda _, updates: jax.lax.cond(own() > 0, lambda: updates, lambda: updates)),
    "ravel_pytree": lambda: taken(lambda _, updates: jax.flatten_util.ravel_pytree(updates)),
    "vmap": lambda: jax.vmap(lambda w: on_reducers(SGD).init({"w": w}))(jnp.ones((2, 3))),
    "a derivative": lambda: jax.jvp(lambda w: on_reducers(SGD).init({"w": w}), (jnp.ones(3),), (jnp.ones(3),)),
    "value": lambda: stepped(on_reducers(optax.chain(SGD, optax.contrib.reduce_on_plateau()))),
    "value, unused": lambda: stepped(on_reducers(optax.chain(SGD)), value=1.0),
    "value, in front": lambda: stepped(accumulate_gradients(on_reducers(optax.chain(SGD, plateau())), 1), value=1.0),
}


def plateau() -> optax.GradientTransformationExtraArgs:
    """Half the step where ``value`` is given."""

    def update(updates: Any, state: Any, params: Any = None, *, value: Any = None, **_: Any) -> Any:
        return (updates if value is None else jax.tree.map(lambda leaf: leaf * value / 2, updates)), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def twins(init: Any = None, step: Any = jax.jit, pushed: bool = False) -> None:
    """One optimizer for two models of one shape, in turns."""
    tx = optax.sgd(0.1, momentum=0.9)
    optimizer = on_reducers(tx)
    models = [parameters(1.0, *MIXED), parameters(2.0, *MIXED)]
    make = init(optimizer) if init else optimizer.init
    states = [make(params) for params in models]
    if pushed:
        states = [optimizer.push(*optimizer.pull(state), state) for state in states]
    update = step(optimizer.update)
    for _ in range(STEPS):
        for number, params in enumerate(models):
            updates, states[number] = update(gradients(params, own() * (1 + number)), states[number], params)
            models[number] = jax.block_until_ready(optax.apply_updates(params, updates))
    for number, state in enumerate(states):
        wanted = trained(tx, parameters(1.0 + number, *MIXED), factor=1.0 + number)
        check(models[number], wanted, 1e-2)
        check(optimizer.pull(state)[0], wanted, 4e-3)


def shaped_first(optimizer: Any) -> Any:
    """On one worker alone, as for a checkpoint that it reads."""
    if jaxhetero.rank() == 0:
        jax.eval_shape(optimizer.init, parameters())
    return jax.jit(optimizer.init)


def of_several_shapes() -> None:
    optimizer = on_reducers(SGD)
    models = [{"w": jnp.ones(3)}, {"w": jnp.full((2, 2), 2.0)}]
    states = [optimizer.init(params) for params in models]
    for params, state in zip(models, states, strict=True):
        check(optimizer.pull(state)[0], params)


MODELS: dict[str, Callable[[], Any]] = {
    "two": twins,
    "two, not jitted": lambda: twins(step=lambda update: update),
    "two by one compiled init": lambda: twins(lambda optimizer: jax.jit(optimizer.init)),
    "two, and a shape on one worker": lambda: twins(shaped_first),
    "two that are pushed": lambda: twins(pushed=True),
    "of several shapes": of_several_shapes,
    "gradients of another": lambda: stepped(on_reducers(SGD), grads={"w": jnp.ones((2, 2))}),
}


def outcome(case: Callable[[], Any]) -> str:
    try:
        case()
    except jaxhetero.errors.ConfigError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "right"


def main() -> None:
    jaxhetero.initialize()
    print(json.dumps({name: outcome(case) for name, case in (DTYPES | SUMS | TAKEN | MODELS).items()}))


main()
