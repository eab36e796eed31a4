"""The measurement in turns. In a turn, one engine all-reduces one size a few times, while the others sleep."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.harness.job import worker_host
from bench.harness.team import Team
from lab.netlab import Lab

# The bytes that a worker contributes in a turn, by default.
_TURN_BYTES = 32 << 20
_LEAST_BATCH, _MOST_BATCH = 2, 25


@dataclass(frozen=True)
class Payload:
    """The bytes to all-reduce, and the form that they have."""

    bytes: int
    count: int
    dtype: str
    bucket_count: int = 1
    """The all-reduces of one compiled program that carry the payload. They may run at the same time."""
    in_place: bool = False
    """A sum takes the memory of its operand."""
    collective: str = "psum"
    row_count: int = 1
    """Of an all_gather's results, and a psum_scatter's operands; 1 for psum."""

    values: str | None = None
    """The folder with the workers' own values; None: whole numbers."""

    @property
    def held_bytes(self) -> int:
        """The memory of operand and result together."""
        return self.bytes if self.in_place else self.bytes + self.bytes // self.row_count

    def default_batch(self) -> int:
        return max(_LEAST_BATCH, min(_MOST_BATCH, _TURN_BYTES // self.bytes))


@dataclass
class Sample:
    """The measurements of one engine at one size, over all its turns."""

    label: str
    payload: Payload
    wire_bytes: int
    """The bytes of one contribution on the wire: less than the payload with a narrower wire dtype."""
    times_s: list[float] = field(default_factory=list)
    """From the end of the all-reduce before on the last worker to the end of this one on the last worker."""
    operation_count: int = 0
    """The all-reduces that the totals below cover: those of ``times_s``, and the first one of each turn."""
    sent_bytes: list[int] = field(default_factory=list)
    """The total of each worker's interface; empty if the hosts have no interfaces."""
    received_bytes: list[int] = field(default_factory=list)
    worker_cpu_s: float = 0.0
    """The total of all worker processes."""
    reducer_cpu_s: float = 0.0
    worker_extra_bytes: int = 0
    """The most resident memory of a worker, less operand, result, and its memory at the start."""
    reducer_extra_bytes: int = 0
    """The most resident memory of a dedicated reducer, less its memory at the start."""
    wrong_count: int | None = 0
    """Elements that differ from the exact sum, over all workers and turns; None for an engine that does not sum."""


def measure(
    teams: Sequence[Team], lab: Lab, payloads: Sequence[Payload], rounds: int, warmup: int, batch: int | None
) -> list[Sample]:
    """Measure ``rounds`` turns of every team with every payload. The teams take turns."""
    samples = {
        (payload, team.spec.label): Sample(
            team.spec.label, payload, int(payload.count * team.spec.wire_itemsize(payload.dtype))
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
        collective=payload.collective,
        values=payload.values,
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
    """The seconds from one all-reduce's end on the last worker to the next one's, from every worker's end times.

    These times add up to the whole time, so workers that run ahead cannot hide any of it. All hosts have one clock.
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
    """CPU seconds of a process, to the nanosecond. The clock's id is that of clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)
