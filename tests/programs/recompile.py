"""What is compiled, and when: prints the results of a sum, compilations, and hits of the cache on disk."""

import json
from collections import Counter

import jax
import jax.numpy as jnp

import jaxhetero

events: Counter[str] = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.update([event]))
COMPILED = "/jax/core/compile/backend_compile_duration"

step = jax.jit(lambda x: jaxhetero.psum(x) * 2)


def run() -> tuple[float, int]:
    """Three steps in a world of their own: the result, and how often something was compiled for it."""
    jaxhetero.initialize()
    x = jnp.full(5, jaxhetero.rank() + 1.0)
    before = events[COMPILED]
    results = [step(x) for _ in range(3)]
    jaxhetero.shutdown()
    return float(results[-1][0]), events[COMPILED] - before


def main() -> None:
    first, second = run(), run()
    jax.clear_caches()
    retraced, _ = run()
    hits = events["/jax/compilation_cache/cache_hits"]
    print(json.dumps({"results": [first[0], second[0], retraced], "compiled_in_second_world": second[1], "hits": hits}))


main()
