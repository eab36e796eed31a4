"""What only a GPU can show: ``TESTS_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false pytest``.

Other tests run with arrays on a GPU that way as well.
"""

import signal
from pathlib import Path

import pytest

from tests.support.cluster import ON_GPU, Cluster

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def test_reducers_may_die(tmp_path: Path) -> None:
    """Every total is right in every step, under three deaths."""
    end = tmp_path / "end"
    with Cluster(2, 3) as cluster:
        cluster.start_reducers()
        cluster.start_workers("soak.py", str(end))
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running", timeout_s=120)
        for deaths, victim in enumerate(("reducer 0", "reducer 1", "reducer 3"), 1):
            cluster.process(victim).send_signal(signal.SIGKILL)
            cluster.wait_for_log("worker 0", lambda log, deaths=deaths: log.count("going on with") >= deaths)
            cluster.wait_for_error(cluster.start_reducer(), "is ready")
        end.touch()
        for outcome in cluster.wait_workers():
            assert outcome.result["steps"] > 2
