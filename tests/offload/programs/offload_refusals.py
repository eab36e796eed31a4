"""What offload refuses or leaves to JAX, and how it says so. Prints what went otherwise.

Argument: the coordinator of jax.distributed, for a global mesh; without one, each process knows its own device alone.
"""

import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

import jaxhetero
from jaxhetero.errors import ConfigError, NotInitializedError

P = jax.P
AXIS = "batch"
WRONG: list[str] = []
X = np.ones(4, np.float32)
offloaded = functools.partial(jaxhetero.offload, axis_name=AXIS)


def refused(text: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except ConfigError as error:
        if text in str(error):
            return
        WRONG.append(str(error))
    else:
        WRONG.append(f"not refused: {text}")


def to_all(x: jax.Array) -> jax.Array:
    return lax.pbroadcast(x, (AXIS,), 0)  # JAX takes the letters of a string as names


def loss_of_one(x: jax.Array) -> jax.Array:
    return x.sum()


def own_processes() -> None:
    mean: Callable[..., Any] = lambda x: lax.pmean(x, AXIS)  # noqa: E731
    refused("pbroadcast at offload_refusals.py:to_all", lambda: jax.jit(offloaded(to_all))(X))
    groups = functools.partial(lax.psum, axis_name=AXIS, axis_index_groups=[[0]])
    refused("must be in one group", lambda: jax.jit(offloaded(groups))(X))
    refused("must be the name of one axis", lambda: jaxhetero.offload(mean, axis_name=("a", "b")))  # type: ignore[call-overload]
    refused("bucket_bytes is 0", lambda: offloaded(mean, bucket_bytes=0))
    refused("wire_dtype is int16", lambda: offloaded(mean, wire_dtype=jnp.int16))
    refused("a block in a function that JAX traces", lambda: jax.jit(lambda x: jaxhetero.offload().__enter__())(X))
    messages = warnings()
    for _ in range(2):
        jax.jit(offloaded(loss_of_one))(X)
    if messages != ["offload: there is no collective in loss_of_one, so each worker runs it by itself"]:
        WRONG.append(str(messages))
    names()
    derivatives()
    known_before()
    blocks()


def own_mesh(*names: str, devices: int = 1) -> jax.sharding.Mesh:
    """Of the first devices of this worker, along the first axis."""
    sizes = (devices,) + (1,) * (len(names) - 1)
    types = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=types, devices=jax.local_devices()[:devices])


def names() -> None:
    """Where nobody has said which axis goes over the workers, and where the one that was said is not there."""

    def both(x: jax.Array) -> jax.Array:
        return lax.psum(x, AXIS) + lax.psum(x, "model")

    def total(x: jax.Array) -> jax.Array:
        return lax.psum(x, AXIS)

    rows = functools.partial(jax.vmap, axis_name=AXIS)
    refused(
        "'batch'; the axes that are mapped are 'model'", lambda: jax.jit(jaxhetero.offload(both, axis_name="model"))(X)
    )
    refused("nothing maps axis 'model'", lambda: jax.jit(jaxhetero.offload(both))(X))
    refused("nothing maps the axes 'batch', 'model'", lambda: in_block(lambda: jax.jit(lambda x: each(both)(x))(X)))
    refused("the argument axis_name", lambda: jaxhetero.offload(both)(X))
    refused("is not clear for psum at offload_refusals.py:names", lambda: jax.jit(rows(jaxhetero.offload(total)))(X))
    refused("an axis of jax.vmap", lambda: jax.jit(rows(offloaded(total)))(X))
    mapped = functools.partial(jax.shard_map, mesh=own_mesh(AXIS, "model"), in_specs=P(AXIS), out_specs=P())
    for call in (
        lambda: jax.jit(mapped(jaxhetero.offload(both)))(X),
        lambda: in_block(lambda: jax.jit(mapped(both))(X)),
    ):
        refused("is not clear for psum at offload_refusals.py:names", call)
    local = jax.jit(mapped(offloaded(lambda x: lax.psum(lax.psum(x, "model"), AXIS))))(X)
    if not np.array_equal(local, np.full(4, jaxhetero.size())):
        WRONG.append(f"a mesh of two axes, one of them named: {local}")
    refused(
        "nothing maps axis 'typo'", lambda: in_block(lambda: jax.pmap(lambda x: lax.psum(x, "typo"), AXIS)(X[None]))
    )


def each(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Each axis in a jitted function of its own."""
    one, other = (jax.jit(lambda x, axis=axis: lax.psum(x, axis)) for axis in (AXIS, "model"))
    return lambda x: one(x) + other(x)


def in_block(call: Callable[[], Any]) -> Any:
    with jaxhetero.offload():
        return call()


def derivatives() -> None:
    """The sums that JAX puts in when it differentiates a mapped function as a whole."""
    mapped = functools.partial(jax.shard_map, mesh=own_mesh(AXIS), in_specs=(P(), P(AXIS)), out_specs=P())

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.pmean((w * x).sum(), AXIS)

    for options in ({}, {"check_vma": False}):
        forms = {
            "block": lambda options=options: in_block(lambda: jax.jit(jax.grad(mapped(loss, **options)))(1.0, X)),
            "around": lambda options=options: jaxhetero.offload(jax.jit(jax.grad(mapped(loss, **options))))(1.0, X),
            "inside": lambda options=options: jax.jit(jax.grad(mapped(jaxhetero.offload(loss), **options)))(1.0, X),
            "inside jit": lambda options=options: jax.grad(jax.jit(mapped(offloaded(loss), **options)))(1.0, X),
        }
        for form in forms.values():
            refused("take gradients inside", form)


def known_before() -> None:
    """What JAX has traced or compiled before the block, with an axis of this worker's devices."""
    total = jax.jit(jax.shard_map(lambda x: lax.psum(x, AXIS), mesh=own_mesh(AXIS), in_specs=P(AXIS), out_specs=P()))
    traced = total.trace(X)
    compiled = total.lower(X).compile()
    for _ in range(2):
        refused("compile it in the block", lambda: in_block(lambda: compiled(X)))
    refused("JAX traced outside of offload", lambda: in_block(traced.lower))
    # XLA sums over this worker's two devices.
    split = jax.device_put(X, jax.NamedSharding(own_mesh(AXIS, devices=2), P(AXIS)))
    local = jax.jit(jnp.sum).lower(split).compile()
    if in_block(lambda: local(split)) != 4 or not np.array_equal(compiled(X), X):
        WRONG.append("compiled programs without a collective, or outside of a block")


def blocks() -> None:
    """A block ends with its ``with``, however that ends, and leaves JAX as it was."""
    traces: list[None] = []

    def traced_sum(x: jax.Array) -> jax.Array:
        traces.append(None)
        return lax.psum(x, AXIS)

    total = jax.jit(jax.shard_map(traced_sum, mesh=own_mesh(AXIS), in_specs=P(AXIS), out_specs=P()))

    def is_over_workers() -> bool:
        return bool(total(X)[0] == jaxhetero.size())

    def in_thread() -> bool:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(is_over_workers).result()

    outer, inner = jaxhetero.offload(), jaxhetero.offload(bucket_bytes=1)
    before = is_over_workers(), in_thread()
    with contextlib.suppress(ZeroDivisionError), outer:
        with contextlib.suppress(ZeroDivisionError), inner:
            within = [is_over_workers(), in_thread()]
            raise ZeroDivisionError
        with outer:
            within += [is_over_workers(), in_thread()]
        within += [is_over_workers(), in_thread()]
        raise ZeroDivisionError
    after = is_over_workers(), in_thread()
    if not all(within) or any(before) or any(after):
        WRONG.append(f"blocks: {before} {within} {after}")
    traced_before = len(traces)
    for _ in range(3):
        in_block(is_over_workers)
    if len(traces) > traced_before:
        WRONG.append("another block traces anew")


def warnings() -> list[str]:
    """Those that the logger gets from now on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jaxhetero").addHandler(handler)
    return messages


def global_mesh() -> None:
    messages = warnings()
    mesh = jax.make_mesh((jaxhetero.size(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, P(AXIS)), np.float32([jaxhetero.rank()]))
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    for _ in range(2):
        with contextlib.suppress(NotImplementedError):  # JAX has none on a CPU
            jax.jit(mapped(jaxhetero.offload(to_all)))(rows)
    if messages != ["offload leaves pbroadcast at offload_refusals.py:to_all to JAX: jaxhetero has no pbroadcast"]:
        WRONG.append(str(messages))
    messages.clear()
    compiled = jax.jit(mapped(lambda x: lax.psum(x, AXIS))).lower(rows).compile()
    local = jax.jit(lambda x: jax.pmap(lambda x: lax.psum(x, AXIS), AXIS)(x))
    for _ in range(2):
        total, own = in_block(lambda: (compiled(rows), local(X[None])))
    if total.addressable_shards[0].data != 1 or not np.array_equal(own, X[None]):
        WRONG.append("what stays with JAX")
    said = [re.sub(" at .* to", " to", message) for message in messages]
    if said != [
        "offload leaves psum_invariant of _lambda to JAX: the program was compiled ahead of time, outside of offload",
        "offload leaves psum to JAX, inside this worker: no other worker has devices in its mesh",
    ]:
        WRONG.append(str(messages))
    as_outside(mesh, rows)


def as_outside(mesh: jax.sharding.Mesh, rows: jax.Array) -> None:
    """What a library may do in a program of several processes, it may do in a block."""
    rank, size = jaxhetero.rank(), jaxhetero.size()
    with jaxhetero.offload():
        with jax.set_mesh(mesh):
            total = jax.jit(jax.shard_map(lambda x: lax.psum(x, AXIS), in_specs=P(AXIS), out_specs=P()))(rows)
        placed = jax.device_put(np.arange(size), jax.NamedSharding(mesh, P(AXIS)))
        gathered = multihost_utils.process_allgather(np.array([rank]))
        told = multihost_utils.broadcast_one_to_all(np.array([rank + 5]))
        multihost_utils.sync_global_devices("as outside")
    found = [total.addressable_shards[0].data, placed.addressable_shards[0].data, gathered.ravel(), told]
    if [np.asarray(part).ravel().tolist() for part in found] != [[1], [rank], list(range(size)), [5]]:
        WRONG.append(f"as outside: {found}")


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 1 if len(sys.argv) > 1 else 2)
    if len(sys.argv) > 1:
        size, rank = int(os.environ["JAXHETERO_WORKER_COUNT"]), int(os.environ["JAXHETERO_RANK"])
        jax.distributed.initialize(sys.argv[1], size, rank)
    with contextlib.suppress(NotInitializedError):
        jax.jit(offloaded(lambda x: x))(X)
        WRONG.append("before initialize()")
    jaxhetero.initialize()
    global_mesh() if len(sys.argv) > 1 else own_processes()
    jaxhetero.shutdown()
    print(json.dumps(WRONG))


main()
