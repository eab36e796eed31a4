"""What a round takes once an interface has become slower, or as fast as before, over the best possible time.

    python -m tests.long.rates
    python -m tests.long.rates --reducers 2 --inside 8
    python -m tests.long.rates --reducers 0 --inside 8 --at-first w1

8 workers and 8 reducers at 200 Mbit/s, in the lab: first the interface of a reducer goes down to 100 Mbit/s and back,
then that of a worker, which may have a reducer inside; or one is slow from the start, and then as fast as all. After 20
rounds, the bar is 1.05. Another job, whose rates stay, has to have the same bits. On a machine that does other things,
rounds are longer by chance.
"""

from __future__ import annotations

import json
import statistics
import subprocess

import tyro

import jaxhetero
from lab.netlab import Lab, Rate
from tests.long.elastic_bars import LabJob


def follow(
    workers: int = 8,
    reducers: int = 8,
    inside: int = 0,
    rate: str = "200mbit",
    slow: str = "100mbit",
    megabytes: float = 8,
    settle: int = 20,
    measure: int = 10,
    at_first: str | None = None,
) -> None:
    """The median time of rounds over the best possible one of the rates, in every phase; the bar is 1.05.

    Args:
      workers, reducers: each on a host of its own.
      inside: how many workers have a reducer inside.
      rate: of each host.
      slow: of the host that becomes slow.
      megabytes: of the bucket, in float32.
      settle: how many rounds a job has to follow a change.
      measure: how many count after that.
      at_first: the host that is slow from the start.
    """
    hosts = [f"w{number}" for number in range(workers)] + [f"r{number}" for number in range(reducers)]
    rates = dict.fromkeys(hosts, rate)
    if at_first is None:
        phases = [("all", rate)] + [(host, each) for host in ("r0", "w1") if host in hosts for each in (slow, rate)]
    else:
        phases = [(at_first, slow), (at_first, rate)]
        rates[at_first] = slow
    rounds = len(phases) * (settle + measure)
    settings = {"JAXHETERO_COLOCATED_COUNT": str(inside)} if inside else {}
    with Lab(rates) as lab, LabJob(lab, workers, reducers, "", **settings).running() as job:
        for rank in range(workers):
            job.start_worker(rank, "rates_loop.py", str(megabytes), str(rounds))
        output = job.output("w0")
        for host, changed in phases:
            if host != "all":
                rates[host] = changed
                lab[host].slow(changed)
            times = _round_times(output, settle + measure)
            bytes_per_s = {name: Rate.parse(each).bytes_per_s for name, each in rates.items()}
            best_s = jaxhetero.best_time_s(
                int(megabytes * 2**20),
                [each for name, each in bytes_per_s.items() if name.startswith("w")],
                [each for name, each in bytes_per_s.items() if name.startswith("r")],
                inside,
            )
            found = {
                "phase": f"{host} at {changed}",
                "best_ms": round(1000 * best_s),
                "first_ms": round(statistics.median(times[:5])),
                "ratio": round(statistics.median(times[settle:]) / 1000 / best_s, 3),
            }
            print(json.dumps(found), flush=True)
        results = [job.result(f"w{rank}") for rank in range(workers)]
    with Lab(dict.fromkeys(["w0", "w1", "r0"], None)) as lab, LabJob(lab, workers, 1, "").running() as job:
        for rank in range(workers):
            job.start_worker(rank, "rates_loop.py", str(megabytes), str(rounds), host=f"w{rank % 2}")
        undisturbed = job.result("w0")
    digests = {result["digest"] for result in results} | {undisturbed["digest"]}
    changes = {result["metrics"]["rate_change_count"] for result in results}
    print(json.dumps({"rounds": rounds, "same_bits": len(digests) == 1, "changes_of_the_plan": sorted(changes)}))


def _round_times(output: subprocess.Popen[str], count: int) -> list[float]:
    """The next rounds' times in ms, as rank 0 prints them; whatever else it says is shown."""
    times: list[float] = []
    assert output.stdout is not None
    while len(times) < count:
        line = output.stdout.readline()
        assert line, "rank 0 has ended"
        if line.startswith("round "):
            times.append(float(line.split()[2]))
        else:
            print(line, end="", flush=True)
    return times


if __name__ == "__main__":
    tyro.cli(follow)
