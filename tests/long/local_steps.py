"""What local_steps costs a step between hosts with little network.

    python -m tests.long.local_steps

8 workers and 8 reducers at 20 Mbit/s, in the lab.
"""

from __future__ import annotations

import json

import tyro

from lab.netlab import Lab
from tests.long.elastic_bars import LabJob


def speed(
    workers: int = 8,
    rate: str = "20mbit",
    megabytes: float = 2,
    step_s: float = 0.1,
    steps: int = 256,
    every: int = 128,
    fragments: int = 8,
    overlap: int = 8,
) -> None:
    """The time of a step over that without communication, and the bytes over those of a sum; bars: 1.03 and 0.01.

    Args:
      workers: each with a reducer, all on hosts of their own.
      rate: of each host.
      megabytes: of weights.
      step_s: the time that a step computes.
      steps: how many, with and without exchanges.
      every, fragments, overlap: of local_steps.
    """
    hosts = [f"{kind}{number}" for kind in "wr" for number in range(workers)]
    with Lab(dict.fromkeys(hosts, rate)) as lab, LabJob(lab, workers, workers, "").running() as job:
        arguments = list(map(str, (megabytes, step_s, steps, every, fragments, overlap)))
        for rank in range(workers):
            job.start_worker(rank, "local_speed.py", *arguments)
        results = [job.result(f"w{rank}") for rank in range(workers)]
    ratio = max(result["local_s"] for result in results) / max(result["alone_s"] for result in results)
    print(json.dumps({"step": ratio, "sent_of_a_sum": max(result["sent_of_a_sum"] for result in results)}))


if __name__ == "__main__":
    tyro.cli(speed)
