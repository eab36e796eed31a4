"""Mistakes and misfortunes: every rank gets one exception that names who and what, in time, and every process ends."""

import signal
import time

import pytest

from tests.support.cluster import Cluster, Outcome
from tests.support.patience import PATIENCE

PATIENCE_MS = 6000


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
        ("more", ["2 leaves in a call of 4238 bytes (step bucket 0 (", "2 leaves (step bucket 0 ("]),
    ],
)
def test_workers_that_disagree_are_told_who_sent_what(mistake: str, names: list[str]) -> None:
    for outcome in run_mistake(mistake, afflicted=2):
        message = outcome.exception_line
        assert "jaxhetero.MismatchError" in message
        assert "rank 2 (host " in message
        assert "step bucket 0" in message
        for name in names:
            assert name in message


@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        (
            "kind",
            ["broadcast of float32[1027] in 2 leaves from rank 1 (step bucket 0 (", "sum of float32[1027] in 2 leaves"],
        ),
        ("changed", ["sum of float32[7] (step bucket 0 (", "sum of float32[1027] in 2 leaves (step bucket 0 ("]),
    ],
)
def test_worker_that_runs_another_program(mistake: str, names: list[str]) -> None:
    """Another collective of the same name, or the same one compiled anew for other shapes: all are told at once."""
    for outcome in run_mistake(mistake, afflicted=1):
        message = outcome.exception_line
        assert "jaxhetero.MismatchError" in message
        for name in [*names, "rank 1 (host ", "round 1"]:
            assert name in message


def test_two_sums_of_one_name_are_never_mixed_up() -> None:
    """Constants that only one worker has may make XLA run two sums in another order there: an error, or both sums."""
    # As long as a first round may take, and whoever waits for a worker that has left.
    settings = {"JAXHETERO_START_TIMEOUT_MS": str(round(10_000 * PATIENCE)), "JAXHETERO_TIMEOUT_MS": str(PATIENCE_MS)}
    with Cluster(2, 2, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "order", "1")
        for outcome in cluster.wait_workers():
            if outcome.code != 0:
                assert "jaxhetero.RoundTimeout" in outcome.exception_line
                assert "same bucket 0" in outcome.exception_line
            else:
                assert outcome.result == [2, 200]


def test_worker_that_never_calls() -> None:
    outcomes = run_mistake("silent", afflicted=1)
    for rank in (0, 2):
        message = outcomes[rank].exception_line
        assert "jaxhetero.RoundTimeout" in message
        assert "waiting for rank 1 (host " in message


@pytest.mark.parametrize("mistake", ["killed", "leaves", "raises"])
def test_worker_that_ends_early(mistake: str) -> None:
    outcomes = run_mistake(mistake, afflicted=1)
    for rank in (0, 2):
        message = outcomes[rank].exception_line
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
            assert "jaxhetero.ReducerLost: reducer " in outcome.exception_line
        assert time.monotonic() - start < 10
        assert cluster.wait("reducer 0").code != 0


def test_psum_before_initialize() -> None:
    with Cluster(1) as cluster:
        cluster.start_worker(0, "errors.py", "uninitialized", "0")
        assert "NotInitializedError: call jaxhetero.initialize()" in cluster.wait("worker 0").exception_line


def test_bare_call_on_a_sharded_array() -> None:
    with Cluster(2, 1, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "sharded", "0")
        for outcome in cluster.wait_workers():
            message = outcome.exception_line
            assert "ConfigError" in message
            assert "this program runs on 2 devices" in message
