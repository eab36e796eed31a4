"""What losses, joins and the holding back of totals cost an elastic job, against its bars.

    python -m tests.long.elastic_bars deaths --workers 3 8   # the step in which a worker is killed
    python -m tests.long.elastic_bars join                   # the pause while one gets 400 MB at 1 Gbit/s
    python -m tests.long.elastic_bars overhead               # rounds in which nothing fails, beside a fixed job

The last two need the lab. On a machine that does other things, steps are longer by chance.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import tyro

from lab.netlab import Host, Lab
from tests.support.cluster import ROOT, Cluster, program_path

STEP_S = 0.02


def deaths(workers: tuple[int, int] = (3, 8), steps_between: int = 25) -> None:
    """How much longer the slowest step is in which a worker is killed, than the median one; bars: 100 and 300 ms.

    Args:
      workers: the fewest and the most workers of a job; each job loses one after the other, until two are left.
      steps_between: how many steps after each other.
    """
    longer_ms: list[float] = []
    for count in range(workers[0], workers[1] + 1):
        found = _lose_one_by_one(count, steps_between)
        print(json.dumps({"workers": count, "longer_ms": [round(each) for each in found]}), flush=True)
        longer_ms += found
    summary = {"deaths": len(longer_ms), "median_ms": statistics.median(longer_ms), "most_ms": max(longer_ms)}
    print(json.dumps(summary))


def _lose_one_by_one(workers: int, steps_between: int) -> list[float]:
    steps = (workers - 1) * steps_between + 20
    with Cluster(workers, 2, {"JAXHETERO_ELASTIC": f"2:{workers}"}) as cluster:
        cluster.start_coordinator()
        cluster.start_reducers()
        for rank in range(workers):
            arguments = (str(steps), str(STEP_S), "0")
            cluster.start_program(f"worker {rank}", "elastic_loop.py", *arguments, JAXHETERO_RANK=str(rank))
        for rank in range(workers - 1, 1, -1):
            cluster.wait_for_output("worker 0", f"step {(workers - rank) * steps_between} ")
            cluster.process(f"worker {rank}").kill()
        results = [cluster.wait(f"worker {rank}").result for rank in (0, 1)]
    assert results[0]["digest"] == results[1]["digest"]
    assert all(result["compiled"] == 0 for result in results)
    history = [results[0]["history"][str(step)] for step in range(steps)]
    longer = []
    for step in range(1, steps):
        if min(map(len, history[step].values())) < min(map(len, history[step - 1].values())):
            slowest = max(max(result["times_s"][step - 1 : step + 2]) for result in results)
            longer.append(1000 * (slowest - statistics.median(results[0]["times_s"])))
    assert len(longer) == workers - 2, "not every death has ended in a step of its own"
    return longer


def join(megabytes: int = 400, rate: str = "1gbit", workers: int = 3) -> None:
    """The pause of the others while a worker gets the state, over the state's size divided by the rate; bar: 1.15.

    Args:
      megabytes: the size of the state.
      rate: of each host.
      workers: how many give it.
    """
    rates = {f"w{rank}": rate for rank in range(workers + 1)} | {"r0": rate, "c0": rate}
    with Lab(rates) as lab, LabJob(lab, workers, 1, f"2:{workers + 1}").running() as job:
        # The state is compared, copied and sent: what it holds does not matter.
        arguments, size = ("150", "0.1", "0"), {"BALLAST_BYTES": str(megabytes * 1_000_000)}
        for rank in range(workers):
            job.start_worker(rank, "elastic_loop.py", *arguments, **size)
        time.sleep(5)
        job.start_worker(workers, "elastic_loop.py", *arguments, **size)
        results = [job.result(f"w{rank}") for rank in range(workers + 1)]
        bits = float(lab["w0"].rate.bits_per_s)
    ideal_s = 8e6 * megabytes / bits
    times = results[0]["times_s"]
    pause_s = max(times) - statistics.median(times)
    found = {"ideal_s": ideal_s, "pause_s": pause_s, "ratio": pause_s / ideal_s, "compiled": results[0]["compiled"]}
    print(json.dumps(found))


def overhead(
    sizes: Annotated[list[int], tyro.conf.arg(metavar="BYTES...")] = [4096, 16 << 20],  # noqa: B006
    rate: str = "200mbit",
    rounds: int = 30,
    turns: int = 3,
) -> None:
    """The median time of a round of an elastic job over that of a fixed one; bars: 1.05 for 4 KiB, 1.005 for 16 MiB.

    Args:
      sizes: of the bucket.
      rate: of each host.
      rounds: of each job.
      turns: how often each job runs; they take turns.
    """
    for size in sizes:
        times: dict[str, list[float]] = {"": [], "2:2": []}
        for _ in range(turns):
            for elastic, medians in times.items():
                medians.append(_round_s(size, rate, rounds, elastic))
        fixed, elastic_s = (min(each) for each in times.values())
        found = {"bytes": size, "fixed_ms": 1000 * fixed, "elastic_ms": 1000 * elastic_s, "ratio": elastic_s / fixed}
        print(json.dumps(found), flush=True)


def _round_s(size: int, rate: str, rounds: int, elastic: str) -> float:
    with Lab(dict.fromkeys(["w0", "w1", "r0", "r1", "c0"], rate)) as lab, LabJob(lab, 2, 2, elastic).running() as job:
        for rank in range(2):
            job.start_worker(rank, "round_times.py", str(size), str(rounds))
        return max(float(job.result(f"w{rank}")["median_s"]) for rank in range(2))


class LabJob:
    """The processes of a job, each on a host of its own."""

    def __init__(self, lab: Lab, workers: int, reducers: int, elastic: str, **settings: str) -> None:
        self._lab, self._reducers, self._elastic = lab, reducers, elastic
        host = "c0" if elastic else "w0"
        self._settings = {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAXHETERO_COORDINATOR": f"{lab[host].address}:{lab[host].free_port()}",
            "JAXHETERO_TOKEN": secrets.token_hex(16),
            "JAXHETERO_WORKER_COUNT": str(workers),
            "JAXHETERO_REDUCER_COUNT": str(reducers),
            "JAXHETERO_ELASTIC": elastic,
            "JAXHETERO_COMPRESS": "never",  # an elastic job sends no codes
            **settings,
        }
        self._processes: dict[str, subprocess.Popen[str]] = {}

    @contextmanager
    def running(self) -> Iterator[LabJob]:
        if self._elastic:
            self._start(self._lab["c0"], "c0", ["-m", "jaxhetero", "coordinator"])
        for index in range(self._reducers):
            self._start(self._lab[f"r{index}"], f"r{index}", ["-m", "jaxhetero", "reducer"])
        try:
            yield self
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()

    def start_worker(self, rank: int, program: str, *arguments: str, host: str = "", **settings: str) -> None:
        command = [str(program_path(program)), *arguments]
        self._start(self._lab[host or f"w{rank}"], f"w{rank}", command, JAXHETERO_RANK=str(rank), **settings)

    def _start(self, host: Host, name: str, command: list[str], **settings: str) -> None:
        env = {**self._settings, "JAXHETERO_HOST": host.address, **settings}
        self._processes[name] = host.start([sys.executable, *command], env=env, stdout=subprocess.PIPE)

    def output(self, name: str) -> subprocess.Popen[str]:
        """The process, whose lines can be read before its result."""
        return self._processes[name]

    def result(self, name: str) -> Any:
        process = self._processes[name]
        assert process.stdout is not None
        output = process.stdout.read()  # communicate() would leave out what was read ahead with earlier lines
        assert process.wait(timeout=600) == 0, output
        return json.loads(output.splitlines()[-1])


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"deaths": deaths, "join": join, "overhead": overhead})
