"""A ring of three workers, and one kind of mistake or misfortune."""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp

import jaxhetero

MISTAKE = sys.argv[1]
RING = [(0, 1), (1, 2), (2, 0)]


def main() -> None:
    jaxhetero.initialize()
    rank = jaxhetero.rank()
    send = jax.jit(lambda x: jaxhetero.ppermute(x, perm=RING, name="hand over"))
    trade = jax.jit(lambda x: jaxhetero.all_to_all(x, None, 0, 0, tiled=True, name="trade"))
    if MISTAKE == "shape":
        send(jnp.ones(6 if rank == 2 else 5))
    elif MISTAKE == "dtype":
        trade(jnp.ones(9, jnp.int32 if rank == 2 else jnp.float32))
    jax.block_until_ready((send(jnp.ones(5)), trade(jnp.ones(9))))
    if MISTAKE == "killed" and rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if MISTAKE == "silent" and rank == 2:
        threading.Event().wait(15)
    while True:
        jax.block_until_ready((send(jnp.ones(5)), trade(jnp.ones(9))))
        time.sleep(0.01)


main()
