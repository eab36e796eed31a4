"""Workers that compile a program equally often, or not: prints what differs from the true sums, by case."""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

CASE = sys.argv[1]
STEPS = 4

Step = Callable[[Any, Any], Any]


def new_step(name: str) -> Step:
    """The gradient of a batch of ones, times the rank and one: the total is three times the weights' size."""

    @jax.jit
    def step(w: Any, batch: Any) -> Any:
        return jaxhetero.psum(jax.grad(lambda w: jnp.mean(batch @ w))(w), name=name)

    return step


def weights(device: int | None = None) -> Any:
    """``device``: put there as a checkpoint is restored; else where JAX likes."""
    return jnp.ones(3) if device is None else jax.device_put(np.ones(3, np.float32), jax.local_devices()[device])


def batch_of(rank: int, rows: int = 4) -> Any:
    return np.full((rows, 3), 1.0 + rank, np.float32)


def committed(step: Step, rank: int) -> list[Any]:
    return [step(weights(0 if rank == 0 and i % 2 else None), batch_of(rank)) for i in range(STEPS)]


def cleared(step: Step, rank: int) -> list[Any]:
    totals = []
    for i in range(STEPS):
        if i == 2 and rank == 0:
            jax.clear_caches()
        totals.append(jax.block_until_ready(step(weights(), batch_of(rank))))
    return totals


def ahead(step: Any, rank: int) -> list[Any]:
    """One worker compiles ahead of time, and runs once what it has compiled, and once the step."""
    run = step
    if rank == 0:
        run = step.lower(weights(), batch_of(rank)).compile()
    return [(run if i % 2 else step)(weights(), batch_of(rank)) for i in range(STEPS)]


def last_batch(step: Step, rank: int) -> list[Any]:
    """One worker's last batch is smaller: its step is compiled again, and sums the same gradients."""
    return [step(weights(), batch_of(rank, 2 if rank == 0 and i == STEPS - 1 else 4)) for i in range(STEPS)]


def other_device(step: Step, rank: int) -> list[Any]:
    return [step(weights(rank), batch_of(rank)) for _ in range(STEPS)]


def all_devices(step: Step, rank: int) -> list[Any]:
    """A device has no order with the next one: their rounds are not mixed up."""
    totals = []
    for i in range(STEPS):
        for device in (0, 1):
            totals.append(step(weights(device), (1 + device * (9 + i)) * batch_of(rank)))
    return [total / (1 + i % 2 * (9 + i // 2)) for i, total in enumerate(totals)]


def shapes(step: Step, rank: int) -> list[Any]:
    """All workers change from one shape to another one and back; a large one goes through all reducers and strands."""
    del step
    totals = []
    for count in (3, 300_000, 5, 300_000, 3, 300_000):
        total = jaxhetero.psum(np.full(count, 1.0 + rank, np.float32), name="of many shapes")
        totals.append(jnp.stack([total[0], jnp.min(total), total[-1]]))
    return totals


def notebook(step: Step, rank: int) -> list[Any]:
    """One worker has run an input more than the other: the number of the input that it has compiled is another one."""
    del step
    source = "step = jax.jit(lambda w, batch: jaxhetero.psum(jax.grad(lambda w: jnp.mean(batch @ w))(w)))"
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "jaxhetero": jaxhetero}
    exec(compile(source, f"<ipython-input-{rank + 3}-1a2b3c4d5e6f>", "exec"), names)
    return [names["step"](weights(), batch_of(rank)) for _ in range(STEPS)]


ALONE = [committed, cleared, ahead, last_batch, other_device, all_devices, shapes, notebook]


def sums_of_functions(rank: int) -> list[Any]:
    """Each form has a function that the program calls twice; JAX lowers it once where it has no collective."""
    psum = functools.partial(jaxhetero.psum, name="twice")
    inner = jax.jit(lambda x: psum(x))
    deep = jax.jit(lambda x: inner(x) - inner(x - 1))

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry, psum(carry)), x, None, length=3)[1].sum(0) / 3

    def branched(x: Any) -> Any:
        return jax.lax.cond(x[0] > 0, lambda x: psum(x), lambda x: 0 * psum(x), x)

    def is_wrong(function: Callable[[Any], Any], of_one: float, of_ten: float) -> bool:
        one, ten = jax.jit(lambda x: (function(x), function(10 * x)))(jnp.full(3, 1.0 + rank))
        return bool(jnp.any(one != of_one) | jnp.any(ten != of_ten))

    forms = [(inner, 3, 30), (deep, 2, 2), (scanned, 3, 30), (branched, 3, 30), (jax.checkpoint(inner), 3, 30)]
    return [is_wrong(*form) for form in forms]


def two_in_another_order(rank: int) -> list[float]:
    """XLA runs the call first whose constants leave less to compute: another one on each rank."""
    inner = jax.jit(lambda x: jaxhetero.psum(x, name="same"))

    @jax.jit
    def sums(x: jax.Array) -> list[jax.Array]:
        loops = (5, 0) if rank == 0 else (0, 5)
        first, second = (jax.lax.fori_loop(0, count, lambda _, y: jnp.sin(y @ y), x) for count in loops)
        return [inner(first + 1), inner(second + 100)]

    return [float(total[0, 0]) for total in sums(jnp.zeros((64, 64)))]


def differ(rank: int) -> None:
    """A call that all make alike, and then one in which they differ."""
    total = functools.partial(jaxhetero.psum, name="metric")
    jax.block_until_ready(total(jnp.ones(3)))
    if CASE == "shape":
        jax.block_until_ready(total(jnp.ones(3 + rank)))
    elif CASE == "size":  # one of them goes through all reducers, the other one through one
        jax.block_until_ready(total(jnp.ones(300_000 if rank else 3)))
    elif CASE == "compiled":  # the same function, compiled anew by one worker alone
        step = new_step("step")
        jax.block_until_ready(step(weights(), batch_of(rank)))
        jax.block_until_ready(step(jnp.ones((3, 1 + rank)), batch_of(rank)))
    elif CASE == "kind":
        jax.block_until_ready((jaxhetero.pmax if rank else total)(jnp.ones(3), name="metric"))
    elif CASE == "dtype":  # of one byte each
        dtype = jnp.float8_e5m2 if rank else jnp.float8_e4m3fn
        jax.block_until_ready(jaxhetero.broadcast(jnp.ones(3, dtype), name="metric"))
    elif CASE == "program":
        jax.block_until_ready(jaxhetero.psum(jnp.ones(3 + rank), name="evaluation" if rank else "training"))
    elif CASE == "branch":
        first = jax.jit(lambda x, y: jax.lax.cond(y, lambda x: total(x), lambda x: total(x + 1), x))
        jax.block_until_ready(first(jnp.ones(3), rank == 0))


def main() -> None:
    jaxhetero.initialize()
    rank = jaxhetero.rank()
    wrong: Any
    if CASE == "alone":
        wrong = []
        for case in ALONE:
            totals = jax.block_until_ready(case(new_step(case.__name__), rank))
            wrong += [f"{case.__name__}: {total}" for total in totals if not np.all(np.asarray(total) == 3)]
    elif CASE == "lives":
        step = new_step("step")
        wrong = []
        for life in range(3):
            if life > 0:
                jaxhetero.initialize()
            for _ in range(2):
                total = np.asarray(step(weights(), batch_of(rank)))
                wrong += [f"life {life}: {total}"] if np.any(total != 3) else []
            jaxhetero.shutdown()
            if rank == 0:
                jax.clear_caches()
    elif CASE == "functions":
        wrong = sums_of_functions(rank)
    elif CASE == "order":
        wrong = two_in_another_order(rank)
    else:
        wrong = differ(rank)
    print(json.dumps(wrong))


main()
