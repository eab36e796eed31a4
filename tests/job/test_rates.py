"""What the job finds out about the network interfaces decides who reduces how much."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.netlab import Lab, missing
from tests.support.cluster import program_path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import jax
import numpy as np
import jaxhetero

jaxhetero.initialize()
bucket = np.ones(2**20, np.float32)
total = jax.jit(jaxhetero.psum)
for _ in range(8):
    assert (np.asarray(total(bucket)) == jaxhetero.size()).all()
jaxhetero.shutdown()
"""
needs_namespaces = pytest.mark.skipif(
    missing() is not None and os.environ.get("CI") != "true", reason=f"no network namespaces: {missing()}"
)


def start_job(lab: Lab, reducers: list[str], worker: list[str], **settings: str) -> list[subprocess.Popen[str]]:
    """A job on the hosts of a lab: this program on w0, w1, ..., and a reducer on each of these; the reducers first."""
    workers = sum(host.name.startswith("w") for host in lab)
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "JAX_PLATFORMS": "cpu",
        "JAXHETERO_WORKER_COUNT": str(workers),
        "JAXHETERO_REDUCER_COUNT": str(len(reducers)),
        "JAXHETERO_COORDINATOR": f"{lab['w0'].address}:{lab['w0'].free_port()}",
        "JAXHETERO_TOKEN": secrets.token_hex(16),
        "JAXHETERO_START_TIMEOUT_MS": "60000",
        "JAXHETERO_COMPRESS": "never",  # every byte counts
        **settings,
    }
    jobs = [(name, ["-m", "jaxhetero", "reducer"], {}) for name in reducers]
    jobs += [(f"w{rank}", worker, {"JAXHETERO_RANK": str(rank)}) for rank in range(workers)]
    return [
        lab[name].start(
            [sys.executable, *command],
            env={**settings, "JAXHETERO_HOST": lab[name].address, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name, command, own in jobs
    ]


def run_job(lab: Lab, reducers: list[str], **settings: str) -> None:
    processes = start_job(lab, reducers, ["-c", PROGRAM], **settings)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors


@needs_namespaces
@pytest.mark.parametrize("measure_rates", [True, False])
def test_slow_reducer_gets_a_smaller_share(measure_rates: bool) -> None:
    rates = {"w0": "100mbit", "w1": "100mbit", "fast": "100mbit", "slow": "40mbit"}
    with Lab(rates) as lab:
        run_job(lab, ["fast", "slow"], JAXHETERO_MEASURE_RATES=str(int(measure_rates)))
        share = lab["slow"].counters().received_bytes / lab["fast"].counters().received_bytes
    # 40 / 100 of the program's bytes. Of what the measurement itself takes, both get the same.
    assert share < 0.7 if measure_rates else share > 0.9


@needs_namespaces
@pytest.mark.parametrize("slow", [False, True], ids=["equal", "unequal"])
def test_two_interfaces_share_the_bytes(slow: bool) -> None:
    hosts = ["w0", "w1", "r0", "r1"]
    with Lab(dict.fromkeys(hosts, "100mbit"), nic_count=2) as lab:
        for host in hosts if slow else []:
            lab[host].slow("40mbit", nic=1)
        before = {host: lab[host].nic_counters() for host in hosts}
        run_job(lab, ["r0", "r1"], JAXHETERO_INTERFACE="eth0, eth1", JAXHETERO_STRANDS="2")
        for host in hosts:
            first, second = (late - early for late, early in zip(lab[host].nic_counters(), before[host], strict=True))
            for share in (second.sent_bytes / first.sent_bytes, second.received_bytes / first.received_bytes):
                assert share < 0.75 if slow else 0.9 < share < 1.1, host


def wait_for(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    while (found := re.search(pattern, line := process.stdout.readline())) is None:
        assert line, f"the process ended before it said {pattern!r}"
    return found


WATCH = """
import json, subprocess, sys, urllib.request

with urllib.request.urlopen(sys.argv[1], timeout=10) as page:
    metrics = page.read().decode()
status = subprocess.run([sys.executable, "-m", "jaxhetero", "status", "--json"], stdout=subprocess.PIPE, check=True)
rates = {process["name"]: process["rate_percent"] for process in json.loads(status.stdout)["processes"]}
slow = [line for line in metrics.splitlines() if line.startswith("jaxhetero_slow_")]
print(json.dumps({"slow": slow, "rates": rates}))
"""


def to_be_watched(lab: Lab) -> dict[str, str]:
    """Settings of a job of which watched() tells."""
    return {
        "JAXHETERO_COORDINATOR": f"{lab['w0'].address}:{lab['w0'].free_port()}",
        "JAXHETERO_TOKEN": secrets.token_hex(16),
        "JAXHETERO_METRICS_PORT": str(lab["w0"].free_port()),
    }


def watched(lab: Lab, settings: dict[str, str]) -> Any:
    """The metrics of rank 0 that tell of slow processes, and the rates in the status, by process."""
    metrics = f"http://{lab['w0'].address}:{settings['JAXHETERO_METRICS_PORT']}/metrics"
    watch = lab["w0"].start([sys.executable, "-c", WATCH, metrics], env=settings, stdout=subprocess.PIPE)
    return json.loads(watch.communicate(timeout=60)[0])


@needs_namespaces
@pytest.mark.parametrize("dies", [False, True], ids=["stays", "dies"])
def test_plan_follows_a_reducer_that_becomes_slow(dies: bool, tmp_path: Path) -> None:
    """And then it is faster again, or dies while the plan changes. Every round checks its bits."""
    rates = {"w0": "100mbit", "w1": "100mbit", "r0": "100mbit", "r1": "100mbit", "r2": "100mbit"}
    with Lab(rates) as lab:
        # It ends by itself only if the plan is never followed.
        program = [str(program_path("rates_loop.py")), "2", "400", str(tmp_path / "end")]
        own = to_be_watched(lab)
        processes = start_job(lab, ["r0", "r1", "r2"], program, **own)
        reducers, (rank_0, rank_1) = processes[:3], processes[3:]
        wait_for(rank_0, "round 2 ")
        lab["r1"].slow("25mbit")
        # Before that it may be found to be a little slower than others, which it is not.
        while (slow := int(wait_for(rank_0, r"host r1\) carries (\d+) %")[1])) > 60:
            pass
        if dies:
            reducers[1].kill()
            wait_for(rank_0, "was lost")
        else:
            (found,) = watched(lab, own)["slow"]
            assert re.fullmatch(r'jaxhetero_slow_reducer\{.*slow_reducer="\d".*\} 0\.\d+', found)
            lab["r1"].restore()
            # At first it may be found to be faster by less than it is, or another one to be slower.
            while (found := wait_for(rank_0, r"rates .* have changed: (.*host r1\) carries (\d+) %)?"))[1]:
                slow, earlier = int(found[2]), slow
                assert slow >= earlier
                if slow > 60:
                    break
        (tmp_path / "end").touch()
        results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in (rank_0, rank_1)]
        for reducer in reducers:
            reducer.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, -9 if dies else 0, 0, 0, 0]
    assert results[0]["digest"] == results[1]["digest"]
    # The reducer may die before the rounds are named, and then the plan follows the loss alone.
    assert all(result["metrics"]["rate_change_count"] >= (0 if dies else 2) for result in results)
    assert all(result["metrics"]["view_count"] == int(dies) for result in results)


@needs_namespaces
def test_plan_follows_a_worker_with_a_reducer_inside_that_becomes_slow(tmp_path: Path) -> None:
    """Its reducer has less then. A trial finds out that it is as fast as before. Every round checks its bits."""
    hosts = [f"w{rank}" for rank in range(4)]
    with Lab(dict.fromkeys(hosts, "100mbit")) as lab:
        program = [str(program_path("rates_loop.py")), "2", "400", str(tmp_path / "end")]
        processes = start_job(lab, [], program, JAXHETERO_COLOCATED_COUNT="4")
        wait_for(processes[0], "round 10 ")
        lab["w1"].slow("25mbit")
        # The first word may be of a time when it was slow in part; the next one corrects it.
        while int(wait_for(processes[0], r"reducer \d \(host w1\) carries (\d+) % of what the fastest does")[1]) > 40:
            pass
        lab["w1"].restore()
        wait_for(processes[0], r"reducer \d \(host w1\) has its first share again")
        wait_for(processes[0], r"reducer \d \(host w1\) is as fast as before")
        (tmp_path / "end").touch()
        results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert len({result["digest"] for result in results}) == 1
    assert all(result["metrics"]["rate_change_count"] >= 2 for result in results)


@needs_namespaces
def test_plan_finds_a_worker_with_a_reducer_inside_that_is_slow_from_the_start(tmp_path: Path) -> None:
    """A trial does: the start has found all workers to be as slow as that one."""
    rates = {f"w{rank}": "25mbit" if rank == 1 else "100mbit" for rank in range(4)}
    with Lab(rates) as lab:
        program = [str(program_path("rates_loop.py")), "1", "400", str(tmp_path / "end")]
        processes = start_job(lab, [], program, JAXHETERO_COLOCATED_COUNT="4")
        wait_for(processes[0], r"reducer \d \(host w1\) has half of its share, to see whether rounds, .* are faster")
        wait_for(processes[0], r"rounds are faster: reducer \d \(host w1\) keeps half of its share")
        (tmp_path / "end").touch()
        results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert len({result["digest"] for result in results}) == 1


@needs_namespaces
def test_a_worker_that_becomes_slow_is_named(tmp_path: Path) -> None:
    """In the log, by the metrics and in the status; and no more once it is as fast as before. The plan stays."""
    rates = {"w0": "100mbit", "w1": "100mbit", "r0": "100mbit", "r1": "100mbit"}
    with Lab(rates) as lab:
        own = to_be_watched(lab)
        program = [str(program_path("rates_loop.py")), "2", "400", str(tmp_path / "end")]
        processes = start_job(lab, ["r0", "r1"], program, **own)
        wait_for(processes[2], "round 20 ")
        lab["w1"].slow("25mbit")
        wait_for(processes[2], r"rank 1 \(host w1\) has become slow: all rounds wait for what it sends, at \d\d % of")
        told = watched(lab, own)
        lab["w1"].restore()
        wait_for(processes[2], r"rank 1 \(host w1\) is no longer slow")
        (tmp_path / "end").touch()
        result = json.loads(processes[2].communicate(timeout=120)[0].splitlines()[-1])
        for process in processes:
            process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert re.fullmatch(r'jaxhetero_slow_worker\{.*rank="0".*slow_rank="1"\} 1(\.0)?', "\n".join(told["slow"]))
    assert 0 < told["rates"]["rank 1"] < 67
    assert told["rates"]["rank 0"] == 0
    assert result["metrics"]["rate_change_count"] == 0
