"""Rounds as Chrome-trace JSON, which https://ui.perfetto.dev opens.

A worker is a process of the trace. It has a track for each op, with the rounds of that op and the stages of each round,
a track for each reducer, with that reducer's part of each round, and one for the times in which rounds stood still,
while it changed who takes part; and it counts those who do. What overlaps on a track, such as the parts of two rounds
at one reducer, is parted into tracks of one name: slices of one track must nest.

Times are whole microseconds of the wall clock, since 1970; with a profile of JAX, since that profile's start.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxhetero.errors import ConfigError

if TYPE_CHECKING:
    from jaxhetero._native import RoundRecord, ViewRecord

Event = dict[str, Any]

# Clear of the processes in JAX's own traces.
_FIRST_PID = 10_000
# Blocks of numbers for tracks: those of ops begin at 1, those of reducers after the most ops that a job may have.
_BLOCK = 1000
_VIEW_BLOCK = 0
_FIRST_REDUCER_BLOCK = 100_000
_STAGES = ("waits for its turn", "waits for the first total", "takes totals")


@dataclass(frozen=True)
class Profile:
    """What ``jax.profiler`` has written of a run."""

    start_us: int
    """Microseconds since 1970, to which its events count."""
    events: list[Event]


class _Tracks:
    """The tracks of one worker. A track is made when something is put on it.

    Viewers show tracks in the order of their numbers. Each name has a block of numbers, for the tracks it may need.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ends_us: dict[str, list[int]] = {}  # where the last slice ends on each track of a name

    def place(self, name: str, block: int, start_us: int, end_us: int) -> tuple[int, list[Event]]:
        """A track of that name that is free by then; its number and, if it is new, the events that declare it."""
        ends = self._ends_us.setdefault(name, [])
        for index, busy_until_us in enumerate(ends):
            if busy_until_us <= start_us:
                ends[index] = end_us
                return _BLOCK * block + index, []
        ends.append(end_us)
        tid = _BLOCK * block + len(ends) - 1
        return tid, [
            _describe(self._pid, tid, "thread_name", name=name),
            _describe(self._pid, tid, "thread_sort_index", sort_index=tid),
        ]


class WorkerTrace:
    """The events of one worker, made from its rounds one after the other.

    Args:
      number: its place in the trace.
      name: for people, "worker 3 (host b)".
      offset_us: what to add to ``time.monotonic()``, in microseconds.
    """

    def __init__(self, number: int, name: str, offset_us: int) -> None:
        self._pid = _FIRST_PID + number
        self._name = name
        self._offset_us = offset_us
        self._tracks = _Tracks(self._pid)
        self._ops: dict[str, int] = {}
        self.round_count = 0
        self.bucket_bytes = 0

    def head(self) -> Iterator[Event]:
        """The events that name the worker."""
        yield _describe(self._pid, 0, "process_name", name=f"jaxhetero {self._name}")
        yield _describe(self._pid, 0, "process_sort_index", sort_index=self._pid)

    def begins(self, record: RoundRecord) -> int:
        """When a round was requested, on the clock of the trace."""
        return self._to_us(record[3])

    def halted(self, view: ViewRecord) -> int:
        """When rounds stood still for a view, on the clock of the trace."""
        return self._to_us(view[4])

    def round(self, record: RoundRecord) -> Iterator[Event]:
        """The events of a round. Rounds come in the order in which they ended."""
        op, number, bucket_bytes, *times, parts = record
        instants = [self._to_us(time_s) for time_s in times]
        args = {"round": number, "bytes": bucket_bytes}
        block = self._ops.setdefault(op, len(self._ops) + 1)
        tid, head = self._tracks.place(op, block, instants[0], instants[-1])
        yield from head
        yield self._slice(tid, op, "round", instants[0], instants[-1], args)
        for stage, (start_us, end_us) in zip(_STAGES, itertools.pairwise(instants), strict=True):
            yield self._slice(tid, stage, "stage", start_us, end_us, {})
        for reducer, part_bytes, end_s in parts:
            yield from self._part(op, number, reducer, part_bytes, instants[1], self._to_us(end_s))
        self.round_count += 1
        self.bucket_bytes += bucket_bytes

    def view(self, record: ViewRecord) -> Iterator[Event]:
        """The events of a view. Views come in their order."""
        number, why, workers, reducers, *times = record
        halted_us, begun_us = map(self._to_us, times)
        if why:
            tid, head = self._tracks.place("views", _VIEW_BLOCK, halted_us, begun_us)
            yield from head
            args = {"view": number, "workers": workers, "reducers": reducers}
            yield self._slice(tid, why, "view", halted_us, begun_us, args)
        counts = {"workers": len(workers), "reducers": len(reducers)}
        yield {"ph": "C", "pid": self._pid, "name": "taking part", "ts": begun_us, "args": counts}

    def _part(self, op: str, number: int, reducer: int, size: int, start_us: int, end_us: int) -> Iterator[Event]:
        tid, head = self._tracks.place(f"reducer {reducer}", _FIRST_REDUCER_BLOCK + reducer, start_us, end_us)
        yield from head
        yield self._slice(tid, op, "part", start_us, end_us, {"round": number, "bytes": size, "reducer": reducer})

    def _slice(self, tid: int, name: str, kind: str, start_us: int, end_us: int, args: Mapping[str, Any]) -> Event:
        times = {"ts": start_us, "dur": end_us - start_us}
        return {"ph": "X", "pid": self._pid, "tid": tid, "name": name, "cat": kind, **times, "args": args}

    def _to_us(self, time_s: float) -> int:
        return int(time_s * 1e6) + self._offset_us


def _describe(pid: int, tid: int, what: str, **args: str | int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def check_target(path: Path) -> None:
    """``ConfigError`` for a file that could not be written."""
    try:
        _part_of(path).touch()
        _part_of(path).unlink()
    except OSError as error:
        raise ConfigError(f"cannot write the timeline {path}: {error.strerror}") from None


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write, which takes its place at the end of the block, or goes if that fails.

    Raises:
      ConfigError: the file cannot be made or written.
    """
    part = _part_of(path)
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the timeline {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_events(path: Path, events: Iterable[Event], about: Mapping[str, Any]) -> None:
    """Write a trace; ``about`` is read after the last event."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write((",\n" if number else "\n") + json.dumps(event))
        file.write(f'\n], "otherData": {json.dumps(about)}}}\n')


def read_profile(folder: Path) -> Profile:
    """The latest run in a folder that was given to ``jax.profiler``.

    Raises:
      ConfigError: there is none, or it cannot be read.
    """
    from jax.profiler import ProfileData

    runs = sorted(run for run in folder.glob("plugins/profile/*") if any(run.glob("*.xplane.pb")))
    if not runs:
        raise ConfigError(f"no profile in {folder}: give the folder that jax.profiler.trace() wrote, after its end")
    # One file of each kind for each host; they have one process of JAX each, and here that is this one.
    planes, *_ = sorted(runs[-1].glob("*.xplane.pb"), key=os.path.getmtime, reverse=True)
    stats = {name: value for plane in ProfileData.from_file(str(planes)).planes for name, value in plane.stats}
    events_path = planes.with_name(planes.name.removesuffix(".xplane.pb") + ".trace.json.gz")
    try:
        start_ns = int(stats["profile_start_time"])
        with gzip.open(events_path, "rt", encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event]  # the last one is empty
            return Profile(start_ns // 1000, events)
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"cannot read the profile {events_path}: {error!r}") from None
