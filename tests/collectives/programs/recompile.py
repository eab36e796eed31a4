"""What is compiled, and when: prints results of two sums, their ops, compilations, and hits of the cache on disk."""

import json
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

import jaxhetero

events: Counter[str] = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.update([event]))
COMPILED = "/jax/core/compile/backend_compile_duration"


@jax.jit
def step(x: jax.Array) -> jax.Array:
    events["traced"] += 1
    return jaxhetero.psum(x) + jaxhetero.psum(x, name="second")


def run() -> dict[str, Any]:
    """Three steps in a world of their own: the result, how often something was compiled for it, and the ops.

    An op's number is made from the attributes of its call and from how many calls of that name came before it.
    """
    jaxhetero.initialize()
    x = jnp.full(5, jaxhetero.rank() + 1.0)
    before = events.copy()
    for _ in range(3):
        result = float(step(x)[0])
    outcome = {
        "result": result,
        "traced": events["traced"] - before["traced"],
        "compiled": events[COMPILED] - before[COMPILED],
        "calls": re.findall(r"@jaxhetero_all_reduce\(.*backend_config = (\{.*?\})", step.lower(x).as_text()),
        "rounds": sorted((round_.op, round_.round) for round_ in jaxhetero.timeline()),
    }
    jaxhetero.shutdown()
    return outcome


def main() -> None:
    runs = [run(), run()]
    jax.clear_caches()
    runs.append(run())
    print(json.dumps({"runs": runs, "hits": events["/jax/compilation_cache/cache_hits"]}))


main()
