"""One member of a group begins all rounds at once, the other one by one, the last first. The third worker waits."""

import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxhetero

# So many that XLA runs the calls of one program beside each other; each is of several windows.
ROUNDS, ITEMS = 40, 400_000


def sum_of(index: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jaxhetero.psum(x, workers=(0, 1), name=f"sum {index}", bucket_bytes=1 << 30)


def main() -> None:
    jaxhetero.initialize()
    x = jnp.full(ITEMS, jaxhetero.rank() + 1.0)
    totals = []
    begin = time.monotonic()
    if jaxhetero.rank() == 0:
        totals = [jax.block_until_ready(jax.jit(sum_of(index))(x)) for index in reversed(range(ROUNDS))]
    elif jaxhetero.rank() == 1:
        totals = jax.block_until_ready(jax.jit(lambda x: [sum_of(index)(x) for index in range(ROUNDS)])(x))
    took_s = time.monotonic() - begin
    jaxhetero.barrier()
    jaxhetero.shutdown()
    print(json.dumps({"wrong": sum(int((total != 3).sum()) for total in totals), "took_s": took_s}))


main()
