"""Steps of a pipeline in which something is lost: ``STEPS RANK PLACE CALL SIGNAL [PID]``.

The worker RANK sends SIGNAL to itself, or to the process PID, at the CALL-th time that it comes to PLACE, see _PLACES.
Two stages, the rest of the workers are replicas. Prints whether all steps have had the same bits.
"""

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from jaxhetero.pipeline.exchange import Outbox
from jaxhetero.pipeline.reduction import Reduction
from jaxhetero.pipeline.runner import StageRunner

MICROBATCHES = 4
_PLACES: dict[str, tuple[type, str]] = {
    "forward": (StageRunner, "forward"),
    "backward": (StageRunner, "backward"),
    "weights": (StageRunner, "weights"),
    "message": (Outbox, "_post"),
    "reduction": (Reduction, "submit"),
}


def strike(place: str, call: int, number: int, pid: int) -> None:
    """Send the signal once the place is reached: before what is done there, or after a reduction is asked for."""
    owner, name = _PLACES[place]
    original = getattr(owner, name)
    left = call

    def method(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and place != "reduction":
            os.kill(pid, number)
        result = original(*arguments, **options)
        if left == 0 and place == "reduction":
            os.kill(pid, number)
        return result

    setattr(owner, name, method)


def loss_fn(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in kernels:
        x = x + jnp.tanh(x @ kernel)
    return jnp.mean(x * x)


def main() -> None:
    steps, rank, place, call, number = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:6])
    pid = int(sys.argv[6]) if len(sys.argv) > 6 else os.getpid()
    jaxhetero.initialize()
    if jaxhetero.rank() == rank:
        strike(place, call, number, pid)
    kernels = [0.1 * jax.random.normal(jax.random.key(number), (32, 32)) for number in range(4)]
    x = jax.random.normal(jax.random.key(9), (2 * MICROBATCHES, 32))
    grad_fn = jaxhetero.pipeline.value_and_grad(loss_fn, stages=2, microbatches=MICROBATCHES, schedule="zero_bubble")
    grad_fn.cut(kernels, x)
    own = grad_fn.own(kernels)
    results = [jax.tree.map(np.asarray, grad_fn(own, x)) for _ in range(steps)]
    first = jax.tree.leaves(results[0])
    same = [all(map(np.array_equal, jax.tree.leaves(result), first)) for result in results]
    print(json.dumps({"same_bits": all(same)}), flush=True)
    jaxhetero.shutdown()


main()
