"""One worker of ``python -m bench.gpu``, under ``jaxhetero launch``. Rank 0 writes the figures."""

from __future__ import annotations

import json
import os
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
from bench.gpu import nccl
from bench.gpu.copies import Copies, mean_time
from bench.gpu.kernels import profile
from bench.gpu.steps import Row, make_programs, make_rows
from bench.gpu.sums import count_wrong

_WARMUP = 3
_PROFILED = 5
_BUCKET_BYTES = 25 << 20


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


def measure_copies(size: int, repeats: int) -> dict[str, float]:
    """The slowest worker's bytes per second in each direction, while all workers copy."""
    array = jnp.zeros(size // 4, jnp.float32).block_until_ready()
    copies = Copies(os.environ.get("JAXHETERO_CUDA_STAND_IN", "libcuda.so.1"), array.unsafe_buffer_pointer(), size)

    def both() -> None:
        copies.to_host()
        copies.to_device()

    rates = {}
    for name, begin in {"to host": copies.to_host, "to GPU": copies.to_device, "both ways": both}.items():
        jaxhetero.barrier(name="copies")
        taken = mean_time(copies, begin, repeats)
        rates[name] = size / float(jaxhetero.pmax(np.float32(taken), name="slowest copy"))
    copies.close()
    return rates


def measure_all_reduce(size: int, device: jax.Device, repeats: int) -> dict[str, Any]:
    """The all-reduce of a tree on a device, in place. Several leaves, as gradients have: a bucket for each 25 MiB."""
    reduce = jax.jit(lambda x: jaxhetero.psum(x, bucket_bytes=_BUCKET_BYTES), donate_argnums=0)
    count = max(1, round(size / _BUCKET_BYTES))
    bucket = [jax.device_put(np.zeros(size // 4 // count, np.float32), device) for _ in range(count)]
    bytes_ = sum(leaf.nbytes for leaf in bucket)
    times = []
    for _ in range(_WARMUP + repeats):
        jax.block_until_ready(bucket)
        jaxhetero.barrier(name="begin all-reduce")
        start = time.perf_counter()
        bucket = jax.block_until_ready(reduce(bucket))
        times.append(float(jaxhetero.pmax(np.float32(time.perf_counter() - start), name="slowest all-reduce")))
    jaxhetero.check()
    middle = median(times[_WARMUP:])
    return {"bytes": bytes_, "median_s": middle, "bytes_per_s": bytes_ / middle, "times_s": times[_WARMUP:]}


def measure_all_reduces(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Of each size on the GPU, and on the CPU beside it: with neither copies nor a GPU's streams."""
    cpu = jax.local_devices(backend="cpu")[0]
    limit = measure_copies(max(sizes), repeats)
    rows = []
    for size in dict.fromkeys(sizes):
        row = measure_all_reduce(size, jax.local_devices()[0], repeats)
        row["cpu"] = measure_all_reduce(size, cpu, repeats)
        row["of_limit"] = row["bytes_per_s"] / min(limit["both ways"], row["cpu"]["bytes_per_s"])
        rows.append(row)
    return {"copy_bytes_per_s": limit, "rows": rows}


def profile_all_reduce(size: int) -> dict[str, Any]:
    """What the GPU runs for sums of one array, and of a tree that is used up by an update of weights."""

    def sum_array(array: jax.Array) -> jax.Array:
        return jaxhetero.psum(array, name="array")

    def update(tree: list[jax.Array]) -> list[jax.Array]:
        totals = jaxhetero.psum(tree, name="tree")
        return [leaf - 0.1 * total for leaf, total in zip(tree, totals, strict=True)]

    return {
        "one array": _profile(sum_array, jnp.ones(size // 4, jnp.float32)),
        "a tree and its update": _profile(update, [jnp.ones(size // 12, jnp.float32) for _ in range(3)]),
    }


def _profile(function: Callable[..., Any], argument: Any) -> dict[str, Any]:
    """Rank 0 profiles; the other workers run the same."""
    compiled = jax.jit(function)

    def run() -> Any:
        return jax.block_until_ready([compiled(argument) for _ in range(_PROFILED)])

    run()
    jaxhetero.barrier(name="begin profile")
    found = profile(run) if jaxhetero.rank() == 0 else run() and {}
    jaxhetero.check()
    return found


def measure_beside(size: int, width: int, repeats: int) -> dict[str, float]:
    """The times of a chain of matrix products alone and during an all-reduce, which takes about half as long."""
    all_reduce_s = measure_all_reduce(size, jax.local_devices()[0], repeats)["median_s"]

    def chain(x: jax.Array, weight: jax.Array, length: int) -> jax.Array:
        product: jax.Array = jax.lax.fori_loop(0, length, lambda _, y: jnp.tanh(y @ weight), x)
        return product

    def program(reduce: Callable[[jax.Array], jax.Array], length: int) -> Any:
        """Compute a gradient and then the chain, which needs the gradient, so that XLA computes it first."""

        def run(x: jax.Array, weight: jax.Array, gradient: jax.Array) -> Any:
            gradient = gradient + 1
            return chain(x + gradient[0].astype(x.dtype), weight, length), reduce(gradient)

        return jax.jit(run)

    weight = jnp.eye(width, dtype=jnp.bfloat16)
    arguments = (jnp.ones((width, width), jnp.bfloat16), weight, jnp.zeros(size // 4, jnp.float32))
    one = median_of(program(lambda x: x, 64), arguments, repeats) / 64
    length = max(64, round(2 * all_reduce_s / one))
    alone = median_of(program(lambda x: x, length), arguments, repeats)
    beside = median_of(program(lambda x: jaxhetero.psum(x, name="beside"), length), arguments, repeats)
    return {"bytes": size, "products": length, "alone_s": alone, "beside_s": beside, "ratio": beside / alone}


def measure_row(row: Row, arguments: tuple[Any, ...], count: int, trace: str) -> float:
    """Seconds of a step of so many on the slowest worker. The profile of three more goes to the folder ``trace``."""

    def run(carry: Any, count: int) -> Any:
        for _ in range(count):
            carry = row.step(carry, *arguments)
        return jax.block_until_ready(carry)

    carry = run(row.carry, _WARMUP)
    jaxhetero.barrier(name="begin row")
    start = time.perf_counter()
    carry = run(carry, count)
    taken = time.perf_counter() - start
    jaxhetero.barrier(name="begin trace")
    if trace and jaxhetero.rank() == 0:
        with jax.profiler.trace(trace):
            carry = run(carry, 3)
    else:
        carry = run(carry, 3)
    jax.block_until_ready(row.end(carry))
    slowest = float(np.max(jaxhetero.pmax(np.float32(taken), name="slowest row")))
    jaxhetero.check()
    return slowest / count


def measure_rows(model: str, request: dict[str, Any], save: Callable[[dict[str, float]], None]) -> dict[str, float]:
    """The seconds of a step among others of its kind, by the name of the kind."""
    rows, arguments = make_rows(model, request["stand_in"])
    found: dict[str, float] = {}
    for name, row in rows.items():
        trace = f"{request['traces']}/{model}-{name}" if request["traces"] else ""
        found[name] = measure_row(row, arguments, request["repeats"], trace)
        save(found)
    return found


def measure_steps(model: str, request: dict[str, Any], save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The times of the model's programs. What is there is saved after each, since compiling one takes long."""
    small, repeats = request["stand_in"], request["repeats"]
    programs, arguments = make_programs(model, small)
    count = sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))
    row: dict[str, Any] = {"model": model, "small": small, "parameter_count": count, "median_s": {}, "times_s": {}}
    for name, program in programs.items():
        row["times_s"][name] = times_of(jax.jit(program), arguments, repeats)
        row["median_s"][name] = median(row["times_s"][name])
        save(row)
    exposed = row["median_s"]["overlap"] - row["median_s"]["alone"]
    row["hidden"] = 1 - exposed / row["median_s"]["all-reduce"]
    save(row)
    row["in_a_row_s"] = measure_rows(model, request, lambda found: save(row | {"in_a_row_s": found}))
    exposed = row["in_a_row_s"]["across"] - row["in_a_row_s"]["alone"]
    return row | {"hidden_across": 1 - exposed / row["median_s"]["all-reduce"]}


def measure(request: dict[str, Any], save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The figures of a part, on all ranks."""
    part, small, repeats = request["part"], request["stand_in"], request["repeats"]
    sizes = [min(size, 1 << 20) for size in request["sizes"]] if small else request["sizes"]
    if part == "sums":
        return {"wrong_count": int(jaxhetero.psum(np.int32(count_wrong())))}
    if part == "kernels":
        return profile_all_reduce(min(sizes[-1], 48 << 20))
    if part == "all-reduces":
        return measure_all_reduces(sizes, repeats)
    if part == "beside":
        return measure_beside(sizes[-1], 64 if small else 4096, repeats)
    if part == "nccl":
        return nccl.measure_nccl(sizes[-1], _WARMUP, repeats)
    return measure_steps(part, request, save)


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["part"] == "nccl":
        nccl.join(request["jax_coordinator"])
    jaxhetero.initialize()

    def save(found: dict[str, Any]) -> None:
        if jaxhetero.rank() == 0:
            Path(request["result"]).write_text(json.dumps(found))

    save(measure(request, save))
    jaxhetero.barrier()
    jaxhetero.shutdown()


main()
