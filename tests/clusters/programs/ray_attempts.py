"""A run of Ray Train on two workers whose first attempt fails on rank 1. Each writes what it was told, as JSON.

Arguments: how many reducers, and how long to wait for room for them, in milliseconds.
"""

import json
import os
import re
import sys
import urllib.request
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from jaxhetero.cluster.ray import JaxheteroConfig

FOLDER = Path.cwd()
METRICS_PORT = 9100


def role_at(port: int) -> str:
    """Whose counts a port of this host serves."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return re.search(r'role="(\w+)"', page.read().decode())[1]


def train() -> None:
    """Sum, note what this attempt is, fail the first time."""
    import jax.numpy as jnp

    import jaxhetero

    jaxhetero.initialize()
    rank, attempt = jaxhetero.rank(), jaxhetero.restart_count()
    told = {
        "size": jaxhetero.size(),
        "sum": float(jaxhetero.psum(jnp.float32(rank + 1))),
        "timeout_ms": os.environ["JAXHETERO_TIMEOUT_MS"],
        "roles": [role_at(METRICS_PORT + rank), role_at(METRICS_PORT + jaxhetero.size() + rank)],
        "token": os.environ["JAXHETERO_TOKEN"],
    }
    (FOLDER / f"{attempt}-{rank}.json").write_text(json.dumps(told))
    jaxhetero.barrier()
    if attempt == 0 and rank == 1:
        raise ValueError("the first attempt fails")
    jaxhetero.barrier()
    jaxhetero.shutdown()


JaxTrainer(
    train,
    jax_config=JaxheteroConfig(
        reducers=int(sys.argv[1]),
        resources_per_reducer={"reducer": 1},
        settings={"metrics_port": METRICS_PORT, "timeout_ms": 12_345, "start_timeout_ms": int(sys.argv[2])},
    ),
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(storage_path=str(FOLDER / "ray-results"), failure_config=FailureConfig(max_failures=1)),
).fit()
