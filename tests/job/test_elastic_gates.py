"""Workers of an elastic job come and leave at gates: all have the same bits, and survivors compile nothing for it."""

from __future__ import annotations

import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxhetero.config import host_name
from jaxhetero.doctor.status import read_status
from jaxhetero.elastic.handover import read_head
from jaxhetero.errors import MismatchError
from tests.long.elastic_chaos import run_job
from tests.support.cluster import Cluster
from tests.support.elastic_oracle import digest, replay
from tests.support.launcher import TIMEOUT_S, Start

STEPS, PAUSE_S = 400, 0.02


def start(workers: int, reducers: int = 1, handover_s: float | list[float] = 0.0, **settings: str) -> Cluster:
    """``handover_s``: of all, or of each rank."""
    settings = {"JAXHETERO_ELASTIC": f"2:{workers + 1}", "JAXHETERO_LOST_AFTER_MS": "3000", **settings}
    cluster = Cluster(workers, reducers, settings)
    cluster.start_coordinator()
    cluster.start_reducers()
    for rank in range(workers):
        seconds = handover_s[rank] if isinstance(handover_s, list) else handover_s
        start_worker(cluster, f"worker {rank}", rank, seconds, KEY="7")
    cluster.wait_for_output("worker 0", "step 20 ")
    return cluster


def start_worker(cluster: Cluster, name: str, rank: int, handover_s: float = 0.0, **settings: str) -> None:
    arguments = (str(STEPS), str(PAUSE_S), str(handover_s))
    cluster.start_program(name, "elastic_loop.py", *arguments, JAXHETERO_RANK=str(rank), **settings)


def check(cluster: Cluster, names: Iterable[str], coordinator: str = "coordinator") -> list[Any]:
    """All of them end well, with the bits of a replay of what they say has happened; nobody compiles in the loop."""
    results = [cluster.wait(name).result for name in names]
    longest = max((result["history"] for result in results), key=len)
    assert [int(step) for step in longest] == list(range(STEPS))
    expected = digest(replay(list(longest.values())))
    for result in results:
        assert result["digest"] == expected
        assert result["compiled"] == 0
        assert result["key"] == [0, 7]
        assert all(longest[step] == ranks for step, ranks in result["history"].items())
        assert all(results[0]["teams"][step] == ranks for step, ranks in result["teams"].items())
    assert cluster.wait(coordinator).code == 0
    return results


@pytest.mark.parametrize(("workers", "reducers"), [(3, 1), (4, 0)], ids=["dedicated reducers", "reducers inside"])
def test_a_worker_is_killed_and_comes_back(workers: int, reducers: int) -> None:
    with start(workers, reducers) as cluster:
        cluster.kill("worker 1")
        cluster.wait_for_output("worker 0", "of [0, 2")
        start_worker(cluster, "worker 1 again", 1)
        cluster.wait_for_output("worker 1 again", "of [0, 1, 2")
        check(cluster, ["worker 0", "worker 2", "worker 1 again"])


def test_workers_come_and_leave() -> None:
    """One more than at the start; one leaves by SIGTERM, and no round lacks it before."""
    with start(3) as cluster:
        start_worker(cluster, "worker 3", 3)
        cluster.wait_for_output("worker 0", "of [0, 1, 2, 3]")
        cluster.process("worker 2").send_signal(signal.SIGTERM)
        assert cluster.wait("worker 2").code == 0
        results = check(cluster, ["worker 0", "worker 1", "worker 3"])
        for step, ranks in results[0]["history"].items():
            assert all(part == results[0]["teams"][step] for part in ranks.values())


def test_what_others_say_of_the_place_runs_no_code() -> None:
    place = (3, [0.5, float("inf")], {"name": (True, None, b"x", {1, 2})})
    assert read_head(pickle.dumps((place, []))) == (place, [])
    with pytest.raises(MismatchError, match="the place of the others has a pathlib"):
        read_head(pickle.dumps((Path("x"), [])))


def test_one_that_comes_leaves_by_itself() -> None:
    """It knows that it is to leave, as a program that has got SIGTERM does."""
    with start(2) as cluster:
        start_worker(cluster, "worker 2", 2, LEAVES="1")
        assert cluster.wait("worker 2").code == 0
        check(cluster, ["worker 0", "worker 1"])


def test_one_that_comes_is_killed_meanwhile() -> None:
    """Once before it is let in, and once while it gets the state."""
    with start(2, handover_s=1.0) as cluster:
        start_worker(cluster, "worker 2", 2)
        cluster.kill("worker 2")
        start_worker(cluster, "worker 2 again", 2)
        cluster.wait_for_output("worker 0", "hands over")
        cluster.kill("worker 2 again")
        check(cluster, ["worker 0", "worker 1"])


def test_one_that_comes_is_killed_when_only_some_have_given_the_state() -> None:
    """They stand at the same gate all the same: later ones are let in, without a worker that waits for another one."""
    with start(2, handover_s=[0.0, 1.0]) as cluster:
        start_worker(cluster, "worker 2", 2)
        cluster.wait_for_output("worker 1", "hands over")
        cluster.kill("worker 2")
        start_worker(cluster, "worker 2 again", 2)
        cluster.wait_for_output("worker 0", "of [0, 1, 2]")
        check(cluster, ["worker 0", "worker 1", "worker 2 again"])


def test_one_that_does_not_come_to_the_gate_is_done_without(tmp_path: Path) -> None:
    """All others meet there. It lives, and none of its rounds runs."""
    goes_on, comes = tmp_path / "goes on", tmp_path / "comes"
    settings = {"JAXHETERO_ELASTIC": "2:3", "JAXHETERO_TIMEOUT_MS": "3000"}
    with Cluster(2, 1, settings) as cluster:
        cluster.start_coordinator()
        cluster.start_reducers()
        start_worker(cluster, "worker 0", 0, KEY="7", GOES_ON_WITH=str(goes_on))
        start_worker(cluster, "worker 1", 1, KEY="7", GOES_ON_WITH=str(tmp_path / "never"))
        start_worker(cluster, "worker 2", 2, COMES_WITH=str(comes))
        for name, text in (("worker 2", "compiled"), ("worker 0", "behind"), ("worker 1", "behind")):
            cluster.wait_for_output(name, text)
        comes.touch()
        cluster.wait_for_output("worker 2", "comes")
        goes_on.touch()
        cluster.wait_for_error("worker 0", "rank 1 (host")
        cluster.wait_for_output("worker 2", "of [0, 2]")
        check(cluster, ["worker 0", "worker 2"])


def test_reducers_know_the_hosts_of_those_who_come() -> None:
    """Workers say of whom a round waits what reducers have told them."""
    with start(2, JAXHETERO_TIMEOUT_MS="4000", JAXHETERO_LOST_AFTER_MS="60000") as cluster:
        start_worker(cluster, "worker 2", 2)
        cluster.wait_for_output("worker 2", "step ")
        cluster.process("worker 2").send_signal(signal.SIGSTOP)
        cluster.wait_for_error("worker 0", f"waiting for rank 2 (host {host_name()}) ")
        cluster.process("worker 2").send_signal(signal.SIGCONT)
        check(cluster, ["worker 0", "worker 1", "worker 2"])


def test_one_that_never_takes_the_state_is_done_without() -> None:
    """It lives, and all that was sent has come."""
    with start(2, JAXHETERO_TIMEOUT_MS="3000") as cluster:
        start_worker(cluster, "worker 2", 2, NEVER_TAKES="1")
        cluster.wait_for_error("worker 0", "rank 2 (host")
        cluster.wait_for_error("coordinator", "its program has not taken the state of the others for 2")
        check(cluster, ["worker 0", "worker 1"])


@pytest.mark.parametrize("victim", ["worker 0", "worker 2"])
def test_one_that_gives_the_state_is_killed(victim: str) -> None:
    """The others give it anew. Worker 0 is the one that says what the state is."""
    with start(3, handover_s=1.0) as cluster:
        start_worker(cluster, "worker 3", 3)
        cluster.wait_for_output("worker 1", "hands over")
        cluster.kill(victim)
        cluster.wait_for_output("worker 3", "step ")
        check(cluster, [name for name in ("worker 0", "worker 1", "worker 2", "worker 3") if name != victim])


def test_the_coordinator_is_started_again_while_one_waits() -> None:
    with start(2) as cluster:
        cluster.kill("coordinator")
        start_worker(cluster, "worker 2", 2)
        cluster.start_coordinator("coordinator again")
        cluster.wait_for_output("worker 2", "of [0, 1, 2]")
        check(cluster, ["worker 0", "worker 1", "worker 2"], "coordinator again")


@pytest.mark.parametrize("reducers", [1, 0], ids=["dedicated reducers", "reducers inside"])
def test_one_that_comes_waits_for_its_rank(reducers: int) -> None:
    """Until the member with that rank has left, also while another coordinator takes over."""
    with start(3, reducers) as cluster:
        start_worker(cluster, "worker 1 again", 1)
        cluster.wait_for_output("worker 1 again", "compiled")
        status = read_status(cluster.coordinator, cluster.token, seconds=0.1)
        assert (status.worker_count, status.most_workers, status.problems()) == (3, 4, [])
        assert {process.state for process in status.processes if process.is_candidate} == {"waits to come in"}
        cluster.kill("coordinator")
        cluster.start_coordinator("coordinator again")
        cluster.wait_for_error("worker 0", "the coordinator was started again")
        cluster.process("worker 1").send_signal(signal.SIGTERM)
        assert cluster.wait("worker 1").code == 0
        results = check(cluster, ["worker 0", "worker 2", "worker 1 again"], "coordinator again")
        assert results[0]["teams"][str(STEPS - 1)] == [0, 1, 2]


def test_one_with_the_last_reducer_inside_stays() -> None:
    """SIGTERM does not end the job."""
    with start(3, 0, JAXHETERO_COLOCATED_COUNT="1") as cluster:
        cluster.process("worker 0").send_signal(signal.SIGTERM)
        cluster.wait_for_error("coordinator", "rank 0 (host ")
        check(cluster, ["worker 0", "worker 1", "worker 2"])
        log = cluster.wait("coordinator").errors
        assert "wants to leave, and stays until others have come" in log
        assert log.count("view ") == 0, log  # nobody has met for it, again and again


@pytest.mark.parametrize(
    ("what", "said"), [("state", "leaf [1] has other bits"), ("place", "the place is another one")]
)
def test_survivors_who_differ_let_nobody_in(what: str, said: str) -> None:
    with start(2, DIFFERS=what) as cluster:
        start_worker(cluster, "worker 2", 2)
        expected = f"{said} on rank 0 than on rank 1; this worker cannot join them"
        assert expected in cluster.wait("worker 2").exception_line
        cluster.wait_for_output("worker 0", "step 200 of [0, 1]")


def test_many_losses_in_random_order() -> None:
    """Of workers, reducers and the coordinator, while workers come and leave; `tests.long.chaos --elastic` has more."""
    toll = run_job(seed=4, strikes=5)
    assert toll["deaths"] > 0
    assert toll["joins"] > 0


def test_too_few_wait_for_more() -> None:
    with start(2) as cluster:
        cluster.kill("worker 1")
        cluster.wait_for_error("coordinator", "waiting 60000 ms for more")
        start_worker(cluster, "worker 1 again", 1)
        results = check(cluster, ["worker 0", "worker 1 again"])
        alone = [step for step, team in results[0]["teams"].items() if team == [0]]
        assert len(alone) <= 1  # it may have been about to pass


_LOOP = """
import os, signal, time
import jax, jax.numpy as jnp
import jaxhetero

jaxhetero.initialize()
step = jax.jit(lambda x: jaxhetero.pmean(x + 1)).lower(jnp.zeros(3)).compile()
state, place = jnp.zeros(3), 0
while place < 60:
    state, place, team = jaxhetero.elastic.gate(state, place)
    if place == 20 and jaxhetero.rank() == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    state = step(state)
    place += place != 40 or team.size == 3
    time.sleep(0.05)
print("rank", jaxhetero.rank(), "came to", place, "of", team.ranks)
"""


def test_the_launcher_starts_a_lost_worker_again(tmp_path: Path, start_launch: Start) -> None:
    """The others wait for nobody; here they go on until it is back."""
    (tmp_path / "loop.py").write_text(_LOOP)
    command = ["--workers", "3", "--reducers", "1", "--elastic", "2:4", "--", sys.executable, "loop.py"]
    launched = start_launch(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = launched.communicate(timeout=3 * TIMEOUT_S)
    assert launched.returncode == 0, output
    assert re.search(r"warning: worker 1 .* was killed by SIGKILL; the others go on, and it is started again", output)
    assert output.count("came to 60 of (0, 1, 2)") == 3, output
