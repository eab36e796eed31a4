"""The start of a job: who is missing or does not belong to it is named to those who wait, and told why."""

import resource
import socket

import pytest

from jaxhetero.errors import AddressInUse
from tests.support.cluster import Cluster, free_port


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


@pytest.mark.parametrize(
    ("setting", "value", "told", "others_told"),
    [
        (
            "TOKEN",
            "another",
            "AuthenticationError: the coordinator at {coordinator}: its job token differs",
            ["missing rank 1", "was refused"],
        ),
        (
            "CHUNK_BYTES",
            "4096",
            "VersionMismatch: rank 1 (host {host}) was started with settings other than rank 0's: "
            "chunk_bytes is 4096, not 0",
            ["missing rank 1", "rank 1 (host {host}) was refused"],
        ),
    ],
)
def test_who_does_not_belong(setting: str, value: str, told: str, others_told: list[str]) -> None:
    """Who was started with something else is told so at once; others, for whom they waited and what was refused."""
    with Cluster(2, 1) as cluster:
        cluster.start_reducers()
        cluster.start_worker(1, "errors.py", "none", "0", **{f"JAXHETERO_{setting}": value})
        start_rank_0(cluster)
        words = {"coordinator": cluster.coordinator, "host": socket.gethostname()}
        assert told.format(**words) in cluster.wait("worker 1").exception_line
        message = cluster.wait("worker 0").exception_line
        assert "StartTimeout" in message
        for word in others_told:
            assert word.format(**words) in message


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


def free_port_of_ipv6() -> int:
    try:
        return free_port("::1")
    except AddressInUse:
        pytest.skip("this kernel has no IPv6")


@pytest.mark.parametrize(("reducers", "interface"), [(1, ""), (0, ""), (1, "lo")])
def test_all_meet_over_ipv6(reducers: int, interface: str) -> None:
    """They learn of each other at addresses of IPv6, where the metrics are as well, and ``jaxhetero status`` asks."""
    ports = [free_port_of_ipv6() for _ in range(3)]
    settings = {"JAXHETERO_INTERFACE": interface, "JAXHETERO_MEASURE_RATES": "0"}
    with Cluster(2, reducers, settings, coordinator=f"[::1]:{ports[2]}") as cluster:
        cluster.start_reducers()
        for rank in range(2):
            cluster.start_worker(rank, "ipv6.py", JAXHETERO_METRICS_PORT=str(ports[rank]))
        for rank, outcome in enumerate(cluster.wait_workers()):
            seen = {"total": 3, "message": 1 - rank, "has_metrics": True, "hosts": ["[::1]"]}
            assert outcome.result == seen


def test_a_reducer_that_cannot_start_says_why() -> None:
    """To all, before it leaves: one that may open too few files for its strands."""
    with Cluster(1, 1, {"JAXHETERO_STRANDS": "32"}) as cluster:
        cluster.start_reducer()
        cluster.wait_for_error("reducer 0", "still trying to reach the coordinator")
        resource.prlimit(cluster.process("reducer 0").pid, resource.RLIMIT_NOFILE, (40, 40))
        cluster.start_worker(0, "errors.py", "none", "0")
        assert "Too many open files" in cluster.wait("worker 0").exception_line
        assert "Too many open files" in cluster.wait("reducer 0").errors
