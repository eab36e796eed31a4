"""Kills reducers of a training job, over and over, and checks that no bit of the result changes.

    python -m tests.long.chaos --rounds 300 --seed 0
    python -m tests.long.chaos --rounds 300 --server      # with optimizers that the reducers run
    python -m tests.long.chaos --rounds 300 --elastic     # of workers and the coordinator as well: elastic_chaos.py
    python -m tests.long.chaos --rounds 100 --elastic --server

The instants, the victims and the jobs' shapes follow from the seed: from 2 to 8 reducers, some jobs with more of them
inside the workers; one at a time, two at once, or one while the loss of another is being dealt with. As many new ones
come as are killed. With ``--server``, one is killed at a time, and the next one once what it kept has a backup again.
"""

import functools
import itertools
import json
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro

from tests.long.elastic_chaos import run_elastic_jobs
from tests.support.cluster import Cluster


@dataclass
class Toll:
    """What a job with deaths came to."""

    kills: int
    steps: int
    same_bits: bool
    views: int
    """How often the reducers changed, by the workers' count."""
    usual_step_s: float
    lost_s: list[float]
    """How much longer than usual the slowest step took, after each instant at which reducers were killed."""


@dataclass
class Killer:
    cluster: Cluster
    random: random.Random
    alive: list[str]
    instants: list[float]
    most: int = 2
    kills: int = 0

    def strike(self) -> None:
        """Kills one reducer, or as many as may be, at once or shortly after each other; always leaves one."""
        self.instants.append(time.time())
        for _ in range(min(self.random.choice([1, 1, self.most]), len(self.alive) - 1)):
            victim = self.alive.pop(self.random.randrange(len(self.alive)))
            self.cluster.process(victim).send_signal(signal.SIGKILL)
            self.kills += 1
            time.sleep(self.random.choice([0, 0, 0.001, 0.01]))


@contextmanager
def _training(
    workers: int, reducers: int, colocated: int, program: str, arguments: Sequence[str]
) -> Iterator[tuple[Cluster, Path]]:
    """A job that trains until the file is there."""
    settings = {"JAXHETERO_COLOCATED_COUNT": str(colocated), "JAXHETERO_TIMEOUT_MS": "20000"}
    with TemporaryDirectory() as directory, Cluster(workers, reducers, settings) as cluster:
        end = Path(directory) / "end"
        cluster.start_reducers()
        cluster.start_workers(program, str(end), *arguments)
        for rank in range(workers):
            cluster.wait_for_output(f"worker {rank}", "running")
        yield cluster, end


# One without the lost reducer, one with that which joins, and one in which that keeps its share.
_VIEWS_OF_A_KILL = 3


def _is_backed_up(log: str, kills: int) -> bool:
    """Whether that was said last, after all views that so many kills make."""
    lines = [line for line in log.splitlines() if "view " in line]
    views = [line for line in lines if not line.endswith("is backed up")]
    return len(views) >= _VIEWS_OF_A_KILL * kills and lines[-1] not in views


def _sizes(log: str) -> list[str]:
    """How many reducers each view has had that the job has gone on with."""
    return re.findall(r"going on with (\d+) reducers", log)


def _goes_on_with(log: str, reducers: int, views: int) -> bool:
    """Whether there have been more views than these, and the last one has so many."""
    sizes = _sizes(log)
    return len(sizes) > views and sizes[-1] == str(reducers)


def run_job(
    seed: int,
    strikes: int,
    workers: int = 3,
    pause_s: float = 0.5,
    program: str = "train_bits.py",
    arguments: Sequence[str] = (),
    backed_up: bool = False,
) -> Toll:
    """Train, and kill so often; ``backed_up``: reducers keep what has to be copied before the next one may go."""
    chance = random.Random(seed)
    reducers = chance.randint(2, 8)
    colocated = chance.choice([0, 0, 1, workers])
    with _training(workers, reducers, colocated, program, arguments) as (cluster, end):
        killer = Killer(cluster, chance, [f"reducer {index}" for index in range(reducers)], [], 1 if backed_up else 2)
        for _ in range(strikes):
            time.sleep(pause_s * chance.random())
            before, views = list(killer.alive), len(_sizes(cluster.errors("worker 0")))
            killer.strike()
            if killer.alive != before:
                # A new one, which is forked, is there within milliseconds. Before the coordinator has seen the losses,
                # it refuses one: the job has all of its own.
                left = colocated + len(killer.alive)
                cluster.wait_for_log("worker 0", functools.partial(_goes_on_with, reducers=left, views=views))
            while len(killer.alive) < reducers:
                killer.alive.append(cluster.start_reducer())
            # The new ones are to be there before the next strike, or it could leave none.
            for name in killer.alive:
                cluster.wait_for_error(name, "is ready")
            if backed_up:
                cluster.wait_for_log("worker 0", functools.partial(_is_backed_up, kills=killer.kills))
        end.touch()
        results = [outcome.result for outcome in cluster.wait_workers()]
    ends = results[0]["ends"]
    steps = [(late - early, late) for early, late in itertools.pairwise(ends)]
    usual = statistics.median(length for length, _ in steps)
    return Toll(
        kills=killer.kills,
        steps=len(ends),
        same_bits={result["distributed"] for result in results} == {results[0]["alone"]},
        views=results[0]["views"],
        usual_step_s=usual,
        lost_s=[
            max((length for length, late in steps if instant < late < instant + 1), default=usual) - usual
            for instant in killer.instants
        ],
    )


def main(
    rounds: int = 300, seed: int = 0, strikes_per_job: int = 10, server: bool = False, elastic: bool = False
) -> None:
    """
    Args:
        rounds: How many reducers to kill, at least.
        seed: Of everything that is random.
        strikes_per_job: How often to kill one or two of them before the job ends and another begins.
        server: Train with optimizers that the reducers run, AdamW and LAMB.
        elastic: Workers, reducers and the coordinator are killed, and workers come and leave. With ``server``, too.
    """
    if elastic:
        return run_elastic_jobs(rounds, seed, strikes_per_job, server)
    options: dict[str, Any] = {}
    if server:
        options = {"program": "reducers_training.py", "arguments": ("adamw", "lamb"), "backed_up": True}
    kills = 0
    lost: list[float] = []
    while kills < rounds:
        toll = run_job(seed, strikes_per_job, **options)
        if not toll.same_bits:
            raise SystemExit(f"seed {seed}: the parameters differ from those of an undisturbed run")
        kills += toll.kills
        lost += toll.lost_s
        print(json.dumps({"seed": seed, "kills": toll.kills, "steps": toll.steps, "views": toll.views}), flush=True)
        seed += 1
    times = f"{1e3 * statistics.median(lost):.0f} ms in the median, {1e3 * max(lost):.0f} ms at most"
    print(f"{kills} kills: no step lost, no bit changed; each took {times}")


if __name__ == "__main__":
    tyro.cli(main)
