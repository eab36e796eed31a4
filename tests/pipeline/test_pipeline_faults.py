"""A worker of a pipeline, or a reducer, that is lost in a known task."""

import re
import signal

import pytest

from tests.support.cluster import Cluster

# What the other worker of the pipeline waits for then, which is the work of a stage of the lost one.
AWAITED = {
    "forward": "from stage 1 to stage 0, microbatch",
    "backward": "from stage 0 to stage 1, microbatch",
    "weights": "from stage 1 to stage 0, microbatch",
    "message": "from stage 0 to stage 1, microbatch",
}
SIGNALS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
SETTINGS = {"JAXHETERO_TIMEOUT_MS": "4000"}
ENDLESS = "100000"


@SIGNALS
@pytest.mark.parametrize("place", AWAITED)
def test_a_stage_that_is_lost_in_a_task(place: str, number: signal.Signals) -> None:
    """Its neighbour names the rank, the stage and the microbatch that it waits for, and its own task."""
    lost = 1 if "from stage 1" in AWAITED[place] else 0
    with Cluster(2, 1, SETTINGS) as cluster:
        cluster.start_reducers()
        cluster.start_workers("pipeline_faults.py", ENDLESS, str(lost), place, "10", str(int(number)))
        errors = cluster.wait(f"worker {1 - lost}").errors
    assert f"WorkerLost: rank {lost} (host" in errors
    assert re.search(rf"{AWAITED[place]} \d\" \(channel \d+\) from rank {lost}", errors), errors
    assert re.search(rf"this worker was at the \w+ pass of stage {1 - lost}, microbatch \d", errors), errors


@SIGNALS
def test_a_stage_that_is_lost_in_the_reduction_of_its_gradients(number: signal.Signals) -> None:
    """Rank 3, the second stage of the second replica. All others name it, and a reduction by its stage."""
    with Cluster(4, 2, SETTINGS) as cluster:
        cluster.start_reducers()
        cluster.start_workers("pipeline_faults.py", ENDLESS, "3", "reduction", "3", str(int(number)))
        errors = [cluster.wait(f"worker {rank}").errors for rank in range(3)]
    for text in errors:
        assert re.search(r"WorkerLost: rank 3 \(host.*: gradients of stage \d bucket 0 .* round \d", text), text


def test_a_reducer_that_is_lost_in_a_reduction_changes_no_bit() -> None:
    """Worker 0 kills it right after it has asked for the sum of its gradients in the third of six steps."""
    with Cluster(4, 2) as cluster:
        cluster.start_reducers()
        victim = str(cluster.process("reducer 0").pid)
        cluster.start_workers("pipeline_faults.py", "6", "0", "reduction", "3", str(int(signal.SIGKILL)), victim)
        results = [outcome.result for outcome in cluster.wait_workers()]
        assert cluster.process("reducer 0").wait() == -signal.SIGKILL
    assert all(result == {"same_bits": True} for result in results)
