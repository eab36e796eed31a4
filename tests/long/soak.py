"""Runs a job at full load for a long time, and watches what its processes hold: memory, file descriptors, speed.

    python -m tests.long.soak --minutes 60

Every total is checked. Memory is a process's resident set (RSS). What a process needs is there after the first tenth of
the time; from then on nothing should grow. How fast the processors themselves were is measured beside it, since on a
shared machine that changes from minute to minute.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import tyro

from tests.support.cluster import Cluster


@dataclass
class Holdings:
    """What one process had at each look."""

    rss_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self, process: psutil.Process) -> None:
        with process.oneshot():
            self.rss_bytes.append(process.memory_info().rss)
            self.descriptors.append(process.num_fds())
            self.threads.append(process.num_threads())

    @property
    def settled(self) -> int:
        """The first look after a tenth of them."""
        return len(self.rss_bytes) // 10

    @property
    def growth_bytes(self) -> int:
        """From the first tenth to the last one, median to median."""
        span = max(1, self.settled)
        first = self.rss_bytes[self.settled : self.settled + span]
        return int(statistics.median(self.rss_bytes[-span:]) - statistics.median(first))

    @property
    def most_descriptors_more(self) -> int:
        """Than when it had settled."""
        return max(self.descriptors[self.settled :]) - self.descriptors[self.settled]

    def __str__(self) -> str:
        span = max(1, self.settled)
        settled, last = (
            f"{statistics.median(part) / 2**20:.1f}, {min(part) / 2**20:.1f}"
            for part in (self.rss_bytes[self.settled : self.settled + span], self.rss_bytes[-span:])
        )
        return (
            f"{settled} | {last} | {self.descriptors[self.settled]} | {max(self.descriptors[self.settled :])} | "
            f"{max(self.threads)}"
        )


@dataclass
class Processors:
    """How fast they were at each look."""

    speeds: list[float] = field(default_factory=list)
    """Loops of fixed work in a second of this thread's processor time."""
    times: list[Any] = field(default_factory=list)
    """``psutil.cpu_times()``."""

    def look(self) -> None:
        begin = time.thread_time()
        sum(range(300_000))
        self.speeds.append(1 / (time.thread_time() - begin))
        self.times.append(psutil.cpu_times())

    @property
    def stolen(self) -> float:
        """The part of all processor time that the machine's host gave to others."""
        first, last = self.times[0], self.times[-1]
        return float((last.steal - first.steal) / max(sum(last) - sum(first), 1e-9))


@dataclass
class Soak:
    processes: dict[str, Holdings]
    processors: Processors
    results: list[dict[str, Any]]
    """What each worker printed."""


def soak(seconds: float, workers: int = 2, reducers: int = 2, look_every_s: float = 5) -> Soak:
    with TemporaryDirectory() as directory, Cluster(workers, reducers) as cluster:
        end = Path(directory) / "end"
        cluster.start_reducers()
        cluster.start_workers("soak.py", str(end))
        for rank in range(workers):
            cluster.wait_for_output(f"worker {rank}", "running", timeout_s=300)
        processes = {name: psutil.Process(cluster.process(name).pid) for name in cluster.names()}
        holdings, processors = {name: Holdings() for name in processes}, Processors()
        for _ in range(max(1, round(seconds / look_every_s))):
            for name, process in processes.items():
                holdings[name].look(process)
            processors.look()
            time.sleep(look_every_s)
        end.touch()
        results = [outcome.result for outcome in cluster.wait_workers()]
        for outcome in cluster.wait_reducers():
            assert outcome.code == 0, outcome.errors
    return Soak(holdings, processors, results)


def first_and_last_tenth(values: list[float]) -> tuple[float, float]:
    tenth = max(1, len(values) // 10)
    return statistics.median(values[:tenth]), statistics.median(values[-tenth:])


def main(minutes: float = 60, workers: int = 2, reducers: int = 2) -> None:
    """
    Args:
        minutes: How long.
        workers: Processes that train.
        reducers: Dedicated ones.
    """
    result = soak(60 * minutes, workers, reducers)
    print("RSS in MiB: the median and the least of the second tenth of the time, and of the last one")
    print("| process | settled | at the end | descriptors settled | most | threads |")
    print("|---|---|---|---|---|---|")
    for name, holdings in result.processes.items():
        print(f"| {name} | {holdings} |")
    worker = result.results[0]
    first, last = first_and_last_tenth(worker["rates"])
    first_speed, last_speed = first_and_last_tenth(result.processors.speeds)
    print(
        f"{worker['steps']} steps, {worker['rounds']} rounds, every total right; "
        f"{first:.2f} steps/s in the first tenth, {last:.2f} in the last, {last / first:.3f} times as many; "
        f"a fixed loop beside them went {last_speed / first_speed:.3f} times as fast; "
        f"{100 * result.processors.stolen:.1f} % of the processors' time was taken by the host"
    )
    tenth = max(1, len(worker["rates"]) // 10)
    for rank, worker in enumerate(result.results):
        heap = worker["allocated"]
        first, last = (statistics.median(part) / 2**20 for part in (heap[tenth : 2 * tenth], heap[-tenth:]))
        print(f"worker {rank}: {first:.3f} MiB of heap allocated in the second tenth, {last:.3f} in the last")


if __name__ == "__main__":
    tyro.cli(main)
