"""The worker or the reducer whose counts a process shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxhetero.config import Config

if TYPE_CHECKING:
    from jaxhetero._native import Communicator, ReducerServer


@dataclass(frozen=True)
class Watched:
    """A worker or a reducer of this process."""

    role: str
    """"worker" or "reducer"."""
    place: Callable[[], tuple[int, int] | None]
    """The job's id, and the rank or the reducer's number, once they are known."""
    metrics: Callable[[], dict[str, int]]
    reducer_count: int = 0
    """How many reducers the job was started with; known to workers."""
    round_times: Callable[[], tuple[list[float], list[int], float]] | None = None
    late_workers: Callable[[], list[tuple[int, int]]] | None = None
    """The ranks that a reducer's rounds wait for, and for how many milliseconds."""
    slow_rank: Callable[[], int] | None = None
    """The worker whose interface has become slow, as rank 0 finds; -1 if none has."""
    slow_reducers: Callable[[], list[tuple[int, int]]] | None = None
    """Likewise: the numbers of reducers, and what they carry in percent of a full rate."""


def watch_worker(communicator: Communicator, config: Config) -> Watched:
    """What is shown of a worker."""
    reducer_count = config.reducer_count + config.colocated_count
    return Watched(
        "worker", communicator.place, communicator.metrics, reducer_count, communicator.round_times,
        slow_rank=communicator.slow_rank, slow_reducers=communicator.slow_reducers,
    )  # fmt: skip


def watch_reducer(server: ReducerServer) -> Watched:
    """What is shown of a reducer."""
    return Watched("reducer", server.place, server.metrics, late_workers=server.late_workers)
