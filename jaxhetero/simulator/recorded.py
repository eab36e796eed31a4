"""A train step as a job's timeline has it: its buckets, when they are ready, and what messages cost."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jaxhetero.errors import ConfigError
from jaxhetero.simulator.hosts import Costs
from jaxhetero.simulator.job import Bucket

_FEWEST_STEPS = 5
_US = 1e-6


class _Round(NamedTuple):
    bytes: int
    requested_us: int
    end_us: int


_Op = tuple[str, int]  # the name, and which of the ops of that name
_Rounds = dict[_Op, list[_Round]]  # of a worker, in their order


@dataclass(frozen=True)
class RecordedStep:
    """The medians over all workers and steps of a timeline, but the first steps."""

    worker_count: int
    step_count: int
    """Of each worker, those left out included."""
    step_s: float
    """From the end of a step's last round to the last request of the next one: without what waits for rounds."""
    buckets: tuple[Bucket, ...]
    """Of a step, in the order in which they are ready."""
    costs: Costs | None
    """As measured at the start of the job; None where they were not."""

    @property
    def gradient_bytes(self) -> int:
        """Of a step, on the wire."""
        return sum(bucket.bytes for bucket in self.buckets)


def read_step(path: Path) -> RecordedStep:
    """The step of a timeline of ``jaxhetero launch --timeline``.

    Args:
      path: of the file.

    Raises:
      ConfigError: it cannot be read, has too few steps, or rounds that go on under the next step.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        workers = _rounds_by_worker(trace["traceEvents"])
        costs = _costs(trace.get("otherData", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read the timeline {path}: {error!r}") from None
    if not workers:
        raise ConfigError(f"{path} has no rounds: give a timeline of jaxhetero launch --timeline")
    count, ops = _ops_of_steps(workers)
    if count < _FEWEST_STEPS:
        raise ConfigError(f"{path} has {count} steps; an estimate takes at least {_FEWEST_STEPS}")
    ready_us: dict[_Op, list[int]] = defaultdict(list)
    step_us: list[int] = []
    for rounds in workers:
        for number in range(max(2, count // 10), count):
            begin_us = max(rounds[op][number - 1].end_us for op in ops)
            for op in ops:
                ready_us[op].append(rounds[op][number].requested_us - begin_us)
            step_us.append(max(rounds[op][number].requested_us for op in ops) - begin_us)
    step_s = _US * median(step_us)
    if step_s <= 0 or min(median(times) for times in ready_us.values()) < 0:
        raise ConfigError(f"in {path} rounds go on under the next step: give a timeline of a job without across_steps")
    buckets = [
        Bucket(int(median(round.bytes for rounds in workers for round in rounds[op])), min(_US * median(times), step_s))
        for op, times in ready_us.items()
    ]
    ordered = tuple(sorted(buckets, key=lambda bucket: bucket.ready_s))
    return RecordedStep(len(workers), count, step_s, ordered, costs)


def _rounds_by_worker(events: list[Mapping[str, Any]]) -> list[_Rounds]:
    slices = [event for event in events if event.get("ph") == "X" and event.get("cat") == "round"]
    slices.sort(key=lambda event: (event["args"]["round"], event["ts"]))
    workers: dict[int, _Rounds] = defaultdict(lambda: defaultdict(list))
    seen: Counter[tuple[int, str, int]] = Counter()
    for event in slices:
        key = event["pid"], event["name"], event["args"]["round"]
        op = event["name"], seen[key]
        seen[key] += 1
        record = _Round(event["args"]["bytes"], event["ts"], event["ts"] + event["dur"])
        workers[event["pid"]][op].append(record)
    return list(workers.values())


def _ops_of_steps(workers: list[_Rounds]) -> tuple[int, list[_Op]]:
    """How many steps there are, and the ops that run in each of them: of all counts of rounds, that with most bytes."""
    bytes_by_count: Counter[int] = Counter()
    ops_by_count: dict[int, list[_Op]] = defaultdict(list)
    for op, rounds in workers[0].items():
        counts = {len(other.get(op, ())) for other in workers}
        if counts == {len(rounds)}:
            bytes_by_count[len(rounds)] += sum(round.bytes for round in rounds)
            ops_by_count[len(rounds)].append(op)
    if not bytes_by_count:
        return 0, []
    ((count, _),) = bytes_by_count.most_common(1)
    return count, ops_by_count[count]


def _costs(about: Mapping[str, Any]) -> Costs | None:
    metrics = [worker["metrics"] for worker in about.values() if isinstance(worker, dict) and "metrics" in worker]
    messages_ns = [counts["message_ns"] for counts in metrics if counts.get("message_ns", 0) > 0]
    bytes_ps = [counts.get("byte_ps", 0) for counts in metrics if counts.get("message_ns", 0) > 0]
    if not messages_ns:
        return None
    return Costs(s_per_message=1e-9 * median(messages_ns), s_per_gb=1e-3 * median(bytes_ps))
