"""Workers of an elastic job are killed, leave and come, and reducers and the coordinator are killed, at random.

The bits of all who are left are those of a NumPy replay, which is given the history that the coordinator has written:
who has taken part in each round. What ``tests.long.chaos --elastic`` runs; with ``--server``, reducers run AdamW and
LAMB, and what is lost with one of them goes on from its backups.
"""

from __future__ import annotations

import json
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxhetero.doctor.status import read_status
from tests.optimizers import elastic_reducers_oracle
from tests.support.cluster import Cluster
from tests.support.elastic_oracle import digest, history_of, replay

WORKERS = 4
STEP_S = 0.02
PATIENCE_S = 60.0
STEPS_PER_STRIKE_OF_STATES = 60


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
        self.cluster.start_program(self.workers[rank], *self.program(), JAXHETERO_RANK=str(rank))

    def program(self) -> tuple[str, ...]:
        """What workers run, and its arguments."""
        return ("elastic_loop.py", str(self.steps), str(STEP_S), "0")

    def all_workers(self) -> list[str]:
        return [name for name in self.cluster.names() if name.startswith("worker")]

    def members(self) -> list[int]:
        """Those who have run a step, and so have the state."""
        return [rank for rank, name in self.workers.items() if "step" in self.cluster.output(name)]

    def strike(self) -> None:
        self.await_backups()
        for kind in self.choose():
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

    def choose(self) -> list[Callable[[], None]]:
        """What happens at once."""
        often = [self.kill_worker, self.kill_worker, self.kill_worker, self.let_leave, self.let_leave]
        kinds = [*often, self.kill_comer, self.kill_reducer, self.kill_coordinator]
        return self.chance.sample(kinds, self.chance.choice([1, 2, 2, 3]))

    def await_backups(self) -> None:
        """Until reducers may be killed again."""

    def kill_worker(self) -> None:
        if len(members := self.members()) > 2:
            self.cluster.kill(self.workers.pop(self.chance.choice(members)))
            self.toll["deaths"] += 1

    def kill_comer(self) -> None:
        """One that waits to be let in, or gets the state."""
        names = {rank: self.cluster.output(name) for rank, name in self.workers.items()}
        comers = [rank for rank, output in names.items() if "compiled" in output and "step" not in output]
        if comers:
            self.cluster.kill(self.workers.pop(self.chance.choice(comers)))
            self.toll["deaths"] += 1

    def let_leave(self) -> None:
        if len(members := self.members()) > 2:
            name = self.workers.pop(self.chance.choice(members))
            self.cluster.process(name).send_signal(signal.SIGTERM)
            self.leavers.append(name)
            self.toll["leaves"] += 1

    def kill_reducer(self) -> None:
        if len(self.reducers) > 1:
            self.cluster.kill(self.reducers.pop(self.chance.randrange(len(self.reducers))))
            self.toll["deaths of reducers"] += 1

    def kill_coordinator(self) -> None:
        self.cluster.kill(self.coordinator)
        self.toll["deaths of the coordinator"] += 1
        self.coordinator = f"coordinator {self.toll['deaths of the coordinator']}"

    def step(self) -> int:
        """How far the job is."""
        found = [re.findall(r"^step (\d+) ", self.cluster.output(name), re.M) for name in self.workers.values()]
        return max((int(steps[-1]) for steps in found if steps), default=0)

    def check(self, job: str) -> None:
        """The bits and the participants of all who have lived to the end, and that these have compiled nothing."""
        results = self.results(job)
        history = history_of(self.history_file.read_text().splitlines(), self.steps)
        expected = digest(replay(history))
        for name, result in results:
            for step, participants in result["history"].items():
                told = f"{job}: {name} counted {participants} in step {step}, and the history has {history[int(step)]}"
                assert participants == history[int(step)], told
            assert result["digest"] == expected, f"{job}: {name} has other bits than the replay"
            assert result["compiled"] == 0, f"{job}: {name} has compiled anew"

    def results(self, job: str) -> list[tuple[str, Any]]:
        names = list(self.workers.values())
        outcomes = [(name, self.cluster.wait(name)) for name in names]
        for name, outcome in outcomes:
            assert outcome.code == 0, f"{job}: {name}: {outcome.errors}"
        # For others the job has ended before they could come in.
        return [(name, outcome.result) for name, outcome in outcomes if "step" in outcome.output]


class ChaosOfStates(Chaos):
    """With optimizers that reducers run."""

    optimizers = ("adamw", "lamb")

    def program(self) -> tuple[str, ...]:
        return ("reducers_elastic.py", str(self.steps), str(STEP_S), *self.optimizers)

    def choose(self) -> list[Callable[[], None]]:
        """A reducer is killed, mostly with a worker."""
        others = [*[self.kill_worker] * 4, self.let_leave, self.kill_comer, self.kill_coordinator]
        chosen = [self.kill_reducer, *self.chance.sample(others, self.chance.choice([1, 1, 2, 2, 3]))]
        self.chance.shuffle(chosen)
        return chosen

    def await_backups(self) -> None:
        """Of the shares of those that were lost: if two are lost before that, a part of the states is."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.is_backed_up():
            assert time.monotonic() < deadline, self.cluster.errors(self.coordinator)

    def is_backed_up(self) -> bool:
        """In this view, which has all reducers."""
        status = read_status(self.cluster.coordinator, self.cluster.token, seconds=0.02)
        reducers = sum(process.is_member and process.name.startswith("reducer") for process in status.processes)
        told = f"view {status.view}: what reducers keep of optimizers is backed up"
        return reducers == len(self.reducers) and told in self.cluster.errors(self.coordinator)

    def check(self, job: str) -> None:
        results = self.results(job)
        lines = self.history_file.read_text().splitlines()
        history = elastic_reducers_oracle.history_of(lines, self.optimizers, self.steps)
        expected = {name: elastic_reducers_oracle.replay(name, history[name]) for name in self.optimizers}
        for name, result in results:
            assert result["digests"] == expected, f"{job}: {name} has other bits than the replay"
            assert result["compiled"] == 0, f"{job}: {name} has compiled anew"


def run_job(seed: int, strikes: int, steps_per_strike: int = 60, server: bool = False) -> Counter[str]:
    """Train, with so many strikes if the job lasts; what they were, and how many workers have come."""
    chance = random.Random(seed)
    settings = {"JAXHETERO_ELASTIC": f"2:{WORKERS + 1}", "JAXHETERO_LOST_AFTER_MS": "3000"}
    settings["JAXHETERO_STRANDS"] = chance.choice(["1", "2"])
    reducers = chance.choice([2, 3, 4] if server else [0, 1, 2, 3])  # 0: those inside the workers
    with tempfile.TemporaryDirectory() as folder, Cluster(WORKERS, reducers, settings) as cluster:
        kind = ChaosOfStates if server else Chaos
        chaos = kind(cluster, chance, strikes * steps_per_strike, Path(folder) / "history")
        chaos.start()
        for _ in range(strikes):
            time.sleep(chance.random())
            if chaos.step() > chaos.steps * 3 // 4:
                break
            chaos.strike()
        chaos.check(f"seed {seed}")
        chaos.toll["joins"] = sum("step" in cluster.output(name) for name in chaos.all_workers()) - WORKERS
        return chaos.toll


def run_elastic_jobs(rounds: int, seed: int, strikes_per_job: int, server: bool = False) -> None:
    """Until so many workers were killed; of jobs with states, so many workers and reducers."""
    total: Counter[str] = Counter()
    while total["deaths"] + server * total["deaths of reducers"] < rounds:
        toll = run_job(seed, strikes_per_job, STEPS_PER_STRIKE_OF_STATES if server else 60, server)
        total += toll
        print(json.dumps({"seed": seed, **toll}), flush=True)
        seed += 1
    print(f"{dict(total)}: all bits are those of the replay")
