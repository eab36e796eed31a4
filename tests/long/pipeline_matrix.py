"""All models of the zoo, in all schedules, over 2, 3 and 4 workers, over TCP and in shared memory: a table of errors.

    python -m tests.long.pipeline_matrix
    python -m tests.long.pipeline_matrix --workers 2 --models tied,bert

It took 50 minutes of two cores that had other work, so that it is no test. The columns:

    error    the largest relative error (RMS) of a leaf's gradients, against gradients that are computed in float64,
             over several draws of the weights
    mean     the error of a leaf over that of ``jax.grad`` of the same microbatches, on average over the leaves
    largest  the same, of the leaf where it is largest
    same     whether TCP and shared memory have given the same bits
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import tyro

from jaxhetero.pipeline.schedules import NAMES
from tests.support.cluster import Cluster

WAYS = {"tcp": {"JAXHETERO_SHARED_MEMORY": "0"}, "shared memory": {}}
_TIMEOUT_S = 3600
# The others wait while rank 0 computes in float64.
_SETTINGS = {"JAXHETERO_TIMEOUT_MS": "600000", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def microbatches(worker_count: int) -> int:
    """At least 4, and a multiple of the workers: virtual stages need that."""
    return -(-4 // worker_count) * worker_count


def steps(worker_count: int, program: list[str], cache: str, way: dict[str, str]) -> list[Any]:
    """What rank 0 of one job has printed, for each model and schedule."""
    with Cluster(worker_count, 1, {**_SETTINGS, **way}) as cluster:
        cluster.start_reducers()
        for rank in range(worker_count):
            # Most programs are those of another schedule, and all of them those of the other way.
            settings = {"JAX_COMPILATION_CACHE_DIR": f"{cache}/{worker_count}-{rank}"}
            settings["TESTS_MICROBATCHES"] = str(microbatches(worker_count))
            cluster.start_worker(rank, "pipeline_matrix.py", *program, **settings)
        outcomes = cluster.wait_workers(_TIMEOUT_S)
        assert all(outcome.code == 0 for outcome in outcomes), [outcome.errors[-2000:] for outcome in outcomes]
        return [json.loads(line) for line in outcomes[0].output.splitlines() if line.startswith("{")]


def row(worker_count: int, tcp: Any, shared: Any) -> str:
    start = f"{worker_count:7d}  {tcp['model']:16s} {tcp['schedule']:14s}"
    if "refused" in tcp:
        return f"{start} {tcp['refused'].removeprefix('pipeline: ')}"
    same = "yes" if tcp["digest"] == shared["digest"] else "NO"
    return f"{start} {tcp['error']:8.1e} {tcp['mean']:6.3f} {tcp['largest']:8.3f}  {same}"


def main(
    workers: tuple[int, ...] = (2, 3, 4), models: str = "", schedules: str = ",".join(NAMES), draws: int = 8
) -> bool:
    """Print the table; whether all bits were the same."""
    from tests.pipeline.pipeline_zoo import MODELS  # imports flax

    names = models.split(",") if models else list(MODELS)
    print(f"workers  {'model':16s} {'schedule':14s} {'error':>8s} {'mean':>6s} {'largest':>8s}  same", flush=True)
    program = [json.dumps(part) for part in (names, schedules.split(","), draws)]
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for worker_count in workers:
            found = [steps(worker_count, program, cache, way) for way in WAYS.values()]
            rows += [row(worker_count, *pair) for pair in zip(*found, strict=True)]
            print("\n".join(rows[-len(found[0]) :]), flush=True)
    return not any(line.endswith("NO") for line in rows)


if __name__ == "__main__":
    sys.exit(0 if tyro.cli(main) else 1)
