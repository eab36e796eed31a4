"""A sum on a host that seems to have two memory nodes of a core each; prints how many threads keep to each core."""

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import jaxhetero
from jaxhetero import world


def thread_count(core: int) -> int:
    threads = pathlib.Path("/proc/self/task").iterdir()
    return sum(os.sched_getaffinity(int(thread.name)) == {core} for thread in threads)


def main() -> None:
    two_nodes: Any = lambda: [[0], [1]]  # noqa: E731
    world.memory_nodes = two_nodes  # a stand-in for hardware
    jaxhetero.initialize()
    total = float(jax.jit(jaxhetero.psum)(jnp.ones(1_000_000))[-1])
    print(json.dumps({"total": total, "threads": [thread_count(0), thread_count(1)]}))
    jaxhetero.shutdown()


if __name__ == "__main__":
    main()
