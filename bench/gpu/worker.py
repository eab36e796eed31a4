"""One worker of ``python -m bench.gpu``, under ``jaxhetero launch``. Rank 0 writes the figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from bench.gpu.copies import Copies, measure
from bench.gpu.steps import make_programs

_WARMUP = 3


def times_of(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> list[float]:
    """Seconds of each call on the slowest worker. All workers begin together."""
    found = []
    for index in range(_WARMUP + repeats):
        jaxhetero.barrier(name="begin")
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        taken = time.perf_counter() - start
        slowest = float(np.max(jaxhetero.pmax(np.float32(taken), name="slowest")))
        if index >= _WARMUP:
            found.append(slowest)
    jaxhetero.check()
    return found


def median_of(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> float:
    return median(times_of(function, arguments, repeats))


def count_wrong() -> int:
    """The number of wrong elements in sums of several dtypes and sizes, and in a broadcast."""
    rank, size, wrong = jaxhetero.rank(), jaxhetero.size(), 0
    for dtype in ("float32", "bfloat16", "float16", "int32", "int8"):
        for count in (0, 1, 1023, 1_000_003):
            pattern = np.arange(count) % 7
            total = np.asarray(jax.jit(jaxhetero.psum)(jnp.asarray(pattern + rank, dtype)))
            expected = (pattern * size + size * (size - 1) // 2).astype(total.dtype)
            wrong += int(np.sum(total != expected))
    root = np.asarray(jaxhetero.broadcast(jnp.full(1000, rank), root=size - 1))
    return wrong + int(np.sum(root != size - 1))


def measure_copies(size: int, repeats: int) -> dict[str, float]:
    """The slowest worker's bytes per second in each direction, while all workers copy."""
    config = jaxhetero.world.current().config
    array = jnp.zeros(size // 4, jnp.float32).block_until_ready()
    copies = Copies(config.cuda_stand_in or config.cuda_driver, array.unsafe_buffer_pointer(), size)

    def both() -> None:
        copies.to_host()
        copies.to_device()

    rates = {}
    for name, begin in {"to host": copies.to_host, "to GPU": copies.to_device, "both ways": both}.items():
        jaxhetero.barrier(name="copies")
        taken = measure(copies, begin, repeats)
        rates[name] = size / float(jaxhetero.pmax(np.float32(taken), name="slowest copy"))
    copies.close()
    return rates


def measure_all_reduce(size: int, limit: float, repeats: int) -> dict[str, Any]:
    reduce = jax.jit(lambda x: jaxhetero.psum(x, bucket_bytes=25 << 20), donate_argnums=0)
    # Several leaves, as gradients have: XLA gets a bucket for each 25 MiB.
    count = max(1, round(size / (25 << 20)))
    bucket = [jnp.zeros(size // 4 // count, jnp.float32) for _ in range(count)]
    bytes_ = sum(leaf.nbytes for leaf in bucket)
    times = []
    for _ in range(_WARMUP + repeats):
        jax.block_until_ready(bucket)
        jaxhetero.barrier(name="begin all-reduce")
        start = time.perf_counter()
        bucket = jax.block_until_ready(reduce(bucket))
        times.append(float(jaxhetero.pmax(np.float32(time.perf_counter() - start), name="slowest all-reduce")))
    middle = median(times[_WARMUP:])
    rate = bytes_ / middle
    row = {"bytes": bytes_, "median_s": middle, "bytes_per_s": rate, "of_copy_limit": rate / limit}
    return row | {"times_s": times[_WARMUP:]}


def measure_beside(size: int, width: int, all_reduce_s: float, repeats: int) -> dict[str, float]:
    """The times of a chain of matrix products alone and during an all-reduce, which takes about half as long."""

    def chain(x: jax.Array, weight: jax.Array, length: int) -> jax.Array:
        product: jax.Array = jax.lax.fori_loop(0, length, lambda _, y: jnp.tanh(y @ weight), x)
        return product

    weight = jnp.eye(width, dtype=jnp.bfloat16)
    x = jnp.ones((width, width), jnp.bfloat16)
    gradient = jnp.zeros(size // 4, jnp.float32)
    one = median_of(jax.jit(lambda x, w: chain(x, w, 64)), (x, weight), repeats) / 64
    length = max(64, round(2 * all_reduce_s / one))
    alone = median_of(jax.jit(lambda x, w: chain(x, w, length)), (x, weight), repeats)

    def both(x: jax.Array, weight: jax.Array, gradient: jax.Array) -> Any:
        return chain(x, weight, length), jaxhetero.psum(gradient, name="beside")

    beside = median_of(jax.jit(both), (x, weight, gradient), repeats)
    return {"bytes": size, "products": length, "alone_s": alone, "beside_s": beside, "ratio": beside / alone}


def measure_steps(model: str, small: bool, repeats: int) -> dict[str, Any]:
    programs, arguments = make_programs(model, small)
    times = {name: times_of(jax.jit(program), arguments, repeats) for name, program in programs.items()}
    middle = {name: median(values) for name, values in times.items()}
    exposed = middle["overlap"] - middle["alone"]
    hidden = 1 - exposed / middle["all-reduce"]
    count = sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))
    row = {"model": model, "small": small, "parameter_count": count, "median_s": middle}
    return row | {"hidden": hidden, "times_s": times}


def say(text: str) -> None:
    if jaxhetero.rank() == 0:
        print(f"# {text}", flush=True)


def main() -> None:
    request = json.loads(sys.argv[1])
    small, repeats = request["stand_in"], request["repeats"]
    jaxhetero.initialize()
    sizes = [min(size, 1 << 20) for size in request["sizes"]] if small else request["sizes"]
    say("sums")
    wrong = int(jaxhetero.psum(np.int32(count_wrong())))
    say("copies")
    result: dict[str, Any] = {"wrong_count": wrong, "copy_bytes_per_s": measure_copies(max(sizes), repeats)}
    limit = result["copy_bytes_per_s"]["both ways"]
    say("all-reduces")
    result["all_reduce"] = [measure_all_reduce(size, limit, repeats) for size in dict.fromkeys(sizes)]
    last = result["all_reduce"][-1]
    say("an all-reduce beside matrix products")
    result["beside"] = measure_beside(last["bytes"], 64 if small else 4096, last["median_s"], repeats)
    result["steps"] = []
    for model in request["models"]:
        say(model)
        result["steps"].append(measure_steps(model, small, repeats))
    if jaxhetero.rank() == 0:
        Path(request["result"]).write_text(json.dumps(result))
    jaxhetero.barrier()
    jaxhetero.shutdown()


main()
