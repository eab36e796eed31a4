"""The figures of a run as rows, as a table like that of nccl-tests, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import jax

import jaxhetero
from bench.harness.job import Conditions
from bench.harness.measure import Sample

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_VERSION = 2
_COLUMNS = (
    "bytes count dtype buckets engine median_ms p99_ms algbw_MB/s of_rate sent/S recv/S worker_s/GB reducer_s/GB "
    "worker_MB reducer_MB pings /limit"
)


@dataclass(frozen=True)
class Row:
    """The figures of one engine at one size."""

    engine: str
    bytes: int
    count: int
    dtype: str
    bucket_count: int
    """The all-reduces of one compiled program that carry the payload."""
    median_s: float
    p99_s: float
    algbw_bytes_per_s: float
    of_rate: float | None
    """algbw / rate of the interface."""
    sent_over_size: float | None
    """Bytes that the busiest worker's interface sent for each byte of payload."""
    received_over_size: float | None
    worker_cpu_s_per_gb: float
    """CPU seconds of one worker, on average, for each GB that it all-reduced."""
    reducer_cpu_s_per_gb: float | None
    """CPU seconds of one dedicated reducer, on average, for each GB that the job all-reduced."""
    worker_extra_bytes: int
    """The most resident memory of a worker, less operand, result, and its memory before the first payload."""
    reducer_extra_bytes: int | None
    """The most resident memory of a dedicated reducer, less its memory before the first payload."""
    over_limit: float
    """median_s / best possible time for the bytes on the wire."""
    round_trips: float
    """median_s / time of a ping."""
    times_faster_than: dict[str, float]
    wrong_count: int | None
    times_s: list[float]


def make_rows(samples: list[Sample], conditions: Conditions) -> list[Row]:
    return [_make_row(sample, samples, conditions) for sample in samples]


def _make_row(sample: Sample, samples: list[Sample], conditions: Conditions) -> Row:
    payload, rate = sample.payload, conditions.rate_bytes_per_s
    middle_s = median(sample.times_s)
    algbw = payload.bytes / middle_s
    moved_bytes = payload.bytes * sample.operation_count
    peers = [peer for peer in samples if peer.payload == payload and peer is not sample]
    reducers = conditions.reducer_count if sample.reducer_cpu_s else 0
    return Row(
        engine=sample.label,
        bytes=payload.bytes,
        count=payload.count,
        dtype=payload.dtype,
        bucket_count=payload.bucket_count,
        median_s=middle_s,
        p99_s=percentile(sample.times_s, 0.99),
        algbw_bytes_per_s=algbw,
        of_rate=algbw / rate if rate else None,
        sent_over_size=max(sample.sent_bytes) / moved_bytes if sample.sent_bytes else None,
        received_over_size=max(sample.received_bytes) / moved_bytes if sample.received_bytes else None,
        worker_cpu_s_per_gb=sample.worker_cpu_s / conditions.worker_count / moved_bytes * 1e9,
        reducer_cpu_s_per_gb=sample.reducer_cpu_s / reducers / moved_bytes * 1e9 if reducers else None,
        worker_extra_bytes=sample.worker_extra_bytes,
        reducer_extra_bytes=sample.reducer_extra_bytes if reducers else None,
        over_limit=middle_s / conditions.limit_s(sample.wire_bytes),
        round_trips=middle_s / conditions.round_trip_s,
        times_faster_than={peer.label: median(peer.times_s) / middle_s for peer in peers},
        wrong_count=sample.wrong_count,
        times_s=sample.times_s,
    )


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def format_table(rows: list[Row]) -> str:
    engines = list(dict.fromkeys(row.engine for row in rows))
    header = [*_COLUMNS.split(), *(f"x_{engine}" for engine in engines), "wrong"]
    return format_columns([header, *(_format_row(row, engines) for row in rows)])


def format_columns(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _format_row(row: Row, engines: list[str]) -> list[str]:
    return [
        str(row.bytes),
        str(row.count),
        row.dtype,
        str(row.bucket_count),
        row.engine,
        f"{row.median_s * 1e3:.3f}",
        f"{row.p99_s * 1e3:.3f}",
        f"{row.algbw_bytes_per_s / 1e6:.3f}",
        number(row.of_rate),
        number(row.sent_over_size),
        number(row.received_over_size),
        number(row.worker_cpu_s_per_gb),
        number(row.reducer_cpu_s_per_gb),
        f"{row.worker_extra_bytes / 1e6:.1f}",
        "-" if row.reducer_extra_bytes is None else f"{row.reducer_extra_bytes / 1e6:.1f}",
        number(row.round_trips),
        number(row.over_limit),
        *(number(row.times_faster_than.get(engine)) for engine in engines),
        "-" if row.wrong_count is None else str(row.wrong_count),
    ]


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 100 else f"{value:.0f}"


def write_json(
    path: Path,
    benchmark: str,
    rows: Sequence[DataclassInstance],
    conditions: Conditions,
    options: DataclassInstance,
    lab: str,
    **more: object,
) -> None:
    """Write the figures of a run and its circumstances as JSON. ``more`` are further fields."""
    # Of files their names: folders are those of one machine.
    shown = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
    content = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "machine": describe_machine(),
        "lab": lab,
        "options": shown,
        "conditions": dataclasses.asdict(conditions),
        **more,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_result(path, content)


def write_result(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON with one field on a line, and of a list one element, so that a diff shows which rows changed."""
    fields = [f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def _lines(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(element) for element in value) + "\n]"


def describe_machine() -> dict[str, str | int | None]:
    """The properties of this machine on which figures may depend. None of them identifies the machine."""
    return {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name"),
        "core_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "kernel": platform.release(),
        "tcp_congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxhetero": jaxhetero.__version__,
    }


def _first_value(path: Path, key: str) -> str:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return platform.machine()
