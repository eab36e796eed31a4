"""A training loop in an elastic job; prints each step, and at the end what a NumPy replay needs to check it.

The first argument is the number of steps. Each leaf is a collective of its own, so that its participants are known.
With two more, the worker of that rank fails in that step.
"""

import json
import sys
import time
from typing import Any

import jax
import jax.monitoring
import numpy as np

import jaxhetero
from tests.support.elastic_oracle import advance, contribution, digest, first_state, weight_of

STEPS = int(sys.argv[1])
FAILS = tuple(map(int, sys.argv[2:]))

compiled_count = 0
longest_s = 0.0


def note(event: str, _seconds: float, **_: Any) -> None:
    global compiled_count
    compiled_count += event == "/jax/core/compile/backend_compile_duration"


@jax.jit
def reduce(own: dict[str, jax.Array], weight: jax.Array) -> Any:
    means = {name: jaxhetero.pmean(leaf, weight=weight, who=True, name=name) for name, leaf in own.items()}
    # Two buckets, the latter in the wire's other dtype.
    _, who = jaxhetero.pmean([own["large"], own["middle"].astype("bfloat16")], who=True, name="both")
    return means, who


jaxhetero.initialize()
state = first_state()
history: list[dict[str, list[int]]] = []
for step in range(STEPS):
    began = time.monotonic()
    if (jaxhetero.rank(), step) == FAILS:
        raise ValueError("this program fails")
    own = {name: contribution(jaxhetero.rank(), step, name, state) for name in state}
    means, both = jax.device_get(reduce(own, np.float32(weight_of(jaxhetero.rank(), step))))
    if step:
        longest_s = max(longest_s, time.monotonic() - began)
    participants = {name: np.flatnonzero(who.ranks).tolist() for name, (_, who) in means.items()}
    for name, (_, who) in means.items():
        ranks = participants[name]
        assert (who.same, who.count) == (True, len(ranks)), who
        assert who.weight == sum(weight_of(rank, step) for rank in ranks), who
    assert both.same or both.count < jaxhetero.size() + 1, both
    state = advance(state, {name: mean for name, (mean, _) in means.items()})
    history.append(participants)
    print("step", step, flush=True)
    if step == 0:
        jax.monitoring.register_event_duration_secs_listener(note)
end = {"compiled": compiled_count, "size": jaxhetero.size()}
jaxhetero.shutdown()
print(json.dumps({"history": history, "digest": digest(state), "longest_s": longest_s, **end}))
