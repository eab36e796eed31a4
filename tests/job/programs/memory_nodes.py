"""A sum on a host that seems to have two memory nodes of a core each; prints how many threads keep to each core."""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import jaxhetero
from jaxhetero._job import world


def thread_count(core: int) -> int:
    threads = pathlib.Path("/proc/self/task").iterdir()
    return sum(os.sched_getaffinity(int(thread.name)) == {core} for thread in threads)


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    two_nodes: Any = lambda: [[core] for core in cores]  # noqa: E731
    world.memory_nodes = two_nodes  # a stand-in for hardware
    jaxhetero.initialize()
    total = float(jax.jit(jaxhetero.psum)(jnp.ones(1_000_000))[-1])
    print(json.dumps({"total": total, "threads": [thread_count(core) for core in cores]}))
    jaxhetero.shutdown()


if __name__ == "__main__":
    main()
