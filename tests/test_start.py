"""The start of a job: who is missing or does not belong to it is named to those who wait, and told why."""

import socket

import pytest
from cluster import Cluster, free_port


def start_rank_0(cluster: Cluster) -> None:
    """With little patience, when everybody else is already looking for it: so it finds all who can come."""
    for name in cluster.names():
        cluster.wait_for_error(name, "still trying to reach the coordinator")
    cluster.start_worker(0, "errors.py", "none", "0", JAXHETERO_START_TIMEOUT_MS="5000")


@pytest.mark.parametrize(
    ("workers", "reducers", "missing"),
    [(2, 1, "rank 2"), (3, 1, "1 of 2 reducers"), (1, 0, "rank 1, rank 2, 2 of 2 reducers")],
)
def test_start_without_somebody(workers: int, reducers: int, missing: str) -> None:
    """Everybody who is there is told who is not, meanwhile every few seconds and at the end as the error."""
    with Cluster(3, 2) as cluster:
        cluster.start_reducers(reducers)
        for rank in range(1, workers):
            cluster.start_worker(rank, "errors.py", "none", "0")
        start_rank_0(cluster)
        for rank in range(workers):
            outcome = cluster.wait(f"worker {rank}")
            assert f"waiting for {missing}" in outcome.errors
            assert "StartTimeout" in outcome.exception_line
            assert missing in outcome.exception_line
        for outcome in cluster.wait_reducers():
            assert outcome.code != 0
            assert missing in outcome.errors


def test_start_without_the_coordinator() -> None:
    with Cluster(2, 1, {"JAXHETERO_START_TIMEOUT_MS": "5000"}) as cluster:
        cluster.start_reducers()
        cluster.start_worker(1, "errors.py", "none", "0")
        for outcome in (cluster.wait("worker 1"), cluster.wait("reducer 0")):
            assert outcome.code != 0
            assert (
                f"the coordinator at {cluster.coordinator} did not answer in time (Connection refused)"
                in outcome.errors
            )


def test_wrong_job_token() -> None:
    """Who has the wrong one is told so at once; the others, for whom they waited and what they refused."""
    with Cluster(2, 1) as cluster:
        cluster.start_reducers()
        cluster.start_worker(1, "errors.py", "none", "0", JAXHETERO_TOKEN="another")
        start_rank_0(cluster)
        intruder = cluster.wait("worker 1").exception_line
        assert "AuthenticationError" in intruder
        assert f"the coordinator at {cluster.coordinator}: its job token differs" in intruder
        message = cluster.wait("worker 0").exception_line
        assert "StartTimeout" in message
        assert "missing rank 1" in message
        assert "was refused" in message


def test_rank_given_twice() -> None:
    with Cluster(2, 1) as cluster:
        cluster.start_worker(0, "errors.py", "none", "0")
        cluster.wait_for_error("worker 0", "waiting for rank 1")
        cluster.start_worker(1, "errors.py", "none", "0", JAXHETERO_RANK="0")
        assert "AddressInUse" in cluster.wait("worker 1").exception_line


def test_coordinator_address_in_use() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), Cluster(2, 0, coordinator=f"127.0.0.1:{port}") as cluster:
        cluster.start_worker(0, "errors.py", "none", "0")
        message = cluster.wait("worker 0").exception_line
        assert "AddressInUse" in message
        assert f"127.0.0.1:{port}" in message


def test_different_settings() -> None:
    with Cluster(2, 1) as cluster:
        cluster.start_reducers()
        cluster.start_worker(1, "errors.py", "none", "0", JAXHETERO_CHUNK_BYTES="4096")
        start_rank_0(cluster)
        message = cluster.wait("worker 1").exception_line
        assert "VersionMismatch" in message
        assert "rank 0's: chunk_bytes is 4096, not 0" in message
