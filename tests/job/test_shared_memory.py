"""On one host bytes go through memory that both processes share; between hosts, and when asked, over the network."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.netlab import Lab, missing
from tests.support.cluster import Cluster, program_path

ROOT = Path(__file__).parents[2]
PROGRAM = "shared_memory.py"
LARGEST_CHUNK_BYTES = 1 << 18  # kMostAutoChunkBytes in xla_ffi/wire/job_shape.h
needs_namespaces = pytest.mark.skipif(
    missing() is not None and os.environ.get("CI") != "true", reason=f"no network namespaces: {missing()}"
)


def run(workers: int, reducers: int, **settings: str) -> list[dict[str, Any]]:
    with Cluster(workers, reducers, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers(PROGRAM)
        results = [outcome.result for outcome in cluster.wait_workers()]
        assert all(outcome.code == 0 for outcome in cluster.wait_reducers())
    assert all(result["digests"] == results[0]["digests"] for result in results)
    return results


@pytest.mark.parametrize(
    ("reducers", "settings"),
    [
        (2, {}),
        (1, {"JAXHETERO_CHECKSUM": "1"}),
        (1, {"JAXHETERO_COLOCATED_COUNT": "2"}),
        (2, {"JAXHETERO_STRANDS": "3"}),
    ],
    ids=["dedicated", "checksums", "mixed", "strands"],
)
def test_one_host_shares_memory(reducers: int, settings: dict[str, str]) -> None:
    settings = {"JAXHETERO_STRANDS": "1"} | settings
    shared = run(2, reducers, **settings)
    plain = run(2, reducers, JAXHETERO_SHARED_MEMORY="0", **settings)
    reducers += int(settings.get("JAXHETERO_COLOCATED_COUNT", "0"))
    count = reducers * int(settings["JAXHETERO_STRANDS"])
    assert [result["shared_connection_count"] for result in shared] == [count, count]
    assert [result["shared_connection_count"] for result in plain] == [0, 0]
    assert shared[0]["digests"] == plain[0]["digests"]
    # Of the large buckets, 12 and 6 MB on the wire, all is read where it is but the first chunks for each reducer, on
    # their way while both sides learn that they can. Checksums want to see every byte pass.
    lent = [result["lent_bytes"] for result in shared]
    if "JAXHETERO_CHECKSUM" in settings:
        assert lent == [0, 0]
    else:
        first_bytes = count * 4 * LARGEST_CHUNK_BYTES
        assert all(18_000_000 - first_bytes <= lent_bytes < 18_000_000 for lent_bytes in lent)


@needs_namespaces
def test_hosts_do_not() -> None:
    """Two workers with a reducer in each: its own is on its host, the other's is not, though they have one memory."""
    with Lab({"w0": "1gbit", "w1": "1gbit"}) as lab:
        settings = {
            **os.environ,
            "JAXHETERO_STRANDS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
            "JAX_PLATFORMS": "cpu",
            "JAXHETERO_WORKER_COUNT": "2",
            "JAXHETERO_COORDINATOR": f"{lab['w0'].address}:{lab['w0'].free_port()}",
            "JAXHETERO_TOKEN": secrets.token_hex(16),
            "JAXHETERO_START_TIMEOUT_MS": "60000",
        }
        workers = [
            lab[name].start(
                [sys.executable, str(program_path(PROGRAM))],
                env={**settings, "JAXHETERO_HOST": lab[name].address, "JAXHETERO_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, name in enumerate(("w0", "w1"))
        ]
        outputs = [worker.communicate(timeout=120) for worker in workers]
        assert not any(worker.returncode for worker in workers), outputs
    results = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert [result["shared_connection_count"] for result in results] == [1, 1]
    assert results[0]["digests"] == results[1]["digests"]
