"""All-reduces, each timed, until the file named by the first argument says "end"; after each a pause of some seconds.

The file names what goes on meanwhile. Prints on its last line the times in ms of the steps under each such name.
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxhetero

PHASE = Path(sys.argv[1])
PAUSE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0


def main() -> None:
    jaxhetero.initialize()
    mine = jnp.full(100_000, jaxhetero.rank() + 1.0)
    expected = jnp.full(100_000, sum(range(1, jaxhetero.size() + 1)), mine.dtype)
    step = jax.jit(lambda x, go_on: (jaxhetero.psum(x), jaxhetero.pmin(go_on)))
    jax.block_until_ready(step(mine, jnp.float32(1)))
    print("running", flush=True)
    times = defaultdict(list)
    wrong = 0
    going = True
    while going:
        phase = PHASE.read_text()
        start = time.perf_counter()
        # They agree by the rounds themselves when to end.
        total, go_on = jax.block_until_ready(step(mine, jnp.float32(phase != "end")))
        took = time.perf_counter() - start
        if phase == PHASE.read_text():
            times[phase].append(1e3 * took)
        wrong += not bool((total == expected).all())
        going = bool(go_on)
        time.sleep(PAUSE_S)
    refused_count = jaxhetero.metrics().refused_count
    jaxhetero.shutdown()
    print(json.dumps({"times_ms": times, "wrong": wrong, "refused_count": refused_count}))


main()
