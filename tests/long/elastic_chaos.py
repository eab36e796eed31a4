"""Workers of an elastic job are killed, leave and come, and reducers and the coordinator are killed, at random.

The bits of all who are left are those of a NumPy replay, which is given the history that the coordinator has written:
who has taken part in each round. What ``tests.long.chaos --elastic`` runs.
"""

from __future__ import annotations

import json
import random
import re
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.elastic_oracle import digest, history_of, replay

WORKERS = 4
STEP_S = 0.02


@dataclass
class Chaos:
    """The processes that live now, by name, and what was done."""

    cluster: Cluster
    chance: random.Random
    steps: int
    history_file: Path
    workers: dict[int, str] = field(default_factory=dict)
    reducers: list[str] = field(default_factory=list)
    coordinator: str = "coordinator"
    leavers: list[str] = field(default_factory=list)
    toll: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        self.start_coordinator()
        self.reducers = [self.cluster.start_reducer() for _ in range(self.cluster.reducers)]
        for rank in range(WORKERS):
            self.start_worker(rank)
        self.cluster.wait_for_output(self.workers[0], "step 5 ")

    def start_coordinator(self) -> None:
        self.cluster.start_coordinator(self.coordinator, "--history-file", str(self.history_file))

    def start_worker(self, rank: int) -> None:
        earlier = sum(name.startswith(f"worker {rank} ") for name in self.cluster.names())
        self.workers[rank] = f"worker {rank} time {earlier}"
        arguments = (str(self.steps), str(STEP_S), "0")
        self.cluster.start_program(self.workers[rank], "elastic_loop.py", *arguments, JAXHETERO_RANK=str(rank))

    def all_workers(self) -> list[str]:
        return [name for name in self.cluster.names() if name.startswith("worker")]

    def members(self) -> list[int]:
        """Those who have run a step, and so have the state."""
        return [rank for rank, name in self.workers.items() if "step" in self.cluster.output(name)]

    def strike(self) -> None:
        often = [self.kill_worker, self.kill_worker, self.kill_worker, self.let_leave, self.let_leave]
        kinds = [*often, self.kill_comer, self.kill_reducer, self.kill_coordinator]
        for kind in self.chance.sample(kinds, self.chance.choice([1, 2, 2, 3])):
            kind()
        time.sleep(self.chance.choice([0.0, 0.1, 0.5]))
        for rank in range(WORKERS):
            if rank not in self.workers:
                self.start_worker(rank)
        if self.coordinator not in self.cluster.names():
            self.start_coordinator()
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

    def kill_comer(self) -> None:
        """One that waits to be let in, or gets the state."""
        names = {rank: self.cluster.output(name) for rank, name in self.workers.items()}
        comers = [rank for rank, output in names.items() if "compiled" in output and "step" not in output]
        if comers:
            self.kill(self.workers.pop(self.chance.choice(comers)))
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
        return history_of(self.history_file.read_text().splitlines(), self.steps)


def run_job(seed: int, strikes: int, steps_per_strike: int = 60) -> Counter[str]:
    """Train, with so many strikes if the job lasts; what they were, and how many workers have come."""
    chance = random.Random(seed)
    settings = {"JAXHETERO_ELASTIC": f"2:{WORKERS + 1}", "JAXHETERO_LOST_AFTER_MS": "3000"}
    settings["JAXHETERO_STRANDS"] = chance.choice(["1", "2"])
    reducers = chance.choice([0, 1, 2, 3])  # 0: those inside the workers
    with tempfile.TemporaryDirectory() as folder, Cluster(WORKERS, reducers, settings) as cluster:
        chaos = Chaos(cluster, chance, strikes * steps_per_strike, Path(folder) / "history")
        chaos.start()
        for _ in range(strikes):
            time.sleep(chance.random())
            if chaos.step() > chaos.steps * 3 // 4:
                break
            chaos.strike()
        check(chaos, f"seed {seed}")
        chaos.toll["joins"] = sum("step" in cluster.output(name) for name in chaos.all_workers()) - WORKERS
        return chaos.toll


def check(chaos: Chaos, job: str) -> None:
    """The bits and the participants of all who have lived to the end, and that these have compiled nothing."""
    names = list(chaos.workers.values())
    outcomes = [chaos.cluster.wait(name) for name in names]
    history = chaos.history()
    expected = digest(replay(history))
    for name, outcome in zip(names, outcomes, strict=True):
        assert outcome.code == 0, f"{job}: {name}: {outcome.errors}"
        if "step" not in outcome.output:
            continue  # the job has ended before it could come in
        for step, participants in outcome.result["history"].items():
            assert participants == history[int(step)], f"{job}: {name} counted others in step {step}"
        assert outcome.result["digest"] == expected, f"{job}: {name} has other bits than the replay"
        assert outcome.result["compiled"] == 0, f"{job}: {name} has compiled anew"


def run_elastic_jobs(rounds: int, seed: int, strikes_per_job: int) -> None:
    """Until so many workers were killed."""
    total: Counter[str] = Counter()
    while total["deaths"] < rounds:
        toll = run_job(seed, strikes_per_job)
        total += toll
        print(json.dumps({"seed": seed, **toll}), flush=True)
        seed += 1
    print(f"{dict(total)}: all bits are those of the replay")
