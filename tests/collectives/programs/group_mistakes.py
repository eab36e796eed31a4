"""Sums over the even ranks and over the odd ranks of four, and one kind of mistake or misfortune."""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp

import jaxhetero

MISTAKE = sys.argv[1]


def main() -> None:
    jaxhetero.initialize()
    rank = jaxhetero.rank()
    group = (0, 2) if rank % 2 == 0 or MISTAKE == "outside" else (1, 3)
    if MISTAKE == "groups":
        if rank == 3:
            return
        group = (0, 2) if rank == 0 else (0, 1, 2)
    step = jax.jit(lambda x: jaxhetero.psum(x, workers=group, name="sums"))
    if MISTAKE == "shape":
        step(jnp.ones(6 if rank == 2 else 5))
    jax.block_until_ready(step(jnp.ones(5)))
    if MISTAKE == "killed" and rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if MISTAKE == "silent" and rank == 2:
        threading.Event().wait(15)
    while MISTAKE != "outside":
        jax.block_until_ready(step(jnp.ones(5)))
        time.sleep(0.01)


main()
