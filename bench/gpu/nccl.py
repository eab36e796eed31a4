"""XLA's own all-reduce over NCCL, between processes that share a GPU, over sockets."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

import jaxhetero

# So that NCCL takes the way between hosts: sockets, and a copy engine or a kernel at each end.
SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
}


def join(coordinator: str) -> None:
    """Make one JAX world of all workers; before anything else of JAX."""
    rank, count = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    jax.distributed.initialize(coordinator, count, rank, local_device_ids=[0])


def measure_nccl(size: int, warmup: int, repeats: int) -> dict[str, Any]:
    """The times of ``jax.lax.psum`` of float32 in place."""
    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("workers",), axis_types=(AxisType.Auto,))
    here = NamedSharding(mesh, jax.P("workers"))

    def add(x: jax.Array) -> jax.Array:
        total: jax.Array = jax.lax.psum(x, "workers")
        return total

    run = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=jax.P("workers"), out_specs=jax.P()))
    own = np.ones((1, size // 4), np.float32)
    array = jax.make_array_from_process_local_data(here, own)
    times = []
    for _ in range(warmup + repeats):
        jaxhetero.barrier(name="begin nccl")
        start = time.perf_counter()
        total = jax.block_until_ready(run(array))
        times.append(float(jaxhetero.pmax(np.float32(time.perf_counter() - start), name="slowest nccl")))
    if np.asarray(total.addressable_data(0))[0, 0] != count:
        raise RuntimeError("a wrong sum")
    middle = median(times[warmup:])
    return {"bytes": size, "median_s": middle, "bytes_per_s": size / middle, "times_s": times[warmup:]}
