"""A reducer may die at any moment: training neither stops nor changes by one bit."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launcher import TIMEOUT_S, Start

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


# Sums until the file "enough" is there; all workers see it in the same round.
_TRAIN = """
import jax, jax.numpy as jnp, jaxhetero, pathlib
jaxhetero.initialize()
step = jax.jit(jaxhetero.psum)
while not step({"gradients": jnp.ones(100_000), "enough": float(pathlib.Path("enough").exists())})["enough"]:
    if jaxhetero.metrics().round_count == 20:
        print("under way")
print("changes:", jaxhetero.metrics().view_count)
jaxhetero.shutdown()
"""


@pytest.mark.parametrize("returns", [True, False], ids=["while the job runs", "after the job"])
def test_a_reducer_that_is_stopped_and_continued(start_launch: Start, tmp_path: Path, returns: bool) -> None:
    """The job goes on without it, and takes it back if it still runs; this is a warning, and no failure."""
    arguments = ("--workers", "2", "--reducers", "2", "--timeout-ms", "3000", "--", sys.executable, "-c", _TRAIN)
    process = start_launch(*arguments, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    seen = []

    def wait_for_line(words: str, count: int = 1) -> None:
        for line in process.stdout:
            seen.append(line)
            count -= words in line
            if count == 0:
                return
        raise AssertionError(f"no {words!r} in {''.join(seen)}")

    wait_for_line("under way", 2)
    stopped = next(child for child in psutil.Process(process.pid).children() if "reducer" in child.cmdline())
    stopped.suspend()
    wait_for_line("going on with 1 reducers", 2)
    if returns:
        stopped.resume()
        wait_for_line("going on with 2 reducers", 2)
        (tmp_path / "enough").touch()
    else:
        (tmp_path / "enough").touch()
        wait_for_line("INFO done: ")  # so the coordinator has ended the job
        stopped.resume()
    output = "".join(seen) + process.communicate(timeout=TIMEOUT_S)[0]
    assert process.returncode == 0, output
    assert re.search(r"WARNING reducer \d \(.*\) was lost: .*; the job goes on without it; joining it again\n", output)
    told = re.search(
        r"launch: warning: reducer 0 .* exited with code 3; the workers have ended well without it\n", output
    )
    assert bool(told) == (not returns), output
