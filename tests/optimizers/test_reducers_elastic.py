"""Optimizers on reducers in elastic jobs: workers and reducers are lost and come, and no bit differs from an oracle.

The oracle is given the history that the coordinator has written: who has taken part in each round.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.optimizers.elastic_reducers_oracle import history_of, replay
from tests.support.cluster import Cluster

NAMES = ("momentum", "adamw", "lamb")
STEPS, PAUSE_S = 150, 0.02


@dataclass
class Job:
    cluster: Cluster
    history_file: Path

    def start_worker(self, name: str, rank: int) -> None:
        arguments = (str(STEPS), str(PAUSE_S), *NAMES)
        self.cluster.start_program(name, "reducers_elastic.py", *arguments, JAXHETERO_RANK=str(rank))

    def check(self, names: Iterable[str]) -> None:
        """All of them end with the bits of the oracle, and have compiled nothing on the way."""
        results = [self.cluster.wait(name).result for name in names]
        assert self.cluster.wait("coordinator").code == 0
        history = history_of(self.history_file.read_text().splitlines(), NAMES, STEPS)
        expected = {name: replay(name, history[name]) for name in NAMES}
        for result in results:
            assert result["digests"] == expected
            assert result["compiled"] == 0


@contextmanager
def training(folder: Path, workers: int, reducers: int, **settings: str) -> Iterator[Job]:
    settings = {"JAXHETERO_ELASTIC": f"2:{workers + 1}", "JAXHETERO_LOST_AFTER_MS": "3000", **settings}
    with Cluster(workers, reducers, settings) as cluster:
        job = Job(cluster, folder / "history")
        cluster.start_coordinator("coordinator", "--history-file", str(job.history_file))
        cluster.start_reducers()
        for rank in range(workers):
            job.start_worker(f"worker {rank}", rank)
        cluster.wait_for_output("worker 0", "step 20 ")
        yield job


def is_backed_up(log: str, views: int = 0) -> bool:
    """Whether the coordinator has said so last, and how many views it has told of at least."""
    lines = [line for line in log.splitlines() if "view " in line]
    changes = [line for line in lines if not line.endswith("is backed up")]
    return len(changes) >= views and bool(lines) and lines[-1] not in changes


def test_a_worker_is_killed_and_another_comes(tmp_path: Path) -> None:
    """The one that comes gets the weights from the others, and no state of an optimizer: that is at the reducers."""
    with training(tmp_path, 3, 2) as job:
        job.cluster.wait_for_log("coordinator", is_backed_up)
        job.cluster.kill("worker 1")
        job.cluster.wait_for_output("worker 0", "of [0, 2]")
        job.start_worker("worker 1 again", 1)
        job.cluster.wait_for_output("worker 1 again", "of [0, 1, 2]")
        job.check(["worker 0", "worker 2", "worker 1 again"])


@pytest.mark.parametrize("strands", ["1", "2"])
def test_a_worker_and_a_reducer_are_killed_at_once(tmp_path: Path, strands: str) -> None:
    """What the reducer kept goes on from its backups, and another one gets a share."""
    with training(tmp_path, 3, 3, JAXHETERO_STRANDS=strands, JAXHETERO_SHARED_MEMORY="0") as job:
        job.cluster.wait_for_log("coordinator", is_backed_up)
        for name in ("worker 2", "reducer 1"):
            job.cluster.process(name).kill()
        job.cluster.wait_for_output("worker 0", "of [0, 1]")
        job.cluster.start_reducer()
        # Without both; with the reducer; and with its share.
        job.cluster.wait_for_log("coordinator", functools.partial(is_backed_up, views=3))
        job.check(["worker 0", "worker 1"])


def test_workers_with_reducers_inside_leave_and_die(tmp_path: Path) -> None:
    """Two leave at once, and nothing is lost of what the reducers inside them kept; then one is killed."""
    with training(tmp_path, 5, 0) as job:
        for name in ("worker 3", "worker 4"):
            job.cluster.process(name).send_signal(signal.SIGTERM)
        for name in ("worker 3", "worker 4"):
            assert job.cluster.wait(name).code == 0
        job.cluster.wait_for_log("coordinator", functools.partial(is_backed_up, views=2))
        job.cluster.kill("worker 1")
        job.cluster.wait_for_output("worker 0", "of [0, 2]")
        job.check(["worker 0", "worker 2"])
