"""Mistakes and misfortunes: every rank gets one exception that names who and what, in time, and every process ends."""

import re
import signal
import socket
import time

import pytest
from cluster import Cluster, Outcome, free_port

PATIENCE_MS = 6000


def exception_line(outcome: Outcome) -> str:
    """The last line with an exception of ours: at its start, or behind the name of XLA's."""
    assert outcome.code != 0
    lines = [
        line for line in outcome.errors.splitlines() if re.match(r"(?!\s).*jaxhetero\.(errors\.)?[A-Z]\w+: ", line)
    ]
    assert lines, outcome.errors
    return lines[-1]


def run_mistake(mistake: str, afflicted: int, *, workers: int = 3, reducers: int = 2) -> list[Outcome]:
    """Run the program with short deadlines; whoever is not ``afflicted`` must end by itself well within them."""
    settings = {"JAXHETERO_TIMEOUT_MS": str(PATIENCE_MS), "JAXHETERO_START_TIMEOUT_MS": "60000"}
    with Cluster(workers, reducers, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", mistake, str(afflicted))
        outcomes = cluster.wait_workers()
        for outcome in cluster.wait_reducers():
            assert outcome.code != 0
        return outcomes


@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        ("shape", ["float32[32,32]", "float32[1024]"]),
        ("dtype", ["bfloat16[1024]", "float32[1024]"]),
        ("structure", ["sum of float32[1024] (", "sum of float32[1027] in 2 leaves"]),
    ],
)
def test_workers_that_disagree_are_told_who_sent_what(mistake: str, names: list[str]) -> None:
    for outcome in run_mistake(mistake, afflicted=2):
        message = exception_line(outcome)
        assert "jaxhetero.MismatchError" in message
        assert "rank 2 (host " in message
        assert "step bucket 0" in message
        for name in names:
            assert name in message


@pytest.mark.parametrize("mistake", ["kind", "changed"])
def test_worker_that_runs_another_program(mistake: str) -> None:
    """Another collective, or the same one compiled anew for other shapes, is another op: who waits is told for whom."""
    for outcome in run_mistake(mistake, afflicted=1):
        assert "jaxhetero.RoundTimeout" in exception_line(outcome)
        assert "waiting for rank " in exception_line(outcome)


def test_worker_that_never_calls() -> None:
    outcomes = run_mistake("silent", afflicted=1)
    for rank in (0, 2):
        message = exception_line(outcomes[rank])
        assert "jaxhetero.RoundTimeout" in message
        assert "waiting for rank 1 (host " in message


@pytest.mark.parametrize("mistake", ["killed", "leaves", "raises"])
def test_worker_that_ends_early(mistake: str) -> None:
    outcomes = run_mistake(mistake, afflicted=1)
    for rank in (0, 2):
        message = exception_line(outcomes[rank])
        assert "jaxhetero.WorkerLost" in message
        assert "rank 1 (host " in message


def test_reducer_that_dies_without_failover() -> None:
    with Cluster(2, 2, {"JAXHETERO_FAILOVER": "0"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "until killed", "0")
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running")
        start = time.monotonic()
        cluster.process("reducer 1").send_signal(signal.SIGKILL)
        for outcome in cluster.wait_workers():
            assert "jaxhetero.ReducerLost: reducer " in exception_line(outcome)
        assert time.monotonic() - start < 10
        assert cluster.wait("reducer 0").code != 0


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
            assert "StartTimeout" in exception_line(outcome)
            assert missing in exception_line(outcome)
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
        intruder = exception_line(cluster.wait("worker 1"))
        assert "AuthenticationError" in intruder
        assert f"the coordinator at {cluster.coordinator}: its job token differs" in intruder
        message = exception_line(cluster.wait("worker 0"))
        assert "StartTimeout" in message
        assert "missing rank 1" in message
        assert "was refused" in message


def test_rank_given_twice() -> None:
    with Cluster(2, 1) as cluster:
        cluster.start_worker(0, "errors.py", "none", "0")
        cluster.wait_for_error("worker 0", "waiting for rank 1")
        cluster.start_worker(1, "errors.py", "none", "0", JAXHETERO_RANK="0")
        assert "AddressInUse" in exception_line(cluster.wait("worker 1"))


def test_coordinator_address_in_use() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), Cluster(2, 0, coordinator=f"127.0.0.1:{port}") as cluster:
        cluster.start_worker(0, "errors.py", "none", "0")
        message = exception_line(cluster.wait("worker 0"))
        assert "AddressInUse" in message
        assert f"127.0.0.1:{port}" in message


def test_different_settings() -> None:
    with Cluster(2, 1) as cluster:
        cluster.start_reducers()
        cluster.start_worker(1, "errors.py", "none", "0", JAXHETERO_CHUNK_BYTES="4096")
        start_rank_0(cluster)
        message = exception_line(cluster.wait("worker 1"))
        assert "VersionMismatch" in message
        assert "rank 0's: chunk_bytes is 4096, not 0" in message


def test_psum_before_initialize() -> None:
    with Cluster(1) as cluster:
        cluster.start_worker(0, "errors.py", "uninitialized", "0")
        assert "NotInitializedError: call jaxhetero.initialize()" in exception_line(cluster.wait("worker 0"))


def test_bare_call_on_a_sharded_array() -> None:
    with Cluster(2, 1, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "sharded", "0")
        for outcome in cluster.wait_workers():
            message = exception_line(outcome)
            assert "ConfigError" in message
            assert "this program runs on 2 devices" in message
