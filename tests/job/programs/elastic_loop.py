"""A training loop with gates; prints each step, and at the end what a NumPy replay needs to check it.

The arguments are the number of steps, the pause after each, and how long it takes to hand the state over, both in
seconds. Each leaf is a collective of its own, so that its participants are known.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np

import jaxhetero
from tests.support.elastic_oracle import advance, contribution, digest, first_state, weight_of

STEPS, PAUSE_S, HANDOVER_S = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])

compiled_count = 0


class Slow:
    """A part of the state that takes a while to send, and may take for ever once it has come."""

    shape, dtype = (), np.dtype(np.int32)
    is_taken = False

    def __init__(self, value: int = 0) -> None:
        self.value = value
        while Slow.is_taken and "NEVER_TAKES" in os.environ:
            time.sleep(1)
        Slow.is_taken = True

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        print("hands over", flush=True)
        time.sleep(HANDOVER_S)
        return np.asarray(self.value, np.int32)


def await_file(variable: str) -> None:
    """Until the file exists that the environment names."""
    while variable in os.environ and not Path(os.environ[variable]).exists():
        time.sleep(0.02)


def note(event: str, _seconds: float, **_: Any) -> None:
    global compiled_count
    compiled_count += event == "/jax/core/compile/backend_compile_duration"


@jax.jit
def reduce(own: dict[str, jax.Array], weight: jax.Array) -> Any:
    return {name: jaxhetero.pmean(leaf, weight=weight, who=True, name=name) for name, leaf in own.items()}


jaxhetero.initialize()
rank = jaxhetero.rank()
differs = os.environ.get("DIFFERS")
state, place, slow = first_state(), 0, Slow(rank if differs == "state" else 0)
files = {"one", "two", "three", str(rank) if differs == "place" else "four"}
key = jax.random.key(int(os.environ.get("KEY", "0")))
reduce_compiled = reduce.lower(state, np.float32(1)).compile()
jax.monitoring.register_event_duration_secs_listener(note)
history: dict[int, dict[str, list[int]]] = {}
teams: dict[int, list[int]] = {}
print("compiled", flush=True)
await_file("COMES_WITH")
print("comes", flush=True)
# For measurements: a part of the state that nobody looks at.
ballast = np.zeros(int(os.environ.get("BALLAST_BYTES", "0")), np.uint8)
times_s: list[float] = []
while place < STEPS:
    began = time.monotonic()
    everything = (state, slow, key, ballast)
    (state, slow, key, ballast), (place, files), team = jaxhetero.elastic.gate(everything, (place, files))
    teams[place] = list(team.ranks)
    own = {name: contribution(rank, place, name, state) for name in state}
    means = jax.device_get(reduce_compiled(own, np.float32(weight_of(rank, place))))
    history[place] = {name: np.flatnonzero(who.ranks).tolist() for name, (_, who) in means.items()}
    state = advance(state, {name: mean for name, (mean, _) in means.items()})
    if place == 30:
        print("behind the rounds", flush=True)
        await_file("GOES_ON_WITH")
    print("step", place, "of", list(team.ranks), json.dumps(history[place]), flush=True)
    if "LEAVES" in os.environ and len(teams) == 5:
        assert not jaxhetero.elastic.leaving()
        jaxhetero.elastic.leave()
        assert jaxhetero.elastic.leaving()
    place += 1
    times_s.append(time.monotonic() - began)
    time.sleep(PAUSE_S)
end = {"compiled": compiled_count, "size": jaxhetero.size()}
jaxhetero.shutdown()
end["key"] = np.asarray(jax.random.key_data(key)).tolist()
print(json.dumps({"history": history, "teams": teams, "digest": digest(state), "times_s": times_s, **end}))
