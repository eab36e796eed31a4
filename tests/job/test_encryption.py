"""A job may encrypt all that goes over sockets: the same bits, and nobody takes part who does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from jaxhetero.doctor.status import read_status
from jaxhetero.errors import VersionMismatch
from tests.support.cluster import Cluster
from tests.support.launcher import Run

SOCKETS = {"JAXHETERO_SHARED_MEMORY": "0", "JAXHETERO_STRANDS": "2"}


def run(**settings: str) -> tuple[list[Any], list[str]]:
    """The results of two workers, and their logs."""
    with Cluster(2, 2, SOCKETS | settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers("shared_memory.py")
        outcomes = cluster.wait_workers()
        assert all(outcome.code == 0 for outcome in cluster.wait_reducers())
    return [outcome.result for outcome in outcomes], [outcome.errors for outcome in outcomes]


def test_the_bits_are_those_of_a_job_that_does_not() -> None:
    assert run(JAXHETERO_ENCRYPT="1") == run()


def test_memory_of_one_host_stays_as_it_is() -> None:
    results, _ = run(JAXHETERO_ENCRYPT="1", JAXHETERO_SHARED_MEMORY="1")
    assert all(result["lent_bytes"] > 0 for result in results)


def test_a_fabric_is_not_used_and_the_log_says_why() -> None:
    results, logs = run(JAXHETERO_ENCRYPT="1", JAXHETERO_FABRIC="tcp")
    assert all(result["fabric_connection_count"] == 0 for result in results)
    assert all("bytes go over sockets, not over a fabric: only sockets are encrypted" in log for log in logs)


@pytest.mark.parametrize("odd", ["0", "1"])
def test_a_reducer_that_differs_is_told_and_so_is_the_log(odd: str) -> None:
    others = {"JAXHETERO_ENCRYPT": str(1 - int(odd)), "JAXHETERO_START_TIMEOUT_MS": "5000"}
    with Cluster(1, 1, others) as cluster:
        cluster.start_workers("shared_memory.py")
        cluster.start_reducer(JAXHETERO_ENCRYPT=odd)
        [reducer] = cluster.wait_reducers()
        [worker] = cluster.wait_workers()
    assert reducer.code != 0
    assert "give all processes of the job the same JAXHETERO_ENCRYPT" in reducer.errors
    assert "give all processes of the job the same JAXHETERO_ENCRYPT" in worker.errors
    assert "StartTimeout: the job did not start" in worker.errors


def test_status_asks_as_the_job_does() -> None:
    with Cluster(2, 1, {"JAXHETERO_ENCRYPT": "1"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "until killed", "0")
        cluster.wait_for_output("worker 0", "running")
        assert not read_status(cluster.coordinator, cluster.token, 0.1, encrypt=True).problems()
        with pytest.raises(VersionMismatch, match=r"encrypts, and this process does not.*JAXHETERO_ENCRYPT"):
            read_status(cluster.coordinator, cluster.token, 0.1)


@pytest.mark.parametrize("elastic", [[], ["--elastic", "2:3"]])
def test_one_variable_is_enough_for_the_launcher(
    elastic: list[str], launch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its reducers, and for the coordinator of an elastic job."""
    monkeypatch.setenv("JAXHETERO_ENCRYPT", "1")
    program = str(Path(__file__).parent / "programs/first_sum.py")
    done = launch("--workers", "2", "--reducers", "1", *elastic, "--", sys.executable, program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 2: [") == 2
