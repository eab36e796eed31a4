"""Workers of an elastic job are killed, leave and come, and reducers and the coordinator are killed, at random.

The bits of all who are left are those of a NumPy replay, which is given who has taken part in each round: what
``tests.long.chaos --elastic`` runs.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.support.cluster import Cluster
from tests.support.elastic_oracle import digest, replay

WORKERS = 4
STEP_S = 0.02


@dataclass
class Chaos:
    """The processes that live now, by name, and what was done."""

    cluster: Cluster
    chance: random.Random
    steps: int
    workers: dict[int, str] = field(default_factory=dict)
    reducers: list[str] = field(default_factory=list)
    coordinator: str = "coordinator"
    leavers: list[str] = field(default_factory=list)
    toll: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        self.cluster.start_coordinator()
        self.reducers = [self.cluster.start_reducer() for _ in range(self.cluster.reducers)]
        for rank in range(WORKERS):
            self.start_worker(rank)
        self.cluster.wait_for_output(self.workers[0], "step 5 ")

    def start_worker(self, rank: int) -> None:
        earlier = sum(name.startswith(f"worker {rank} ") for name in self.cluster.names())
        self.workers[rank] = f"worker {rank} time {earlier}"
        arguments = (str(self.steps), str(STEP_S), "0")
        self.cluster.start_program(self.workers[rank], "elastic_loop.py", *arguments, JAXHETERO_RANK=str(rank))

    def members(self) -> list[int]:
        """Those who have run a step, and so have the state."""
        return [rank for rank, name in self.workers.items() if "step" in self.cluster.output(name)]

    def strike(self) -> None:
        kinds = [self.kill_worker, self.kill_worker, self.let_leave, self.kill_reducer, self.kill_coordinator]
        for kind in self.chance.sample(kinds, self.chance.choice([1, 1, 2])):
            kind()
        time.sleep(self.chance.choice([0.0, 0.1, 0.5]))
        for rank in range(WORKERS):
            if rank not in self.workers:
                self.start_worker(rank)
        if self.coordinator not in self.cluster.names():
            self.cluster.start_coordinator(self.coordinator)
            self.cluster.wait_for_error(self.coordinator, "the coordinator was started again")
        while self.leavers:  # not before there is a coordinator, who lets them go
            assert self.cluster.wait(self.leavers.pop()).code == 0
        while len(self.reducers) < self.cluster.reducers:
            self.reducers.append(self.cluster.start_reducer())
            self.cluster.wait_for_error(self.reducers[-1], "is ready")

    def kill(self, name: str) -> None:
        process = self.cluster.process(name)
        process.kill()
        process.wait()  # its connections are closed then; whoever starts it again knows that it has ended

    def kill_worker(self) -> None:
        if len(members := self.members()) > 2:
            self.kill(self.workers.pop(self.chance.choice(members)))
            self.toll["deaths"] += 1

    def let_leave(self) -> None:
        if len(members := self.members()) > 2:
            name = self.workers.pop(self.chance.choice(members))
            self.cluster.process(name).send_signal(signal.SIGTERM)
            self.leavers.append(name)
            self.toll["leaves"] += 1

    def kill_reducer(self) -> None:
        if len(self.reducers) > 1:
            self.kill(self.reducers.pop(self.chance.randrange(len(self.reducers))))
            self.toll["deaths of reducers"] += 1

    def kill_coordinator(self) -> None:
        self.kill(self.coordinator)
        self.toll["deaths of the coordinator"] += 1
        self.coordinator = f"coordinator {self.toll['deaths of the coordinator']}"

    def step(self) -> int:
        """How far the job is."""
        found = [re.findall(r"^step (\d+) ", self.cluster.output(name), re.M) for name in self.workers.values()]
        return max((int(steps[-1]) for steps in found if steps), default=0)

    def history(self) -> list[dict[str, list[int]]]:
        """Who has taken part in each step, as those say who lived longest: theirs is the state that others have got."""
        told: dict[int, tuple[int, dict[str, list[int]]]] = {}
        for name in self.cluster.names():
            if not name.startswith("worker"):
                continue
            steps = re.findall(r"^step (\d+) of .*?\] (\{.*\})$", self.cluster.output(name), re.M)
            for number, ranks in steps:
                told[int(number)] = max(
                    told.get(int(number), (-1, {})), (int(steps[-1][0]), json.loads(ranks)), key=lambda entry: entry[0]
                )
        assert sorted(told) == list(range(self.steps))
        return [told[number][1] for number in range(self.steps)]


def run_job(seed: int, strikes: int, steps: int = 600) -> Counter[str]:
    """Train, with so many strikes if the job lasts; what they were, and how many workers have come."""
    chance = random.Random(seed)
    settings = {"JAXHETERO_ELASTIC": f"2:{WORKERS + 1}", "JAXHETERO_LOST_AFTER_MS": "3000"}
    settings["JAXHETERO_STRANDS"] = chance.choice(["1", "2"])
    with Cluster(WORKERS, chance.choice([1, 2, 3]), settings) as cluster:
        chaos = Chaos(cluster, chance, steps)
        chaos.start()
        for _ in range(strikes):
            time.sleep(chance.random())
            if chaos.step() > steps * 3 // 4:
                break
            chaos.strike()
        names = list(chaos.workers.values())
        outcomes = [cluster.wait(name) for name in names]
        expected = digest(replay(chaos.history()))
        for name, outcome in zip(names, outcomes, strict=True):
            assert outcome.code == 0, f"seed {seed}: {name}: {outcome.errors}"
            if "step" not in outcome.output:
                continue  # the job has ended before it could come in
            assert outcome.result["digest"] == expected, f"seed {seed}: {name} has other bits than the replay"
            assert outcome.result["compiled"] == 0, f"seed {seed}: {name} has compiled anew"
        workers = [name for name in cluster.names() if name.startswith("worker")]
        chaos.toll["joins"] = sum("step" in cluster.output(name) for name in workers) - WORKERS
        return chaos.toll


def run_elastic_jobs(rounds: int, seed: int, strikes_per_job: int) -> None:
    """Until so many workers were killed."""
    total: Counter[str] = Counter()
    while total["deaths"] < rounds:
        toll = run_job(seed, strikes_per_job)
        total += toll
        print(json.dumps({"seed": seed, **toll}), flush=True)
        seed += 1
    print(f"{dict(total)}: all bits are those of the replay")
