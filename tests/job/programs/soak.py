"""Checked all-reduces without a pause, until rank 0 finds the file that the first argument names.

Prints on its last line how many steps it made, and for every second how many it made in it and what was allocated then.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxhetero

LENGTHS = {"head": 250, "bias": 10_000, "block": 300_000, "embedding": 4_000_000}


class Mallinfo2(ctypes.Structure):
    """mallinfo2(3): ``hblkhd`` is the fifth and ``uordblks`` the eighth of its numbers."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def allocated_bytes() -> int:
    """What is allocated from the heap and not freed, without what the allocator keeps for later."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    numbers = libc.mallinfo2().numbers
    return int(numbers[4] + numbers[7])


def contribution(rank: jax.Array | int, step: jax.Array) -> dict[str, jax.Array]:
    """Of one worker: small integers, so that every total is exact in float32."""
    return {
        name: ((jnp.arange(length) + 7 * rank + step) % 251).astype(jnp.float32) for name, length in LENGTHS.items()
    }


def main() -> None:
    end = Path(sys.argv[1])
    jaxhetero.initialize()
    rank, workers = jaxhetero.rank(), jaxhetero.size()

    @jax.jit
    def is_right(step: jax.Array) -> jax.Array:
        total = jaxhetero.psum(contribution(rank, step), name="gradients", bucket_bytes=1 << 20)
        # The others' part is computed here as well.
        expected = jax.tree.map(lambda *parts: sum(parts), *(contribution(r, step) for r in range(workers)))
        same = jax.tree.map(lambda a, b: jnp.all(a == b), total, expected)
        return jnp.all(jnp.stack(jax.tree.leaves(same)))

    has_ended = jax.jit(lambda here: jaxhetero.pmax(here, name="end"))
    step, rates, allocated = 0, [], []
    begin, steps_then = time.monotonic(), 0
    while not has_ended(jnp.int32(rank == 0 and end.exists())):
        if not is_right(jnp.int32(step)):
            raise SystemExit(f"step {step}: a total is wrong")
        step += 1
        if time.monotonic() - begin >= 1:
            rates.append((step - steps_then) / (time.monotonic() - begin))
            allocated.append(allocated_bytes())
            begin, steps_then = time.monotonic(), step
        if step == 2:
            print("running", flush=True)
    rounds = jaxhetero.metrics().round_count
    print(json.dumps({"steps": step, "rates": rates, "allocated": allocated, "rounds": rounds}))


if __name__ == "__main__":
    main()
