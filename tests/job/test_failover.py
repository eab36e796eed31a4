"""A reducer may die at any moment: training neither stops nor changes by one bit."""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.long.chaos import run_job
from tests.support.cluster import ON_GPU, Cluster
from tests.support.launcher import TIMEOUT_S, Start


@pytest.mark.skipif(ON_GPU, reason="XLA chooses other matrix products for the same training in one process")
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
import itertools, jax, jax.numpy as jnp, jaxhetero, pathlib
jaxhetero.initialize()
step = jax.jit(jaxhetero.psum)
for number in itertools.count():
    sums = step({"gradients": jnp.ones(100_000), "enough": float(pathlib.Path("enough").exists())})
    if number == 10:
        print("under way")
    if sums["enough"]:
        break
jaxhetero.shutdown()
"""


@dataclass
class Launched:
    """A job of two workers under the launcher, whose output is read line by line."""

    process: subprocess.Popen[str]
    seen: list[str] = field(default_factory=list)

    def wait_for(self, words: str, count: int = 1) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line)
            count -= words in line
            if count == 0:
                return
        raise AssertionError(f"no {words!r} in {''.join(self.seen)}")

    def reducer(self, number: int) -> psutil.Process:
        """The process that the launcher calls by this number."""
        ready = re.search(rf"\[reducer {number}\] .* on port (\d+)", "".join(self.seen))
        assert ready
        children = psutil.Process(self.process.pid).children()
        ports = {connection.laddr.port: child for child in children for connection in child.net_connections("inet")}
        return ports[int(ready[1])]

    def wait_for_workers(self) -> None:
        """Until they have ended."""
        workers = [child for child in psutil.Process(self.process.pid).children() if "-c" in child.cmdline()]
        assert not psutil.wait_procs(workers, timeout=TIMEOUT_S)[1]

    def end(self) -> str:
        """All of its output."""
        assert self.process.stdout is not None
        output = "".join([*self.seen, *self.process.stdout])
        assert self.process.wait(TIMEOUT_S) == 0, output
        return output


def launch_training(start_launch: Start, reducers: int) -> Launched:
    arguments = ("--workers", "2", "--reducers", str(reducers), "--timeout-ms", "3000")
    job = Launched(start_launch(*arguments, "--", sys.executable, "-c", _TRAIN, stderr=subprocess.STDOUT))
    job.wait_for("under way", 2)
    return job


@pytest.mark.parametrize("returns", [True, False], ids=["while the job runs", "after the job"])
def test_a_reducer_that_is_stopped_and_continued(start_launch: Start, tmp_path: Path, returns: bool) -> None:
    """The job goes on without it, and takes it back if it still runs; this is a warning, and no failure."""
    job = launch_training(start_launch, 2)
    stopped = job.reducer(0)
    stopped.suspend()
    job.wait_for("going on with 1 reducers", 2)
    if returns:
        stopped.resume()
        job.wait_for("going on with 2 reducers", 2)
        (tmp_path / "enough").touch()
    else:
        (tmp_path / "enough").touch()
        job.wait_for_workers()  # else the launcher cannot know that they go on without it
        stopped.resume()
    output = job.end()
    assert re.search(
        r"\[reducer 0\] .* WARNING reducer 0 \(.* was lost: .*; the job goes on without it; joining", output
    )
    assert len(re.findall(r"\[worker \d\]  reducer 0 \(.*\) joined\n", output)) == 2 * returns
    told = re.search(r"launch: warning: reducer 0 .* exited with code 3; the workers have ended well without", output)
    assert bool(told) == (not returns), output


def test_all_messages_call_a_reducer_by_the_number_that_the_launcher_gave_it(
    start_launch: Start, tmp_path: Path
) -> None:
    job = launch_training(start_launch, 4)
    job.reducer(2).kill()
    job.wait_for("going on with 3 reducers", 2)
    (tmp_path / "enough").touch()
    output = job.end()
    assert sorted(re.findall(r"\[reducer (\d)\] .*reducer (\d) is ready", output)) == [(n, n) for n in "0123"]
    assert re.findall(r"\[worker \d\]  reducer (\d) \(.*\) was lost", output) == ["2", "2"]
    assert re.findall(r"launch: warning: reducer (\d) .* was killed by SIGKILL", output) == ["2"]
