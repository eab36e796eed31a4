"""A reducer may die at any moment: training neither stops nor changes by one bit."""

import signal

import pytest

from tests.chaos import run_job
from tests.cluster import Cluster


@pytest.mark.parametrize("seed", [1, 4])
def test_deaths_change_no_bit(seed: int) -> None:
    toll = run_job(seed, strikes=4)
    assert toll.kills >= 4
    assert toll.views >= 4
    assert toll.same_bits


def test_the_last_reducer() -> None:
    with Cluster(2, 2) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "until killed", "0")
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running")
        for index in range(2):
            cluster.process(f"reducer {index}").send_signal(signal.SIGKILL)
        for outcome in cluster.wait_workers():
            assert "jaxhetero.ReducerLost: reducer " in outcome.errors
            assert "no reducer is left" in outcome.errors


@pytest.mark.parametrize("who", ["worker 1", "reducer 1"])
def test_a_process_that_is_stopped(who: str) -> None:
    """It closes no connection. A worker ends the job, a reducer is done without."""
    with Cluster(2, 2, {"JAXHETERO_TIMEOUT_MS": "4000"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "until killed", "0")
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running")
        cluster.process(who).send_signal(signal.SIGSTOP)
        if who == "worker 1":
            outcome = cluster.wait("worker 0", timeout_s=20)
            assert "jaxhetero.WorkerLost: rank 1 (host" in outcome.errors
            assert "no sign of life for 3200 ms" in outcome.errors
        else:
            cluster.wait_for_error("worker 0", "going on with 1 reducers")
            assert cluster.process("worker 0").poll() is None
