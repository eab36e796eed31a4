"""Steps of two groups of two and of all four workers, until rank 0 finds a file; prints a digest of all sums.

Each worker sums with its own group, and with all. What comes out is compared with sums of one process.
"""

import functools
import hashlib
import itertools
import json
import operator
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

COUNT = 60_000
WORKERS = 4


def group_of(rank: int) -> tuple[int, int]:
    return (0, 2) if rank % 2 == 0 else (1, 3)


def contribution(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(COUNT, np.float32)


def total(ranks: tuple[int, ...], step: int) -> np.ndarray:
    return functools.reduce(operator.add, [contribution(rank, step) for rank in ranks])


def number(digest: "hashlib._Hash") -> np.uint32:
    return np.frombuffer(digest.digest(), np.uint32)[0]


def main() -> None:
    end = Path(sys.argv[1])
    jaxhetero.initialize()
    rank = jaxhetero.rank()
    count = jax.jit(lambda here: jaxhetero.psum(here, name="end"))

    @jax.jit
    def sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jaxhetero.psum(x, workers=group_of(rank), name="group"), jaxhetero.psum(x, name="all")

    digest, ends = hashlib.sha256(), []
    for step in itertools.count():
        if count(jnp.int32(rank == 0 and end.exists())) > 0:
            break
        for result in sums(contribution(rank, step)):
            digest.update(np.asarray(result).tobytes())
        ends.append(time.time())
        if step == 2:
            print("running", flush=True)
    distributed = int(jaxhetero.psum(number(digest)))  # of all workers together
    views = jaxhetero.metrics().view_count
    jaxhetero.shutdown()
    alone = None
    if rank == 0:
        digests = [hashlib.sha256() for _ in range(WORKERS)]
        for step in range(len(ends)):
            for worker, of_worker in enumerate(digests):
                of_worker.update(total(group_of(worker), step).tobytes())
                of_worker.update(total(tuple(range(WORKERS)), step).tobytes())
        alone = sum(int(number(digest)) for digest in digests) % 2**32
    print(json.dumps({"distributed": distributed, "alone": alone, "views": views, "ends": ends}))


main()
