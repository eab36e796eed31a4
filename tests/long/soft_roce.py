"""Two workers and two reducers over the fabric of ``JAXHETERO_FABRIC``: sums are right, and a reducer may be killed.

export LD_LIBRARY_PATH=/the/folder/of/libfabric JAXHETERO_FABRIC="verbs;ofi_rxm" JAXHETERO_SHARED_MEMORY=0
lab/soft_roce/run /tmp/soft_roce python -m tests.long.soft_roce
"""

import os
import re
import signal

import numpy as np

from tests.support.cluster import Cluster

# A virtual machine without KVM takes minutes to import JAX.
PATIENCE_S = 1200
# Of chunks that are sent from where they lie.
SETTINGS = {"JAXHETERO_CHUNK_BYTES": "131072", "JAXHETERO_COMPRESS": "never", "JAXHETERO_STRANDS": "1"}
SETTINGS |= {"JAXHETERO_TIMEOUT_MS": "60000", "JAXHETERO_START_TIMEOUT_MS": str(1000 * PATIENCE_S)}


def check_sums() -> None:
    """Those of ``shared_memory.py``, against NumPy's."""
    with Cluster(2, 2, SETTINGS) as cluster:
        cluster.start_reducers()
        cluster.start_workers("shared_memory.py")
        results = [cluster.wait(f"worker {rank}", PATIENCE_S).result for rank in range(2)]
        for outcome in cluster.wait_reducers():
            assert re.search(r"lent_bytes=\d{7}", outcome.errors), outcome.errors
    ranks = [np.random.default_rng(rank) for rank in range(2)]
    for index, count in enumerate((1, 1000, 3_000_000)):
        first, second = (random.standard_normal(count, dtype=np.float32) for random in ranks)
        total = first + second
        expected = [float(total[0]), int(total.view(np.uint32).astype(np.uint64).sum())]
        assert [result["digests"][index] for result in results] == [expected, expected]
    assert [result["fabric_connection_count"] for result in results] == [2, 2], results
    print(f"over {os.environ['JAXHETERO_FABRIC']}: the sums have the right bits", flush=True)


def check_a_death() -> None:
    with Cluster(2, 2, SETTINGS) as cluster:
        cluster.start_reducers()
        cluster.start_workers("errors.py", "until killed", "0")
        for rank in range(2):
            cluster.wait_for_output(f"worker {rank}", "running", PATIENCE_S)
            assert "was lost" not in cluster.errors(f"worker {rank}")
        cluster.process("reducer 0").send_signal(signal.SIGKILL)
        for rank in range(2):
            cluster.wait_for_error(f"worker {rank}", "going on with 1 reducers", PATIENCE_S)
            assert cluster.process(f"worker {rank}").poll() is None
    print("a reducer was killed, and the job goes on", flush=True)


if __name__ == "__main__":
    check_sums()
    check_a_death()
