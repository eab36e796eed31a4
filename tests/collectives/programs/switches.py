"""What is ours under each of JAX's switches, against the same without; prints what is wrong, by switch and case."""

import json
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero

# Those of a line are on together: each line compiles everything anew.
SWITCHES: list[dict[str, Any]] = [
    {"jax_disable_jit": True},
    {"jax_transfer_guard": "disallow"},
    {"jax_check_tracer_leaks": True, "jax_enable_x64": True},
    {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise", "jax_debug_key_reuse": True},
    {"jax_debug_nans": True},
]
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def on_device(array: Any) -> jax.Array:
    return jax.device_put(np.asarray(array))


def ranked(dtype: Any, *shape: int) -> jax.Array:
    count = int(np.prod(shape))
    return on_device((np.arange(count) % 5 + jaxhetero.rank()).reshape(shape).astype(dtype))


def tree() -> dict[str, jax.Array]:
    return {
        "floats": ranked(np.float32, 2, 3),
        "halves": ranked(jnp.bfloat16, 4),
        "integers": ranked(np.int32, 3),
        "bools": ranked(bool, 2),
    }


def moved() -> dict[str, jax.Array]:
    return tree() | {"key": KEY, "float8": ranked(jnp.float8_e5m2, 4), "int4": ranked(jnp.int4, 4)}


def collectives(tree: Any, moved: Any, rows: jax.Array) -> Any:
    """One call of each."""
    return (
        jaxhetero.psum(tree),
        jaxhetero.pmean(tree),
        jaxhetero.pmax(tree),
        jaxhetero.pmin(tree),
        jaxhetero.psum(tree, wire_dtype=jnp.bfloat16),
        jaxhetero.psum(tree, workers=[0, 1]),
        jaxhetero.all_gather(moved, axis=-1),
        jaxhetero.broadcast(moved, 1),
        jaxhetero.psum_scatter(rows),
        jaxhetero.ppermute(moved, perm=[(0, 1), (1, 0)]),
        jaxhetero.all_to_all(rows, None, 0, 1),
        jaxhetero.all_gather(tree, axis_index_groups=[[1, 0]]),
    )


@case
def eagerly() -> Any:
    return collectives(tree(), moved(), ranked(np.float32, 2, 3))


@case
def in_jit() -> Any:
    return jax.jit(collectives)(tree(), moved(), ranked(np.float32, 2, 3))


@case
def in_vmap() -> Any:
    rows = ranked(np.float32, 2, 3)
    return jax.vmap(lambda x: (jaxhetero.pmean(x), jaxhetero.all_gather(x), jaxhetero.broadcast(x)))(rows)


def smooth(rows: jax.Array) -> Any:
    return jaxhetero.pmean(rows), jaxhetero.all_gather(rows), jaxhetero.broadcast(rows), jaxhetero.psum_scatter(rows)


@case
def derivatives() -> Any:
    """Not by ``jax.grad`` itself, which makes a one on the host."""
    rows = ranked(np.float32, 2, 3)
    results, pull_back = jax.vjp(smooth, rows)
    return jax.jvp(smooth, (rows,), (rows,)), pull_back(results)


@case
def derivatives_in_jit() -> Any:
    def loss(rows: jax.Array) -> jax.Array:
        return jnp.sum(jaxhetero.replicated(rows, mean=True) * rows) + jnp.sum(jaxhetero.psum(rows * rows))

    return jax.jit(jax.grad(loss))(ranked(np.float32, 2, 3))


@case
def in_shard_map() -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("d",))
    step = jax.shard_map(
        lambda x: (jaxhetero.psum(x, "d"), jaxhetero.all_gather(x, "d", to="invarying")),
        mesh=mesh,
        in_specs=jax.P("d"),
        out_specs=jax.P(),
    )
    return jax.jit(step)(ranked(np.float32, 2, 3))


@case
def barrier() -> Any:
    return jaxhetero.barrier()


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x @ params["w"] - params["b"]))


def trained(tx: optax.GradientTransformation) -> Any:
    """Two steps."""
    x = ranked(np.float32, 4, 3)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params: Any = {"w": on_device(np.ones((3, 2), np.float32)), "b": on_device(np.zeros((1, 2), np.float32))}
    state = tx.init(params)
    for _ in range(2):
        params, state = step(params, state)
    return params


@case
def optimizer_on_workers() -> Any:
    return trained(optax.chain(jaxhetero.optimizers.all_reduce_gradients(), optax.sgd(0.1)))


@case
def optimizer_on_reducers() -> Any:
    return trained(jaxhetero.optimizers.on_reducers(optax.sgd(0.1)))


@case
def pipeline() -> Any:
    params = [on_device(np.eye(4, dtype=np.float32) * 0.5) for _ in range(4)]
    params.append(on_device(np.ones((1, 4)).astype(jnp.bfloat16)))
    x = ranked(np.float32, 4, 4)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params[:-1]:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(jnp.square(x * params[-1].astype(x.dtype)))

    grad_fn = jaxhetero.pipeline.value_and_grad(loss, stages=2, microbatches=2)
    grad_fn.cut(params, x)
    own = grad_fn.own(params)
    value, grads = grad_fn(own, x)
    clip = grad_fn.clip_by_global_norm(0.01)
    grads, _ = jax.jit(lambda grads: clip.update(grads, clip.init(grads)))(grads)
    return value, jaxhetero.pipeline.gather(grads)


def is_same(found: Any, wanted: Any) -> bool:
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    for a, b in pairs:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        if a.shape != b.shape or not np.allclose(a, b, rtol=1e-6):
            return False
    return True


def turn(switches: dict[str, Any]) -> None:
    for name, value in switches.items():
        jax.config.update(name, value)


def main() -> None:
    off = {name: getattr(jax.config, name) for switches in SWITCHES for name in switches}
    jax.config.update("jax_transfer_guard", "disallow")
    jaxhetero.initialize()
    turn(off)
    global KEY
    KEY = jax.random.key(jaxhetero.rank())
    wanted = {name: function() for name, function in CASES.items()}
    wrong = {}
    for switches in SWITCHES:
        for name, function in CASES.items():
            turn(switches)
            try:
                found = jax.block_until_ready(function())
            except Exception:
                wrong[f"{switches}: {name}"] = traceback.format_exc()[-600:]
                continue
            finally:
                turn(off)
            if not is_same(found, wanted[name]):
                wrong[f"{switches}: {name}"] = "another result"
    print(json.dumps({"wrong": wrong, "count": len(SWITCHES) * len(CASES)}), flush=True)
    jax.config.update("jax_transfer_guard", "disallow")
    jaxhetero.shutdown()


main()
