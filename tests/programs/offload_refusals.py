"""What offload refuses or leaves to JAX, and how it says so. Prints what went otherwise.

Argument: the coordinator of jax.distributed, for a global mesh; without one, each process knows its own device alone.
"""

import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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


def swap(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, AXIS, [(0, 1), (1, 0)])


def loss_of_one(x: jax.Array) -> jax.Array:
    return x.sum()


def own_processes() -> None:
    mean: Callable[..., Any] = lambda x: lax.pmean(x, AXIS)  # noqa: E731
    refused("ppermute at offload_refusals.py:swap", lambda: jax.jit(offloaded(swap))(X))
    groups = functools.partial(lax.psum, axis_name=AXIS, axis_index_groups=[[0], [1]])
    refused("axis_index_groups is not supported", lambda: jax.jit(offloaded(groups))(X))
    refused("apply offload to the function inside", lambda: offloaded(jax.pmap(mean, axis_name=AXIS))(X[None]))
    refused("must be the name of one axis", lambda: jaxhetero.offload(mean, axis_name=("a", "b")))  # type: ignore[call-overload]
    refused("bucket_bytes is 0", lambda: offloaded(mean, bucket_bytes=0))
    refused("wire_dtype is int8", lambda: offloaded(mean, wire_dtype=jnp.int8))
    refused("a block has no axis 'batch'", lambda: offloaded().__enter__())
    refused("a block in a function that JAX traces", lambda: jax.jit(lambda x: jaxhetero.offload().__enter__())(X))
    messages = warnings()
    for _ in range(2):
        jax.jit(offloaded(loss_of_one))(X)
    if messages != ["offload: there is no collective in loss_of_one, so each worker runs it by itself"]:
        WRONG.append(str(messages))
    with contextlib.suppress(NameError):
        jax.jit(jaxhetero.offload(mean))(X)
        WRONG.append("an axis that nobody has named")


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
        swapped = jax.jit(mapped(jaxhetero.offload(swap)))(rows)
    if swapped.addressable_shards[0].data != 1 - jaxhetero.rank():
        WRONG.append("ppermute left to JAX")
    if messages != ["offload leaves ppermute at offload_refusals.py:swap to JAX: jaxhetero has no ppermute"]:
        WRONG.append(str(messages))
    refused("not in a jitted function", lambda: jaxhetero.offload(mapped(swap))(rows))


def main() -> None:
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
