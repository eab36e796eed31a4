"""Processes that fork, as data loaders do: a child has no part in the job, and keeps nobody from seeing its parent end.

The programs are in ``programs/forks.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import pytest

from tests.support.cluster import Cluster, free_port
from tests.support.patience import PATIENCE

# The page on failures says "at once". Where nobody sees a process end, the heartbeats do, after 24 s.
AT_ONCE_S = 2 * PATIENCE


def test_children_have_no_part_in_the_job() -> None:
    """They hold nothing of it, end as they like, and are told so where they use it; shutting down does not wait."""
    with Cluster(workers=2) as cluster:
        port = str(free_port())
        for rank in range(2):
            cluster.start_worker(rank, "forks.py", "children", port, JAXHETERO_METRICS_PORT=str(free_port()))
        for rank, shown in enumerate(outcome.result for outcome in cluster.wait_workers()):
            assert shown["opened"] > 5
            assert shown["held"] == [7, "[]"]
            code, text = shown["used"]
            assert code == 7
            (*place, restart_count), *refusals = json.loads(text)
            assert (*place, restart_count) == (rank, 2, 0)
            for refusal in refusals:
                assert refusal.startswith("NotInitializedError: process ")
                assert f"was forked from the worker of rank {rank} and takes no part in its job" in refusal
            code, text = shown["compiled"]
            assert code == 7
            assert "NotInitializedError" in text
            assert "in a forked child" in text
            assert shown["again"] == [7, f'[7, "{rank}"]']
            code, text = shown["failed"]
            assert code == 1
            assert text.splitlines()[-1] == "ValueError: the child's own"
            assert shown["killed"] == [-signal.SIGKILL, ""]
            assert shown["anew"] == [7, "2.0"]
            assert shown["total"] == 2
            assert shown["shutdown_s"] < AT_ONCE_S


def children_of(cluster: Cluster, name: str) -> list[int]:
    cluster.wait_for_output(name, "]")
    return list(json.loads(cluster.output(name).splitlines()[0]))


@pytest.mark.parametrize(("killed", "reducers"), [("worker 1", 1), ("worker 0", 0), ("reducer 0", 1)])
def test_a_death_is_heard_at_once(killed: str, reducers: int) -> None:
    """Although the killed process has children that live."""
    settings = {"JAXHETERO_MEASURE_RATES": "0"}
    with Cluster(2, reducers + (killed == "reducer 0"), settings) as cluster:
        if killed == "reducer 0":
            cluster.start_program("reducer 0", "forks.py", "reducer")
        cluster.start_reducers(reducers)
        cluster.start_workers("forks.py", "worker")
        children = [child for name in ("worker 0", "worker 1") for child in children_of(cluster, name)]
        if killed == "reducer 0":
            cluster.process(killed).send_signal(signal.SIGUSR1)
            children += children_of(cluster, killed)
        try:
            at = time.time()
            cluster.process(killed).kill()
            survivors = [name for name in ("worker 0", "worker 1") if name != killed]
            for outcome in (cluster.wait(name) for name in survivors):
                assert outcome.result["at"] - at < AT_ONCE_S
                heard = outcome.result["heard"]
                assert ("a new view" if killed == "reducer 0" else f"WorkerLost: rank {killed[-1]}") in heard
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
