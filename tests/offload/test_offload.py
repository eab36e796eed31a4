"""``offload``: train steps that are written for jax.lax end where those of jax.lax in one process end."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ROOT, free_port, program_path, run
from tests.support.programs_on_disk import FAST_COMPILATION


def tolerance(kind: str, key: str, devices: int) -> float:
    """A part of the largest number of a leaf; 0 for equality to the bit.

    Two numbers have one sum. XLA adds those of four devices in an order of its own, and ours are added in rank order.
    XLA compiles some programs for one device otherwise than for two: the local gradients of the language model, without
    any collective, differ as much between jax.jit on one device and jax.pmap on two.
    """
    if devices > 2:
        return 1e-5
    return 2e-6 if kind == "own" and "language" in key else 0.0


@pytest.fixture(scope="module")
def lax_ends(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where one process with as many devices ends that runs the steps as they are: a file, by the number of devices."""
    folder = tmp_path_factory.mktemp("lax")

    @functools.cache
    def file_of(devices: int) -> Path:
        path = Path(folder / f"{devices}.pickle")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILATION}
        command = [sys.executable, str(program_path("offload.py")), "lax", str(path), str(devices), ""]
        subprocess.run(command, env=environment, check=True, timeout=240)
        return path

    return file_of


@pytest.mark.parametrize(
    ("kind", "workers", "devices"),
    [("own", 2, 1), ("own", 4, 1), ("own", 2, 2), ("global", 2, 1)],
    ids=["2 workers", "4 workers", "2 workers of 2 devices", "global mesh"],
)
def test_train_steps_end_where_those_of_lax_end(kind: str, workers: int, devices: int, lax_ends: Any) -> None:
    """In pmap, plain jit, typed and untyped shard_map, NNX, and what a library jits; each with nothing else changed.

    On four devices two of the examples: ``ON_MANY`` in the program.
    """
    path, coordinator = lax_ends(workers * devices), f"127.0.0.1:{free_port()}"
    arguments = (kind, str(path), str(devices), coordinator)
    for result in run("offload.py", *arguments, workers=workers, reducers=2, XLA_FLAGS=FAST_COMPILATION):
        allowed = {key: tolerance(kind, key, workers * devices) for key in result["differences"]}
        assert {key: value for key, value in result["differences"].items() if value > allowed[key]} == {}
        assert min(result["calls"].values()) > 0
        if kind == "global":  # elsewhere XLA knows of one worker alone
            assert {key: names for key, names in result["foreign"].items() if names} == {}
        if "modules, pmap" in result["calls"]:
            one, all_leaves = result["calls"]["modules, pmap"], result["calls"]["modules, pmap, a bucket for each leaf"]
            assert (one, all_leaves) == (4, 9)
