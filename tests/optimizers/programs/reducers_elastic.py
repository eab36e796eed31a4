"""A training loop of an elastic job with optimizers on reducers; prints each step, and at the end what it has come to.

The arguments are the number of steps, the pause after each in seconds, and names of optimizers.
"""

import json
import sys
import time
from typing import Any

import jax
import jax.monitoring
import optax

import jaxhetero
from jaxhetero.optimizers import on_reducers
from tests.optimizers.elastic_reducers_oracle import (
    BUCKET_BYTES,
    OPTIMIZERS,
    WIRE_DTYPES,
    contribution,
    digest,
    first_weights,
)

STEPS, PAUSE_S, NAMES = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]

compiled_count = 0


def note(event: str, _seconds: float, **_: Any) -> None:
    global compiled_count
    compiled_count += event == "/jax/core/compile/backend_compile_duration"


optimizers = {
    name: on_reducers(OPTIMIZERS[name], wire_dtype=WIRE_DTYPES.get(name), bucket_bytes=BUCKET_BYTES, name=name)
    for name in NAMES
}


@jax.jit
def step(weights: Any, states: Any, gradients: Any) -> Any:
    moved, after = {}, {}
    for name, optimizer in optimizers.items():
        updates, after[name] = optimizer.update(gradients[name], states[name], weights[name])
        moved[name] = optax.apply_updates(weights[name], updates)
    return moved, after


jaxhetero.initialize()
rank = jaxhetero.rank()
weights: Any = {name: first_weights() for name in NAMES}
states: Any = {name: optimizer.init(weights[name]) for name, optimizer in optimizers.items()}
compiled = step.lower(weights, states, weights).compile()
jax.monitoring.register_event_duration_secs_listener(note)
place = 0
print("compiled", flush=True)
while place < STEPS:
    (weights, states), place, team = jaxhetero.elastic.gate((weights, states), place)
    gradients = {name: contribution(rank, place, weights[name]) for name in NAMES}
    weights, states = jax.block_until_ready(compiled(weights, states, gradients))
    print("step", place, "of", list(team.ranks), flush=True)
    place += 1
    time.sleep(PAUSE_S)
counted = compiled_count
kept = {name: optimizer.pull(states[name]) for name, optimizer in optimizers.items()}
digests = {name: digest(weights[name], *kept[name]) for name in NAMES}
jaxhetero.shutdown()
print(json.dumps({"digests": digests, "compiled": counted}))
