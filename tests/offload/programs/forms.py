"""offload in every form, in every place where JAX runs programs, with and without a name: the true sum, or refused.

Prints, by place, form and name, "true", "left to JAX", or what went otherwise. A step gives the sum over all devices of
all workers, the number of devices, and its own place among them, so a step that sees this worker alone cannot be right.

Argument: the coordinator of jax.distributed; without one, each process knows of its own devices only.
"""

import contextlib
import functools
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxhetero
from jaxhetero.errors import ConfigError

AXIS = "batch"
DEVICES = 2
RANK, SIZE = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
P = jax.P
NAMES: dict[str, dict[str, str]] = {"no name": {}, "the name": {"axis_name": AXIS}, "a wrong name": {"axis_name": "i"}}

Step = Callable[[jax.Array], jax.Array]
Call = Callable[[], Any]


def step(row: jax.Array) -> jax.Array:
    """Of the only value of a device."""
    return jnp.concatenate([0 * row + lax.psum(row, AXIS), 0 * row + lax.psum(1, AXIS), row * 0 + lax.axis_index(AXIS)])


# --- Places: the function that JAX is to call, and its argument.


def own_rows() -> np.ndarray:
    return np.float32([[1 + RANK * DEVICES + device] for device in range(DEVICES)])


def all_rows() -> jax.Array:
    rows: jax.Array = jax.make_array_from_process_local_data(jax.NamedSharding(mesh(), P(AXIS)), own_rows()[:, 0])
    return rows


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def mapped(function: Step, **options: Any) -> Any:
    return jax.shard_map(function, mesh=mesh(), in_specs=P(AXIS), out_specs=P(AXIS), **options)


PLACES: dict[str, tuple[Callable[[Step], Any], Callable[[], Any]]] = {
    "jit": (jax.jit, lambda: own_rows()[0]),
    "pmap": (lambda function: jax.pmap(function, axis_name=AXIS), own_rows),
    "typed shard_map": (lambda function: jax.jit(mapped(function)), all_rows),
    "untyped shard_map": (lambda function: jax.jit(mapped(function, check_vma=False)), all_rows),
    "shard_map without jit": (mapped, all_rows),
}


def truth(place: str) -> list[float]:
    if place == "jit":  # of one device of each worker
        return [sum(1 + rank * DEVICES for rank in range(SIZE)), SIZE, RANK]
    count = SIZE * DEVICES
    return [number for device in range(DEVICES) for number in (count * (count + 1) / 2, count, RANK * DEVICES + device)]


# --- Forms: a call of a step in a place, offloaded.

Place = Callable[[Step], Any]
Offload = Callable[..., Any]


def in_block(call: Call, offload: Offload) -> Call:
    def run() -> Any:
        with offload():
            return call()

    return run


def in_thread(call: Call) -> Call:
    def run() -> Any:
        results: list[Any] = []

        def keep() -> None:
            try:
                results.append(call())
            except ConfigError as error:
                results.append(error)

        thread = threading.Thread(target=keep)
        thread.start()
        thread.join()
        if isinstance(results[0], ConfigError):
            raise results[0]
        return results[0]

    return run


def block_of_known(place: Place, x: Any, offload: Offload) -> Call:
    """What JAX has traced and compiled before, without offload."""
    function = place(lambda row: step(row))
    with contextlib.suppress(NameError):
        function(x)
    return in_block(lambda: function(x), offload)


def ahead_of_time(place: Place, x: Any) -> Call:
    return lambda: jax.jit(place(step)).lower(x).compile()(x)


FORMS: dict[str, Callable[[Place, Any, Offload], Call]] = {
    "inside": lambda place, x, offload: lambda: place(offload()(step))(x),
    "around": lambda place, x, offload: lambda: offload()(place(step))(x),
    "jit around": lambda place, x, offload: lambda: jax.jit(offload()(place(step)))(x),
    "block": lambda place, x, offload: in_block(lambda: place(step)(x), offload),
    "block of what is known": block_of_known,
    "block, ahead of time": lambda place, x, offload: in_block(ahead_of_time(place, x), offload),
    "block, other thread": lambda place, x, offload: in_block(in_thread(lambda: place(step)(x)), offload),
    "block in a block": lambda place, x, offload: in_block(in_block(lambda: place(step)(x), offload), offload),
    "inside, in a block": lambda place, x, offload: in_block(lambda: place(offload()(step))(x), offload),
}


# With jax.distributed, jax.pmap in a function that JAX traces has this process's devices alone, also without offload.
IN_A_TRACE = {("pmap", "jit around"), ("pmap", "block, ahead of time")}


def outcome(call: Call, place: str) -> str:
    rounds = jaxhetero.metrics().round_count
    try:
        result = call()
    except ConfigError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    shards = result.addressable_shards
    found = np.concatenate([np.asarray(shard.data).reshape(-1) for shard in shards]).tolist()
    if found != truth(place):
        return f"wrong: {found}"
    return "true" if jaxhetero.metrics().round_count > rounds else "left to JAX"


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)  # the time is that of compilations
    if len(sys.argv) > 1:
        jax.distributed.initialize(sys.argv[1], SIZE, RANK)
    jaxhetero.initialize()
    found = {}
    for place, form, name in itertools.product(PLACES, FORMS, NAMES):
        if len(sys.argv) > 1 and (place, form) in IN_A_TRACE:
            continue
        function, make_x = PLACES[place]
        offload = functools.partial(jaxhetero.offload, **NAMES[name])
        found[f"{place}, {form}, {name}"] = outcome(FORMS[form](function, make_x(), offload), place)
    jaxhetero.shutdown()
    print(json.dumps(found))


main()
