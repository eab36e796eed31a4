"""One kind of mistake or misfortune, named by the first argument, on the rank named by the second."""

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxhetero

MISTAKE = sys.argv[1]
AFFLICTED = int(sys.argv[2])


OTHERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "complex64"]
WRONG_TREES: dict[str, Callable[[], Any]] = {
    "shape": lambda: {"a": jnp.ones((32, 32)), "b": jnp.ones(3)},
    "dtype": lambda: {"a": jnp.ones(1024, jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)},
    "structure": lambda: {"a": jnp.ones(1024)},
    # In so many buckets that XLA does not run the program's calls one after the other, in an order of its own.
    "more": lambda: {"a": jnp.ones(1024), "b": jnp.ones(3)} | {f"0 {dtype}": jnp.ones(5, dtype) for dtype in OTHERS},
    "changed": lambda: {"a": jnp.ones(7)},
}


def tree(wrong: bool) -> Any:
    return WRONG_TREES[MISTAKE]() if wrong else {"a": jnp.ones(1024), "b": jnp.ones(3)}


@functools.partial(jax.jit, static_argnums=1)
def two_sums(x: jax.Array, loops: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """1 and 100, each summed under the same name. XLA runs the one first whose constants leave less to compute."""
    first, second = (jax.lax.fori_loop(0, count, lambda _, y: jnp.sin(y @ y), x) for count in loops)
    return jaxhetero.psum(first + 1, name="same"), jaxhetero.psum(second + 100, name="same")


def main() -> None:
    if MISTAKE == "uninitialized":
        jaxhetero.psum(jnp.ones(3))
    jaxhetero.initialize()
    afflicted = jaxhetero.rank() == AFFLICTED
    step = jax.jit(lambda x: jaxhetero.psum(x, name="step"))
    if MISTAKE == "sharded":
        mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.P("devices"))
        step(jax.device_put(jnp.ones(1024), sharding))
    if MISTAKE == "order":
        print([float(total[0, 0]) for total in two_sums(jnp.zeros((64, 64)), (5, 0) if afflicted else (0, 5))])
        return
    from_the_start = MISTAKE in WRONG_TREES and MISTAKE != "changed"
    if not from_the_start:
        jax.block_until_ready(step(tree(False)))
    if afflicted:
        if MISTAKE == "silent":
            print("silent", flush=True)
            threading.Event().wait(15)
        if MISTAKE == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if MISTAKE == "leaves":
            return
        if MISTAKE == "raises":
            raise ValueError("the user's own mistake")
        if MISTAKE == "kind":
            step = jax.jit(lambda x: jaxhetero.broadcast(x, root=1, name="step"))
    print("running", flush=True)
    if MISTAKE == "until killed":
        while True:
            jax.block_until_ready(step(tree(False)))
            time.sleep(0.01)
    for _ in range(3):
        jax.block_until_ready(step(tree(afflicted and MISTAKE in WRONG_TREES)))


main()
