"""Transformations of psum and broadcast, each against what its definition says; prints the names of those that fail."""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
import jaxhetero.errors

Case = Callable[[], tuple[Any, Any]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a function that returns what it got and what it should have got."""
    CASES[function.__name__] = function
    return function


def value(rank: int) -> jax.Array:
    return jnp.arange(6.0).reshape(2, 3) + 10.0 * rank


def total() -> jax.Array:
    return functools.reduce(jnp.add, [value(rank) for rank in range(jaxhetero.size())])


def mine() -> jax.Array:
    return value(jaxhetero.rank())


@case
def eager() -> tuple[Any, Any]:
    return jaxhetero.psum(mine()), total()


@case
def nested_jit_called_twice() -> tuple[Any, Any]:
    inner = jax.jit(jaxhetero.psum)
    return jax.jit(lambda x: (inner(x), inner(2 * x)))(mine()), (total(), 2 * total())


@case
def donated() -> tuple[Any, Any]:
    return jax.jit(jaxhetero.psum, donate_argnums=0)(mine()), total()


@case
def ahead_of_time() -> tuple[Any, Any]:
    return jax.jit(jaxhetero.psum).lower(mine()).compile()(mine()), total()


@case
def scan() -> tuple[Any, Any]:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = carry + jaxhetero.psum(x)
        return carry, carry

    return jax.lax.scan(body, jnp.zeros(3), mine()), (total().sum(0), jnp.cumsum(total(), axis=0))


@case
def while_loop() -> tuple[Any, Any]:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] + 1, jaxhetero.pmean(state[1])

    start = (jnp.int32(0), mine())
    mean = total() / jaxhetero.size()
    return jax.lax.while_loop(lambda state: state[0] < 3, body, start), (jnp.int32(3), mean)


@case
def cond() -> tuple[Any, Any]:
    step = jax.jit(lambda take, x: jax.lax.cond(take, jaxhetero.psum, lambda y: -y, x))
    return (step(True, mine()), step(False, mine())), (total(), -mine())


@case
def vmap() -> tuple[Any, Any]:
    return jax.vmap(jaxhetero.psum)(mine()), total()


@case
def vmap_over_columns_with_unbatched_leaf() -> tuple[Any, Any]:
    def both(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jaxhetero.psum((x, y))

    got = jax.vmap(both, in_axes=(1, None), out_axes=(1, None))(mine(), mine()[0])
    return got, (total(), total()[0])


@case
def jvp() -> tuple[Any, Any]:
    return jax.jvp(jaxhetero.psum, (mine(),), (2 * mine(),)), (total(), 2 * total())


@case
def jvp_of_one_leaf() -> tuple[Any, Any]:
    fixed = mine() + 1
    got = jax.jvp(lambda x: jaxhetero.psum((x, fixed)), (mine(),), (mine(),))
    return got, ((total(), total() + jaxhetero.size()), (total(), jnp.zeros((2, 3))))


@case
def linearize() -> tuple[Any, Any]:
    primal, linear = jax.linearize(jaxhetero.psum, mine())
    return (primal, linear(3 * mine())), (total(), 3 * total())


@case
def grad_as_lax_psum_without_types() -> tuple[Any, Any]:
    """The cotangent of every worker's copy comes back summed: here 2 x total on each of n workers."""
    got = jax.grad(lambda x: jnp.sum(jaxhetero.psum(x) ** 2))(mine())
    return got, 2 * jaxhetero.size() * total()


@case
def grad_of_pmean_loss_is_the_local_gradient() -> tuple[Any, Any]:
    return jax.grad(lambda x: jaxhetero.pmean(jnp.sum(x**2)))(mine()), 2 * mine()


@case
def grad_of_broadcast_reaches_the_root() -> tuple[Any, Any]:
    scale = jaxhetero.rank() + 1.0
    got = jax.grad(lambda x: jnp.sum(scale * jaxhetero.broadcast(x, root=1)))(mine())
    factor = sum(range(1, jaxhetero.size() + 1)) if jaxhetero.rank() == 1 else 0
    return got, jnp.full((2, 3), float(factor))


@case
def grad_through_checkpoint() -> tuple[Any, Any]:
    loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(jaxhetero.psum(x))))
    return jax.jit(jax.grad(loss))(mine()), jaxhetero.size() * jnp.cos(total())


@case
def grad_through_scan() -> tuple[Any, Any]:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda carry, row: (carry + jaxhetero.psum(row), None), jnp.zeros(3), x)[0])

    return jax.grad(loss)(mine()), jnp.full((2, 3), float(jaxhetero.size()))


@case
def inside_custom_vjp() -> tuple[Any, Any]:
    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return jaxhetero.psum(x)

    f.defvjp(lambda x: (jaxhetero.psum(x), None), lambda _, ct: (7 * ct,))
    return jax.grad(lambda x: jnp.sum(f(x)))(mine()), jnp.full((2, 3), 7.0)


@case
def value_and_grad_of_replicated_parameters() -> tuple[Any, Any]:
    params = {"a": jnp.ones(3), "b": jnp.float32(2)}

    def loss(params: dict[str, jax.Array], x: jax.Array, mean: bool) -> jax.Array:
        params = jaxhetero.replicated(params, mean=mean, bucket_bytes=4)
        return jnp.sum(params["a"] * x) * params["b"]

    got = [jax.jit(jax.value_and_grad(loss), static_argnums=2)(params, mine(), mean) for mean in (False, True)]
    summed = {"a": 2 * total().sum(0), "b": total().sum()}
    averaged = jax.tree.map(lambda g: g / jaxhetero.size(), summed)
    value = 2 * mine().sum()
    return got, [(value, summed), (value, averaged)]


@case
def compiled_grad_of_broadcast() -> tuple[Any, Any]:
    """Of use on the root only, but everybody's contribution is: XLA must not drop it."""
    scale = jaxhetero.rank() + 1.0
    step = jax.jit(jax.grad(lambda x: jnp.sum(scale * jaxhetero.broadcast(x, root=1, name="dropped"))))
    factor = sum(range(1, jaxhetero.size() + 1)) if jaxhetero.rank() == 1 else 0
    return [step(mine()) for _ in range(2)], [jnp.full((2, 3), float(factor))] * 2


@case
def vmap_of_gather_and_scatter_over_the_last_axis() -> tuple[Any, Any]:
    size, rank = jaxhetero.size(), jaxhetero.rank()
    batch = jnp.stack([mine(), -mine()], axis=-1)
    gathered = jax.vmap(lambda x: jaxhetero.all_gather(x, axis=1), in_axes=-1, out_axes=-1)(batch)
    everyone = jnp.stack([value(other) for other in range(size)], axis=1)
    rows = jnp.stack([batch * factor for factor in range(size)])
    scattered = jax.vmap(jaxhetero.psum_scatter, in_axes=-1, out_axes=-1)(rows)
    expected = jnp.stack([total() * rank, -total() * rank], axis=-1)
    return (gathered, scattered), (jnp.stack([everyone, -everyone], axis=-1), expected)


@case
def grad_of_scatter_along_its_second_axis() -> tuple[Any, Any]:
    size = jaxhetero.size()

    def loss(x: jax.Array) -> jax.Array:
        part = jaxhetero.psum_scatter(x, scatter_dimension=1, tiled=True)
        return jnp.sum(part * (jaxhetero.rank() + 1))

    got = jax.jit(jax.grad(loss))(jnp.ones((2, 2 * size)))
    return got, jnp.tile(jnp.repeat(jnp.arange(1.0, size + 1), 2), (2, 1))


@case
def vmapped_axis_is_refused() -> tuple[Any, Any]:
    try:
        jax.vmap(lambda x: jaxhetero.psum(x, "rows"), axis_name="rows")(mine())
    except jaxhetero.errors.ConfigError as error:
        return "axis 'rows' is not one of a mesh" in str(error), True
    return "no error", True


@case
def vmap_with_spmd_axis_name() -> tuple[Any, Any]:
    mesh = jax.make_mesh((1, 1), ("batch", "devices"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inner = jax.shard_map(lambda x: jaxhetero.psum(x, "devices"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    return jax.jit(jax.vmap(inner, spmd_axis_name="batch"))(mine()), total()


@case
def loop_whose_length_is_agreed_on() -> tuple[Any, Any]:
    """pmax in the condition of a while loop: all workers leave it together."""

    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] - 1, state[1] + 1

    start = (jnp.int32(jaxhetero.rank()), jnp.int32(0))
    _, count = jax.lax.while_loop(lambda state: jaxhetero.pmax(state[0]) > 0, body, start)
    return count, jnp.int32(jaxhetero.size() - 1)


@case
def maximum_with_nan() -> tuple[Any, Any]:
    x = jnp.array([jnp.nan, -1.0, 0.0]) if jaxhetero.rank() == 1 else jnp.array([5.0, -2.0, -0.0])
    got = jaxhetero.pmax(x), jaxhetero.pmin(x), jnp.signbit(jaxhetero.pmax(x)[2]), jnp.signbit(jaxhetero.pmin(x)[2])
    return got, (jnp.array([jnp.nan, -1, 0]), jnp.array([jnp.nan, -2, 0]), False, True)


@case
def trees() -> tuple[Any, Any]:
    """Empty ones, None, Python numbers, booleans."""
    got = [jaxhetero.psum(tree) for tree in ({}, (), None, {"a": None, "b": [1, 2.5, True]})]
    size = jaxhetero.size()
    got.append(jaxhetero.pmin({"all": jaxhetero.rank() == 0, "b": jnp.array([True])}))
    return got, [{}, (), None, {"a": None, "b": [size, 2.5 * size, size]}, {"all": False, "b": jnp.array([True])}]


@case
def wire_types() -> tuple[Any, Any]:
    """float32 rounded once on its way out, summed in float32, rounded once on its way back; integers as they are."""
    x = {"wide": jnp.float32(1 / 3) * (mine() + 1), "count": jnp.int32(70_001)}
    got = [jaxhetero.psum(x, wire_dtype=dtype) for dtype in (jnp.bfloat16, "float16")]
    expected = []
    for dtype in (jnp.bfloat16, jnp.float16):
        parts = [(jnp.float32(1 / 3) * (value(rank) + 1)).astype(dtype) for rank in range(jaxhetero.size())]
        wide = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(dtype)
        expected.append({"wide": wide.astype(jnp.float32), "count": 70_001 * jaxhetero.size()})
    return got, expected


@case
def wire_types_of_gradients() -> tuple[Any, Any]:
    before = jaxhetero.metrics().sent_bytes
    grads = jax.grad(lambda p: jnp.sum(jaxhetero.replicated(p, wire_dtype=jnp.bfloat16) * jaxhetero.rank()))(
        jnp.ones(100_000)
    )
    grads.block_until_ready()
    sent = jaxhetero.metrics().sent_bytes - before
    return (grads, 200_000 <= sent < 210_000), (jnp.full(100_000, float(sum(range(jaxhetero.size())))), True)


@case
def barriers() -> tuple[Any, Any]:
    return [jaxhetero.barrier(), jaxhetero.barrier(name="checkpoint")], [None, None]


@case
def no_derivative_of_a_maximum() -> tuple[Any, Any]:
    try:
        jax.grad(lambda x: jnp.sum(jaxhetero.pmax(x)))(mine())
    except NotImplementedError as error:
        return "Differentiation rule for 'jaxhetero_pmax' not implemented" in str(error), True
    return "no error", True


@case
def names_in_the_jaxpr() -> tuple[Any, Any]:
    names = ("psum", "pmax", "pmin", "broadcast", "all_gather", "psum_scatter")
    x = jnp.ones((jaxhetero.size(), 2))
    found = [f"jaxhetero_{name}[" in str(jax.make_jaxpr(getattr(jaxhetero, name))(x)) for name in names]
    return found, [True] * len(names)


def fails(function: Case) -> bool:
    print(function.__name__, file=sys.stderr, flush=True)
    got, expected = function()
    try:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, expected)
    except AssertionError as error:
        print(function.__name__, error, flush=True)
        return True
    return False


def main() -> None:
    jaxhetero.initialize()
    failed = [name for name, function in CASES.items() if fails(function)]
    compiles_once = jax.jit(lambda x: jaxhetero.psum(x))
    for _ in range(3):
        compiles_once(mine())
    jaxhetero.shutdown()
    print(json.dumps({"failed": failed, "count": len(CASES), "compiled": compiles_once._cache_size()}))


main()
