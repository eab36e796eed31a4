"""Turns: one engine all-reduces one size a few times while all the others sleep."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.harness.job import worker_host
from bench.harness.team import Team
from bench.netlab import Lab

# A turn moves about this much, unless told otherwise.
_TURN_BYTES = 32 << 20
_LEAST_BATCH, _MOST_BATCH = 2, 25


@dataclass(frozen=True)
class Payload:
    """What is all-reduced."""

    bytes: int
    count: int
    dtype: str
    bucket_count: int = 1
    """In how many all-reduces of one compiled program, which may run at the same time."""
    in_place: bool = False
    """A sum takes the memory of its operand."""

    @property
    def held_bytes(self) -> int:
        """What operand and result take."""
        return self.bytes if self.in_place else 2 * self.bytes

    def default_batch(self) -> int:
        return max(_LEAST_BATCH, min(_MOST_BATCH, _TURN_BYTES // self.bytes))


@dataclass
class Sample:
    """What was measured of one engine at one size, over all its turns."""

    label: str
    payload: Payload
    wire_bytes: int
    """Of one contribution on the wire; less than the payload with a narrower wire dtype."""
    times_s: list[float] = field(default_factory=list)
    """From when the last worker had the all-reduce before to when the last one had this one."""
    operation_count: int = 0
    """All-reduces that the sums below are over: those of ``times_s`` and the one that begins each turn."""
    sent_bytes: list[int] = field(default_factory=list)
    """By each worker's interface; empty where hosts have none."""
    received_bytes: list[int] = field(default_factory=list)
    worker_cpu_s: float = 0.0
    """Of all worker processes together."""
    reducer_cpu_s: float = 0.0
    worker_extra_bytes: int = 0
    """What the largest worker had resident at most beyond its operand, its result, and what it had at the start."""
    reducer_extra_bytes: int = 0
    """What the largest dedicated reducer had resident at most beyond what it had at the start."""
    wrong_count: int | None = 0
    """Elements that were not the exact sum, over all workers and turns; None for an engine that does not sum."""


def measure(
    teams: Sequence[Team], lab: Lab, payloads: Sequence[Payload], rounds: int, warmup: int, batch: int | None
) -> list[Sample]:
    """``rounds`` turns for every team with every payload, in alternation."""
    samples = {
        (payload, team.spec.label): Sample(
            team.spec.label, payload, payload.count * team.spec.wire_itemsize(payload.dtype)
        )
        for payload, team in itertools.product(payloads, teams)
    }
    for number, payload, team in itertools.product(range(rounds), payloads, teams):
        sample = samples[payload, team.spec.label]
        _take_turn(team, lab, sample, number, warmup, batch or payload.default_batch())
    return list(samples.values())


def _take_turn(team: Team, lab: Lab, sample: Sample, number: int, warmup: int, batch: int) -> None:
    payload = sample.payload
    team.request(
        "prepare",
        count=payload.count,
        dtype=payload.dtype,
        exact_dtype=team.spec.wire_dtype or payload.dtype,
        seed=number,
        bucket_count=payload.bucket_count,
        in_place=payload.in_place,
        warmup=warmup,
    )
    team.forget_peaks()
    before = _Meters.read(team, lab)
    answers = team.request("measure", count=batch)
    _Meters.read(team, lab).add_to(sample, before)
    worker_extra_bytes, reducer_extra_bytes = team.grown_bytes()
    sample.worker_extra_bytes = max(sample.worker_extra_bytes, worker_extra_bytes - payload.held_bytes)
    sample.reducer_extra_bytes = max(sample.reducer_extra_bytes, reducer_extra_bytes)
    sample.operation_count += batch + 1
    sample.times_s += between_last_ends([answer["ends_ns"] for answer in answers])
    wrong_count = sum(answer["wrong_count"] for answer in team.request("check"))
    sample.wrong_count = (sample.wrong_count or 0) + wrong_count if team.spec.sums else None


def between_last_ends(ends_ns: Iterable[list[int]]) -> list[float]:
    """The seconds between the moments when the last worker was done, from every worker's ends.

    They add up to the whole time, so nothing is hidden by workers that run ahead. All hosts have one clock.
    """
    last = [max(ends) for ends in zip(*ends_ns, strict=True)]
    return [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(last)]


@dataclass(frozen=True)
class _Meters:
    worker_cpu_s: float
    reducer_cpu_s: float
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]

    @classmethod
    def read(cls, team: Team, lab: Lab) -> _Meters:
        counters = lab.counters() if lab.isolated else {}
        workers = [counters[worker_host(rank)] for rank in range(len(team.worker_pids)) if counters]
        return cls(
            sum(map(_cpu_s, team.worker_pids)),
            sum(map(_cpu_s, team.reducer_pids)),
            tuple(worker.sent_bytes for worker in workers),
            tuple(worker.received_bytes for worker in workers),
        )

    def add_to(self, sample: Sample, before: _Meters) -> None:
        sample.worker_cpu_s += self.worker_cpu_s - before.worker_cpu_s
        sample.reducer_cpu_s += self.reducer_cpu_s - before.reducer_cpu_s
        sample.sent_bytes = list(_grown(sample.sent_bytes, self.sent_bytes, before.sent_bytes))
        sample.received_bytes = list(_grown(sample.received_bytes, self.received_bytes, before.received_bytes))


def _grown(totals: list[int], now: tuple[int, ...], before: tuple[int, ...]) -> Iterator[int]:
    for total, late, early in zip(totals or [0] * len(now), now, before, strict=True):
        yield total + late - early


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process, to the nanosecond: what clock_getcpuclockid(3) makes of a pid."""
    return time.clock_gettime((~pid << 3) | 2)
