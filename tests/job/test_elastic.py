"""Workers of an elastic job may be lost: the others go on, with the same bits as a replay of what has happened."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxhetero.config import Config
from jaxhetero.errors import ConfigError
from jaxhetero.watching.rounds_file import join_files
from tests.long.abuse import attack
from tests.support.cluster import Cluster
from tests.support.elastic_oracle import digest, replay
from tests.support.launcher import TIMEOUT_S, Start

LOST_AFTER_MS = 1500


def elastic_cluster(workers: int, reducers: int, least: int = 2, **settings: str) -> Cluster:
    return Cluster(
        workers,
        reducers,
        {
            "JAXHETERO_ELASTIC": f"{least}:{workers + 1}",
            "JAXHETERO_LOST_AFTER_MS": str(LOST_AFTER_MS),
            **settings,
        },
    )


def start(cluster: Cluster, *arguments: int) -> None:
    cluster.start_coordinator()
    cluster.start_reducers()
    cluster.start_workers("elastic.py", *map(str, arguments))


def check_survivors(cluster: Cluster, survivors: list[int]) -> list[Any]:
    """All of them end well, have the same history, and the bits of a replay of it."""
    results = [cluster.wait(f"worker {rank}").result for rank in survivors]
    for result in results:
        assert result["history"] == results[0]["history"]
        assert result["digest"] == digest(replay(result["history"]))
        assert result["compiled"] == 0
        assert result["size"] == len(survivors)
        assert all(ranks == survivors for ranks in result["history"][-1].values())
    return results


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"elastic": "2"}, "it must be MIN:MAX, as in 2:8"),
        ({"elastic": "1:4"}, "2 <= MIN <= MAX"),
        ({"elastic": "4:3"}, "2 <= MIN <= MAX"),
        ({"elastic": "2:4", "worker_count": 5}, "worker_count is 5; with elastic 2:4 it must be in that range"),
        ({"elastic": "2:4", "failover": False}, "failover is off, which elastic needs"),
        ({"elastic": "2:4", "lost_after_ms": 0}, "lost_after_ms is 0"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    job = {"worker_count": 3, "coordinator": "10.0.0.1:7700", "token": "secret"}
    with pytest.raises(ConfigError, match=re.escape(words)):
        Config(**job | settings)


def kill(cluster: Cluster, name: str, after: str) -> None:
    cluster.wait_for_output("worker 0", after)
    cluster.kill(name)


@pytest.mark.parametrize(("workers", "reducers"), [(3, 2), (4, 0)], ids=["dedicated reducers", "reducers inside"])
def test_a_worker_is_killed(workers: int, reducers: int) -> None:
    with elastic_cluster(workers, reducers) as cluster:
        start(cluster, 150)
        kill(cluster, "worker 1", after="step 40")
        check_survivors(cluster, [rank for rank in range(workers) if rank != 1])
        assert cluster.wait("coordinator").code == 0
        for outcome in cluster.wait_reducers():
            assert outcome.code == 0, outcome.errors


def test_two_workers_are_killed_at_once() -> None:
    with elastic_cluster(4, 1, JAXHETERO_STRANDS="2") as cluster:
        start(cluster, 150)
        kill(cluster, "worker 1", after="step 40")
        cluster.process("worker 3").send_signal(signal.SIGKILL)
        check_survivors(cluster, [0, 2])


def test_a_worker_and_a_reducer_are_killed_at_once(tmp_path: Path) -> None:
    """And the timeline of a worker says who took part when, and why rounds stood still."""
    with elastic_cluster(3, 2) as cluster:
        cluster.start_coordinator()
        cluster.start_reducers()
        for rank in range(3):
            own = {"JAXHETERO_RANK": str(rank), "JAXHETERO_TIMELINE_FILE": str(tmp_path / f"{rank}.rounds")}
            cluster.start_program(f"worker {rank}", "elastic.py", "150", **own)
        kill(cluster, "worker 0", after="step 40")
        cluster.process("reducer 1").send_signal(signal.SIGKILL)
        check_survivors(cluster, [1, 2])
    join_files(tmp_path / "trace.json", {"worker 1": tmp_path / "1.rounds"})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counts = [event["args"] for event in events if event["ph"] == "C"]
    assert (counts[0], counts[-1]) == ({"workers": 3, "reducers": 2}, {"workers": 2, "reducers": 1})
    stops = [event for event in events if event.get("cat") == "view"]
    assert len(stops) == len(counts) - 1
    assert stops[-1]["args"]["workers"] == [1, 2]
    assert len(stops[-1]["args"]["reducers"]) == 1  # of the numbers 0 and 1, which follow from who came first
    why = "; ".join(stop["name"] for stop in stops)
    assert "rank 0 (host " in why
    assert "reducer 0 (host " in why or "reducer 1 (host " in why


def test_a_worker_is_stopped() -> None:
    """It closes no connection; continued, it hears that the job has gone on without it."""
    with elastic_cluster(3, 1) as cluster:
        start(cluster, 100)
        cluster.wait_for_output("worker 0", "step 40")
        cluster.process("worker 2").send_signal(signal.SIGSTOP)
        results = check_survivors(cluster, [0, 1])
        assert max(result["longest_s"] for result in results) < LOST_AFTER_MS / 1000 + 1
        cluster.process("worker 2").send_signal(signal.SIGCONT)
        assert "WorkerLost: rank 2 (host " in cluster.wait("worker 2").exception_line


def test_a_program_fails() -> None:
    """The others do not wait for it."""
    with elastic_cluster(3, 0) as cluster:
        start(cluster, 100, 1, 40)
        results = check_survivors(cluster, [0, 2])
        assert max(result["longest_s"] for result in results) < LOST_AFTER_MS / 1000
        assert "this program fails" in cluster.wait("worker 1").errors


def test_too_few_are_left() -> None:
    with elastic_cluster(2, 1, JAXHETERO_REJOIN_TIMEOUT_MS="500") as cluster:
        start(cluster, 1000)
        kill(cluster, "worker 1", after="step 5")
        assert "the job needs at least 2" in cluster.wait("worker 0").exception_line
        assert cluster.wait("coordinator").code == 1


@pytest.mark.parametrize("dies", [False, True], ids=["alone", "with a worker"])
def test_the_coordinator_is_killed_and_started_again(dies: bool) -> None:
    """Rounds go on meanwhile; a worker that was lost with it is done without once it is back."""
    with elastic_cluster(3, 1) as cluster:
        start(cluster, 400)
        kill(cluster, "coordinator", after="step 20")
        if dies:
            cluster.kill("worker 1")
        else:
            cluster.wait_for_output("worker 0", "step 60")
        cluster.start_coordinator("coordinator again")
        if not dies:
            cluster.wait_for_error("worker 0", "going on with 3 workers")
            kill(cluster, "worker 1", after="step 100")
        check_survivors(cluster, [0, 2])
        assert dies or "\nrank 1 (host " in cluster.wait("worker 0").errors
        assert cluster.wait("coordinator again").code == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_is_lost_while_there_is_no_coordinator(how: signal.Signals) -> None:
    """Rounds wait, for longer than a round may take, until it is back."""
    with elastic_cluster(3, 1, JAXHETERO_TIMEOUT_MS="2000") as cluster:
        start(cluster, 100)
        cluster.wait_for_output("worker 0", "step 20")
        cluster.process("coordinator").send_signal(how)
        cluster.process("worker 1").send_signal(signal.SIGSTOP)
        time.sleep(4)
        if how == signal.SIGKILL:
            cluster.wait("coordinator")
            cluster.start_coordinator("coordinator again")
        else:
            cluster.process("coordinator").send_signal(signal.SIGCONT)
        results = check_survivors(cluster, [0, 2])
        assert min(result["longest_s"] for result in results) > 3.5
        cluster.process("worker 1").kill()


def test_strangers_at_the_coordinator() -> None:
    with elastic_cluster(3, 1) as cluster:
        start(cluster, 200)
        cluster.wait_for_output("worker 0", "step 10")
        host, port = cluster.coordinator.split(":")
        attack([(host, int(port))], 50, half_open=20)
        results = check_survivors(cluster, [0, 1, 2])
        assert all(ranks == [0, 1, 2] for step in results[0]["history"] for ranks in step.values())
        ended = cluster.wait("coordinator")
        assert ended.code == 0
        assert 1 <= ended.errors.count("refused a connection") <= 20, ended.errors  # rare lines, not one for each


def test_what_is_refused_and_what_is_not() -> None:
    with elastic_cluster(2, 1, XLA_FLAGS="--xla_force_host_platform_device_count=2") as cluster:
        cluster.start_coordinator()
        cluster.start_reducers()
        cluster.start_workers("elastic_refusals.py")
        for outcome in cluster.wait_workers():
            assert outcome.result == "done"


# Ends well in all workers but one, after that one and the coordinator were killed.
_TRAIN = """
import os, pathlib, signal, sys, time, jax, jax.numpy as jnp, jaxhetero
jaxhetero.initialize()
step = jax.jit(lambda x: jaxhetero.pmean(x, who=True))
folder = pathlib.Path(sys.argv[1])
step(jnp.ones(5000))
print("under way", flush=True)
while True:
    # All see it in the same round.
    enough, who = step(jnp.full(5000, float((folder / "enough").exists())))
    if enough[0] > 0:
        break
    if (folder / "kill").exists() and jaxhetero.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
_, who_of_nothing = jaxhetero.psum((), who=True)
print("ended with", int(who.count), "and", int(who_of_nothing.count))
"""


def test_the_launcher_starts_the_coordinator_again(start_launch: Start, tmp_path: Path) -> None:
    command = (sys.executable, "-c", _TRAIN, str(tmp_path))
    launched = start_launch("--workers", "3", "--elastic", "2:3", "--", *command, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + TIMEOUT_S
    coordinator = None
    while coordinator is None and time.monotonic() < deadline:
        children = psutil.Process(launched.pid).children()
        coordinator = next((child for child in children if "coordinator" in child.cmdline()), None)
    assert coordinator is not None
    seen = []
    assert launched.stdout is not None
    for line in launched.stdout:
        seen.append(line)
        if "under way" in line and sum("under way" in text for text in seen) == 3:
            coordinator.kill()
        if "going on with 3 workers" in line:
            (tmp_path / "kill").touch()
        if "going on with 2 workers" in line:
            (tmp_path / "enough").touch()
    output = "".join(seen)
    assert launched.wait(TIMEOUT_S) == 0, output
    assert output.count("ended with 2 and 2") == 2, output
    assert re.search(r"warning: coordinator .* was killed by SIGKILL; starting it again", output), output
