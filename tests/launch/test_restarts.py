"""`jaxhetero launch --max-restarts`: after which failures it starts a job anew, how often, what it says and keeps."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, free_port
from tests.support.launcher import Run, Start

_TOLD = "echo restart $JAXHETERO_RESTART_COUNT at $JAXHETERO_COORDINATOR, ${JAXHETERO_TOKEN%%${JAXHETERO_TOKEN#????}}; "
_BY_COUNT = "case $JAXHETERO_RESTART_COUNT in {}) {};; *) {};; esac"


@pytest.mark.parametrize(
    ("script", "code", "starts", "words"),
    [
        (
            _BY_COUNT.format(1, "exit 0", "exit 3"),
            0,
            2,
            r"restart 1 of 2, because worker \d \(pid \d+\) exited with code 3",
        ),
        (
            _BY_COUNT.format(2, "exit 0", "kill -KILL $$"),
            0,
            3,
            r"restart 2 of 2, because worker \d .* killed by SIGKILL",
        ),
        ("exit $((3 + JAXHETERO_RESTART_COUNT))", 5, 3, "not restarted: that was restart 2 of 2"),
        (
            "exit 2",
            2,
            1,
            r"not restarted: worker \d exited with code 2, which stands for a wrong command line or setting",
        ),
        ("no-such-command", 127, 1, r"not restarted: worker \d exited with code 127"),
        ("echo jaxhetero.errors.ConfigError: x; exit 1", 1, 1, r"not restarted: worker \d raised ConfigError"),
    ],
)
def test_what_deserves_a_restart(launch: Run, tmp_path: Path, script: str, code: int, starts: int, words: str) -> None:
    arguments = ("--workers", "2", "--max-restarts", "2", "--", "sh", "-c", _TOLD + script)
    done = launch(*arguments, env=os.environ | {"JAXHETERO_RESTART_COUNT": "7"})
    assert done.returncode == code, done.stderr
    assert re.search(words, done.stderr), done.stderr
    logs = [tmp_path / "logs", *(tmp_path / "logs" / f"restart-{number}" for number in range(1, starts))]
    told = [log.joinpath("worker-0.log").read_text().splitlines()[0] for log in logs]
    assert [line.split()[1] for line in told] == [str(number) for number in range(starts)]
    assert len({line.split(",")[1] for line in told}) == starts, "a token of its own for each start"
    assert not (tmp_path / "logs" / f"restart-{starts}").exists()
    assert [f"logs in {log.relative_to(tmp_path)}\n" in done.stderr for log in logs] == [True] * starts


def test_without_max_restarts_there_is_none(launch: Run) -> None:
    done = launch("--workers", "1", "--", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert "restart" not in done.stderr


def test_a_given_port_is_used_again(launch: Run) -> None:
    address = ("--coordinator-port", str(free_port()))
    done = launch("--workers", "1", "--max-restarts", "1", *address, "--", "sh", "-c", _TOLD + "exit 3")
    assert done.returncode == 3
    assert re.findall(r"restart (\d) at 127.0.0.1:(\d+)", done.stdout) == [("0", address[1]), ("1", address[1])]


def test_workers_that_have_ended_well_are_not_started_again(launch: Run) -> None:
    """Though a reducer, which meets nobody here, fails after them."""
    arguments = ("--workers", "1", "--reducers", "1", "--start-timeout-ms", "1", "--max-restarts", "1")
    wait = "until grep -q StartTimeout logs/reducer-0.log; do sleep 0.05; done"
    done = launch(*arguments, "--", "sh", "-c", wait)
    assert done.returncode == 1
    assert "not restarted: every worker has done its work" in done.stderr


@pytest.mark.parametrize(("script", "code"), [("exec sleep 600", 130), ("[ $JAXHETERO_RANK = 1 ] || exit 3", 3)])
def test_ctrl_c_is_the_end(start_launch: Start, script: str, code: int) -> None:
    """Also while what a failure has left is being stopped."""
    stubborn = "trap '' TERM; trap 'exit 0' INT; echo ready; while :; do sleep 0.05; done"
    process = start_launch(
        "--workers", "2", "--max-restarts", "3", "--", "sh", "-c", f"echo ready; {script}; {stubborn}"
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if code == 130:
        assert "ready" in process.stdout.readline()
    else:
        lines = iter(process.stderr.readline, "")
        assert any("stopping 1 other process" in line for line in lines)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "restart 1" not in err
    assert ("not restarted: got SIGINT" in err) == (code == 3)


_LATE = """
import os, pathlib, signal, time
import jax.numpy as jnp
import jaxhetero
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.05)
is_back = os.environ["JAXHETERO_RANK"] == "1" and os.path.exists("died")
if is_back:
    pathlib.Path("back").touch()
    wait_for("over")
jaxhetero.initialize()
total, place = jnp.zeros(3), 0
while place < 20:
    total, place, team = jaxhetero.elastic.gate(total, place)
    if place == 10 and jaxhetero.rank() == 1:
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if place == 19:
        wait_for("back")
    total = total + jaxhetero.pmean(jnp.ones(3))
    place += 1
total.block_until_ready()
jaxhetero.shutdown()
pathlib.Path("over").touch()
"""


def test_an_elastic_job_that_is_done_waits_for_nobody_who_comes_back(launch: Run, tmp_path: Path) -> None:
    """Such a worker would look for the others for as long as it may take to start."""
    (tmp_path / "late.py").write_text(_LATE)
    arguments = ("--workers", "3", "--elastic", "2:3", "--start-timeout-ms", "3600000")
    done = launch(*arguments, "--", sys.executable, "late.py", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "worker 1 has come back too late: the others have done their work" in done.stderr
