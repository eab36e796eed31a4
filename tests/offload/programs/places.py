"""Every collective of jax.lax, offloaded, in every transformation and in every place where JAX runs programs.

Prints, by transformation and collective, "holds" or what the refusal says. In a global mesh the results are compared
with those of XLA's own collectives. Elsewhere they are compared with those of jax.vmap over the values of all workers,
which defines them.

Arguments: the place, and the coordinator of jax.distributed for the places in a global mesh.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxhetero
from jaxhetero.errors import ConfigError

P = jax.P
PLACE = sys.argv[1]
AXIS = "batch"
Function = Callable[[jax.Array], Any]

COLLECTIVES: dict[str, Function] = {
    "psum": lambda x: lax.psum(x, AXIS),
    "pmean": lambda x: lax.pmean(x, AXIS),
    "pmax": lambda x: lax.pmax(x, AXIS),
    "pmin": lambda x: lax.pmin(x, AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS).sum(0),
    "psum_scatter": lambda x: lax.psum_scatter(jnp.concatenate([x, 2 * x]), AXIS, tiled=True),
}


def in_custom_jvp(op: Function) -> Function:
    function = jax.custom_jvp(op)
    function.defjvp(lambda primals, tangents: (op(primals[0]), op(tangents[0])))
    return function


def in_custom_vjp(op: Function) -> Function:
    function = jax.custom_vjp(op)
    function.defvjp(lambda x: (op(x), None), lambda _, cotangent: (cotangent,))
    return function


def in_scan(op: Function) -> Function:
    return lambda x: lax.scan(lambda carry, row: (carry + varying(op(row)).sum(), op(row)), varying(jnp.zeros(())), x)


def in_while_loop(op: Function) -> Function:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] + 1, varying(op(state[1]))

    return lambda x: lax.while_loop(lambda state: state[0] < 2, body, (jnp.int32(0), x))[1]


def in_cond(op: Function) -> Function:
    return lambda x: lax.cond(jaxhetero.size() > 1, lambda x: varying(op(x)), lambda x: x + 1, x)


def jvp_of(op: Function) -> Function:
    return lambda x: jax.jvp(op, (x,), (jnp.cos(x),))


def grad_of(op: Function) -> Function:
    return lambda x: jax.value_and_grad(lambda x: jnp.sum(jnp.sin(op(x))))(x)


Transformation = Callable[[Function], Function]
INSIDE: dict[str, Transformation] = {
    "nothing": lambda op: op,
    "jit": jax.jit,
    "scan": in_scan,
    "while_loop": in_while_loop,
    "cond": in_cond,
    "checkpoint": jax.checkpoint,
    "custom_jvp": in_custom_jvp,
    "custom_vjp": in_custom_vjp,
    "vmap": jax.vmap,
    "jvp": jvp_of,
    "grad": grad_of,
}
OUTSIDE: dict[str, Transformation] = {
    "vmap of offload": jax.vmap,
    "jvp of offload": jvp_of,
    "grad of offload": grad_of,
}


def varying(x: jax.Array) -> jax.Array:
    """In typed shard_map the two branches of a cond, and the carries of a loop, must have one type."""
    is_typed = PLACE == "shard_map" and AXIS not in jax.typeof(x).mat.varying
    return lax.pcast(x, AXIS, to="varying") if is_typed else x


def values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(jaxhetero.size(), 2, 3)).astype(np.float32)


def with_own_axis(function: Function) -> Function:
    """``function`` of the only row of a device, and its results as rows again."""
    return lambda rows: jax.tree.map(lambda leaf: varying(leaf)[None], function(rows[0]))


def in_global_mesh(ours: Function, theirs: Function) -> str:
    rounds = jaxhetero.metrics().round_count
    mine = jax.tree.map(local, run_in_mesh(ours))
    if jaxhetero.metrics().round_count == rounds:  # JAX's own collectives would give the same results
        return "left to JAX"
    return compare(mine, jax.tree.map(local, run_in_mesh(theirs)))


def run_in_mesh(function: Function) -> Any:
    own = values()[jaxhetero.rank()]
    if PLACE == "pmap":
        return jax.pmap(function, axis_name=AXIS)(own[None])
    mesh = jax.make_mesh((jaxhetero.size(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P(AXIS)), own[None])
    options = {"mesh": mesh, "in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": PLACE == "shard_map"}
    return jax.jit(jax.shard_map(with_own_axis(function), **options))(rows)


def local(leaf: jax.Array) -> np.ndarray:
    return np.asarray(leaf.addressable_shards[0].data)


def in_global_jit(transform: Transformation, collective: str) -> str:
    """Of values of type "unreduced", which only psum and pmean take: ours against the sum over the rows by XLA."""
    if collective not in ("psum", "pmean"):
        return "no such type"
    mesh = jax.make_mesh((jaxhetero.size(),), (AXIS,), axis_types=(jax.sharding.AxisType.Explicit,))
    share = 1 if collective == "psum" else jaxhetero.size()

    def ours(x: jax.Array) -> Any:
        part = lax.reduce_sum(x, (x.ndim - 1,), out_sharding=P(*[None] * (x.ndim - 1), unreduced={AXIS}))
        return x * getattr(jaxhetero, collective)(part)[..., None]

    def theirs(x: jax.Array) -> Any:
        return x * (x.sum(-1, keepdims=True) / share)

    with jax.set_mesh(mesh):
        own = values()[jaxhetero.rank()]  # [2, 3] of each worker, side by side
        x = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P(None, AXIS)), own)
        return compare(*(jax.tree.map(local, jax.jit(transform(f))(x)) for f in (ours, theirs)))


def in_own_process(ours: Function, theirs: Function) -> str:
    own = values()[jaxhetero.rank()]
    if PLACE == "own pmap":
        mine = jax.tree.map(lambda leaf: leaf[0], jax.pmap(ours, axis_name=AXIS)(own[None]))
    else:
        mine = jax.jit(ours)(own)
    whole = jax.jit(jax.vmap(theirs, axis_name=AXIS))(values())
    return compare(mine, jax.tree.map(lambda leaf: leaf[jaxhetero.rank()], whole))


def outcome(run: Callable[[], str]) -> str:
    """What a user sees."""
    try:
        return run()
    except NotImplementedError as error:
        return f"no derivative: {error}"
    except ConfigError as error:
        return f"refused: {error}"
    except ValueError as error:
        return f"refused by JAX: {error}"


def compare(mine: Any, expected: Any) -> str:
    pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True)
    return "holds" if all(np.allclose(a, b, rtol=1e-6) for a, b in pairs) else f"differs: {mine} {expected}"


IS_GLOBAL = len(sys.argv) > 2


def main() -> None:
    if IS_GLOBAL:
        size, rank = int(os.environ["JAXHETERO_WORKER_COUNT"]), int(os.environ["JAXHETERO_RANK"])
        jax.distributed.initialize(sys.argv[2], size, rank)
    jax.config.update("jax_disable_most_optimizations", True)  # the time is that of compilations
    jaxhetero.initialize()
    offload = jaxhetero.offload(axis_name=None if IS_GLOBAL else AXIS)
    run = in_global_mesh if IS_GLOBAL else in_own_process
    found: dict[str, dict[str, str]] = {}
    for name, transform in {**INSIDE, **OUTSIDE}.items():
        found[name] = {}
        for collective, op in COLLECTIVES.items():
            if PLACE == "global jit":
                case = functools.partial(in_global_jit, transform, collective)
            elif name in INSIDE:
                case = functools.partial(run, offload(transform(op)), transform(op))
            else:
                case = functools.partial(run, transform(offload(op)), transform(op))
            found[name][collective] = outcome(case)
    jaxhetero.shutdown()
    print(json.dumps(found))


main()
