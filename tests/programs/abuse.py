"""All-reduces without a pause: some undisturbed, then for as long as the file named by the first argument exists."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxhetero

FLAG = Path(sys.argv[1])
ROUNDS = 200


def main() -> None:
    jaxhetero.initialize()
    mine = jnp.full(100_000, jaxhetero.rank() + 1.0)
    expected = jnp.full(100_000, sum(range(1, jaxhetero.size() + 1)), mine.dtype)
    step = jax.jit(lambda x, go_on: (jaxhetero.psum(x), jaxhetero.pmin(go_on)))
    wrong = 0

    def run(until: Callable[[int], bool]) -> dict[str, Any]:
        """Rounds until every worker has had enough; they agree by the rounds themselves."""
        nonlocal wrong
        times: list[float] = []
        going = True
        while going:
            start = time.perf_counter()
            total, go_on = jax.block_until_ready(step(mine, jnp.float32(not until(len(times)))))
            times.append(time.perf_counter() - start)
            wrong += not bool((total == expected).all())
            going = bool(go_on)
        return {"rounds": len(times), "median_ms": 1e3 * statistics.median(times), "max_ms": 1e3 * max(times)}

    run(lambda count: count > 0)
    undisturbed = run(lambda count: count >= ROUNDS)
    print("undisturbed", flush=True)
    disturbed = run(lambda _: not FLAG.exists())
    refused_count = jaxhetero.metrics().refused_count
    jaxhetero.shutdown()
    print(
        json.dumps({"undisturbed": undisturbed, "disturbed": disturbed, "wrong": wrong, "refused_count": refused_count})
    )


main()
