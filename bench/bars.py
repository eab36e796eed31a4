"""The bars: how fast this project promises to be, and the figures of a run that show whether it is.

A figure is computed from the JSON that a run of ``bench.record`` has written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Content = dict[str, Any]
"""The JSON of one run."""
Figure = tuple[str, bool | None]
"""A measured figure as text, and whether it meets its bar. None: there is no bar."""
Measure = Callable[[Content], Figure]


@dataclass(frozen=True)
class Bar:
    """One line of the table: a bar and the figure to compare with it."""

    what: str
    """The conditions of the measurement."""
    bar: str
    """The promise; empty if the figure is only for comparison."""
    run: str
    """The name of one of ``bench.record.RUNS``."""
    figure: Measure


def rows_of(content: Content, engine: str = "jaxhetero", least_bytes: int = 0) -> Iterator[Content]:
    """The rows of one engine, for payloads of at least ``least_bytes``."""
    return (row for row in content["rows"] if row["engine"] == engine and row.get("bytes", 0) >= least_bytes)


def _over_ideal(most: float | None) -> Measure:
    """The largest ratio of the time to the best possible time, and that time in units of S/B."""

    def figure(content: Content) -> Figure:
        worst = max(row["over_limit"] for row in rows_of(content))
        factor = content["conditions"]["best_factor"]
        return f"{worst:.3f} x {factor:.3f} = {worst * factor:.3f} S/B", None if most is None else worst <= most

    return figure


def _times_faster(least: float, least_bytes: int = 0) -> Measure:
    """How many times faster than gloo jaxhetero is."""

    def figure(content: Content) -> Figure:
        ratios = [row["times_faster_than"]["gloo"] for row in rows_of(content, least_bytes=least_bytes)]
        return f"{min(ratios):.2f} to {max(ratios):.2f} times", min(ratios) >= least

    return figure


def _peer(name: str, engine: str) -> Measure:
    """A figure of another engine, for comparison."""

    def figure(content: Content) -> Figure:
        values = [row[name] for row in rows_of(content, engine)]
        return f"{min(values):.2f} to {max(values):.2f} S/B", None

    return figure


def _traffic(name: str, unit: str) -> Measure:
    """A figure of the engine echo, the traffic alone: at each size, of its best window."""

    def figure(content: Content) -> Figure:
        found: dict[int, float] = {}
        for row in content["rows"]:
            if row["engine"].startswith("echo"):
                found[row["bytes"]] = min(row[name], found.get(row["bytes"], math.inf))
        return f"{min(found.values()):.3f} to {max(found.values()):.3f} {unit}", None

    return figure


def _traffic_against_gloo(content: Content) -> Figure:
    """How many times faster than gloo the traffic alone is."""
    ratios = [row["times_faster_than"]["gloo"] for row in rows_of(content, "echo")]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times", None


def _carried(most: float) -> Measure:
    """Bytes that the busiest worker's interface carries each way, over the bytes of the payload."""

    def figure(content: Content) -> Figure:
        worst = [max(row[name] for row in rows_of(content)) for name in ("sent_over_size", "received_over_size")]
        return f"{worst[0]:.3f} sent, {worst[1]:.3f} received", max(worst) <= most

    return figure


def _cpu(most: float) -> Measure:
    """The largest ratio of a worker's CPU seconds per GB to those of gloo at the same size."""

    def figure(content: Content) -> Figure:
        pairs = list(zip(rows_of(content), rows_of(content, "gloo"), strict=True))
        ratios = [ours["worker_cpu_s_per_gb"] / theirs["worker_cpu_s_per_gb"] for ours, theirs in pairs]
        ours, theirs = pairs[ratios.index(max(ratios))]
        shown = f"{ours['worker_cpu_s_per_gb']:.2f} against {theirs['worker_cpu_s_per_gb']:.2f} s/GB"
        return f"{max(ratios):.2f} ({shown})", max(ratios) <= most

    return figure


def _pings(size_bytes: int, most: float) -> Measure:
    """The time over that of a ping."""

    def figure(content: Content) -> Figure:
        row = next(row for row in rows_of(content) if row["bytes"] == size_bytes)
        ping_us = content["conditions"]["round_trip_s"] * 1e6
        return f"{row['round_trips']:.1f} ({row['median_s'] * 1e6:.0f} of {ping_us:.0f} us)", row["round_trips"] <= most

    return figure


def _memory(worker_bytes: int, reducer_bytes: int) -> Measure:
    """The memory of a worker beyond operand and result, and the memory of a reducer.

    A worker may take ``worker_bytes`` beyond the size of the payload, a reducer ``reducer_bytes``.
    """

    def figure(content: Content) -> Figure:
        row = next(rows_of(content))
        worker, reducer = row["worker_extra_bytes"], row["reducer_extra_bytes"]
        met = worker <= row["bytes"] + worker_bytes and reducer <= reducer_bytes
        return f"worker {worker / 2**20:.1f} MiB, reducer {reducer / 2**20:.1f} MiB", met

    return figure


def _concurrent(most: float | None) -> Measure:
    """The time of many concurrent all-reduces over the time of one all-reduce of the same bytes."""

    def figure(content: Content) -> Figure:
        one, many = sorted(rows_of(content), key=lambda row: row["bucket_count"])
        ratio = many["median_s"] / one["median_s"]
        return f"{ratio:.3f}", None if most is None else ratio <= most

    return figure


def _over_traffic(name: str, most: float, engine: str = "jaxhetero") -> Measure:
    """The largest ratio of a figure to that of the engine echo, the traffic alone, in its best window for the size."""

    def figure(content: Content) -> Figure:
        pairs = []
        for row in rows_of(content, engine):
            traffic = [peer for peer in content["rows"] if peer["engine"].startswith("echo")]
            least = min(peer[name] for peer in traffic if peer["bytes"] == row["bytes"])
            pairs.append((row[name] / least, row[name], least))
        ratio, ours, theirs = max(pairs)
        unit = "s" if name == "median_s" else "s/GB"
        return f"{ratio:.2f} ({ours:.3f} against {theirs:.3f} {unit})", ratio <= most

    return figure


def _faster_than(engine: str, least: float) -> Measure:
    """How many times faster than another engine jaxhetero is."""

    def figure(content: Content) -> Figure:
        ratios = [row["times_faster_than"][engine] for row in rows_of(content)]
        return f"{min(ratios):.2f} to {max(ratios):.2f} times", min(ratios) >= least

    return figure


def _strand_cost(strands: int, most: float) -> Measure:
    """CPU seconds per GB with so many strands, over those with one; sockets, and shared memory."""

    def figure(content: Content) -> Figure:
        rows = {row["engine"]: row for row in content["rows"]}
        ratios = [
            rows[f"jaxhetero:strands={strands}{way}"][name] / rows[f"jaxhetero:strands=1{way}"][name]
            for way in ("+shared_memory=0", "")
            for name in ("worker_cpu_s_per_gb", "reducer_cpu_s_per_gb")
        ]
        return "worker {:.2f}, reducer {:.2f}; in shared memory {:.2f}, {:.2f}".format(*ratios), max(ratios) <= most

    return figure


def _strand_rate(strands: int) -> Measure:
    """GB/s with so many strands; sockets, and shared memory."""

    def figure(content: Content) -> Figure:
        rows = {row["engine"]: row for row in content["rows"]}
        rates = [
            rows[f"jaxhetero:strands={strands}{way}"]["algbw_bytes_per_s"] / 1e9 for way in ("+shared_memory=0", "")
        ]
        return "{:.2f} GB/s; in shared memory {:.2f}".format(*rates), None

    return figure


def _sum_over_copy(workers: int, least: float | None, dtype: str = "float32") -> Measure:
    """How fast one core sums against how fast it copies the same memory."""

    def figure(content: Content) -> Figure:
        row = next(row for row in content["rows"] if (row["type"], row["workers"]) == (dtype, workers))
        rates = row["sum_bytes_per_s"], row["copy_bytes_per_s"]
        ratio = rates[0] / rates[1]
        shown = f"{ratio:.2f} ({rates[0] / 1e9:.1f} against {rates[1] / 1e9:.1f} GB/s)"
        return shown, None if least is None else ratio >= least

    return figure


def _efficiency(least: float | None) -> Measure:
    """The scaling efficiency of train steps with eight workers, beside that of other all-reduces."""

    def figure(content: Content) -> Figure:
        rows = {row["engine"]: row for row in content["rows"] if row["worker_count"] == 8}
        ours, gloo = rows["jaxhetero"], rows["gloo"]
        shown = (
            f"{ours['efficiency']:.1%}, overlap {ours['overlap']:.0%} (gloo {gloo['efficiency']:.1%}; at best "
            f"{ours['best_efficiency']:.1%}, ideal ring {ours['ring_efficiency']:.1%})"
        )
        return shown, None if least is None else ours["efficiency"] >= least

    return figure


_MIB = 1 << 20
BARS = (
    Bar("n = 8, k = 8, float32, 4 MiB and up", "at most 1.03 S/B", "large", _over_ideal(1.03)),
    Bar("the same, results apart", "", "apart", _over_ideal(None)),
    Bar("the same, its traffic alone", "", "large", _traffic("over_limit", "S/B")),
    Bar("the same, worker NIC bytes / S", "at most 1.02 each way", "large", _carried(1.02)),
    Bar("the same, against gloo", "at least 1.70 times", "large", _times_faster(1.70)),
    Bar("the same, gloo", "", "large", _peer("over_limit", "gloo")),
    Bar("the same, MPICH, 16 MiB", "", "mpi", _peer("over_limit", "mpi")),
    Bar("the same, worker CPU per GB / gloo's", "at most 0.50", "large", _cpu(0.5)),
    Bar("the same, worker CPU of the traffic alone", "", "large", _traffic("worker_cpu_s_per_gb", "s/GB")),
    Bar("n = 4, k = 4, 1 Gbit/s, 64 MiB", "at most 1.02 S/B", "gigabit", _over_ideal(1.02)),
    Bar("the same, its traffic alone", "", "gigabit", _traffic("over_limit", "S/B")),
    Bar("the same, gloo", "", "gigabit", _peer("over_limit", "gloo")),
    *(
        Bar(f"n = 8, k = {k}, co-located fill in", "limit + 5 %", f"colocated-{k}", _over_ideal(1.05))
        for k in (0, 1, 2, 4, 6, 8)
    ),
    Bar("half of 8 reducers at half rate, co-located fill in", "limit + 8 %", "unequal", _over_ideal(1.08)),
    Bar("bfloat16 wire against gloo float32", "at least 3.3 times", "bfloat16", _times_faster(3.3)),
    Bar("4 B to 64 KiB against gloo", "at least 8 times", "small", _times_faster(8)),
    Bar("the same, its traffic alone", "", "small", _traffic_against_gloo),
    Bar("4 KiB in pings", "at most 3", "small", _pings(4096, 3)),
    Bar("loopback, n = 4, k = 4, 4 B to 64 MiB against gloo", "faster", "loopback", _times_faster(1)),
    Bar("the same, 16 MiB and up", "at least 2 times", "loopback", _times_faster(2, 16 * _MIB)),
    Bar("the same, its traffic alone over sockets, 4 B to 64 MiB", "", "loopback", _traffic_against_gloo),
    Bar("n = 16, k = 16, 100 Mbit/s, 16 MiB", "at most 1.05 S/B", "sixteen", _over_ideal(1.05)),
    Bar("the same, its traffic alone", "", "sixteen", _traffic("over_limit", "S/B")),
    Bar("BERT-large step, n = 8, a fifth of it", "efficiency at least 92 %", "step-bert-fifth", _efficiency(0.92)),
    Bar("the same, a tenth", "", "step-bert-tenth", _efficiency(None)),
    Bar("the same, a twentieth", "", "step-bert-twentieth", _efficiency(None)),
    Bar("the same, a tenth, bfloat16 wire", "", "step-bert-bfloat16", _efficiency(None)),
    Bar("ResNet-50 step, n = 8, a fifth of it", "", "step-resnet50", _efficiency(None)),
    Bar("Mask R-CNN step, n = 8, a fifth of it", "", "step-mask-rcnn", _efficiency(None)),
    Bar("memory, 256 MiB", "worker S + 16, reducer 64 MiB", "memory", _memory(16 * _MIB, 64 * _MIB)),
    Bar("24 concurrent buckets / one", "at most 1.03", "concurrent", _concurrent(1.03)),
    Bar("50 concurrent buckets of 0.5 MiB / one", "", "many", _concurrent(None)),
    Bar(
        "one strand, n = 2, k = 2, no limit, 64 and 256 MiB: worker CPU per GB / the traffic's",
        "at most 1.30",
        "unlimited",
        _over_traffic("worker_cpu_s_per_gb", 1.30),
    ),
    Bar(
        "the same without failover",
        "at most 1.15",
        "unlimited",
        _over_traffic("worker_cpu_s_per_gb", 1.15, "jaxhetero:failover=0"),
    ),
    Bar("the same, reducer", "at most 1.20", "unlimited", _over_traffic("reducer_cpu_s_per_gb", 1.20)),
    Bar("the same, time", "at most 1.25", "unlimited", _over_traffic("median_s", 1.25)),
    Bar("the same, against gloo", "at least 1.8 times", "unlimited", _times_faster(1.8)),
    *(Bar(f"{strands} strands, n = 2, k = 2, sockets", "", "cores", _strand_rate(strands)) for strands in (1, 2, 4)),
    Bar("4 strands, CPU per GB / that of one", "at most 1.05", "cores", _strand_cost(4, 1.05)),
    Bar(
        "two interfaces of 200 Mbit/s against one",
        "at least 1.9 times",
        "rails",
        _faster_than("jaxhetero:interface=eth0", 1.9),
    ),
    Bar("the sum of 8 workers' float32 / a copy, one core", "at least 0.7", "sums", _sum_over_copy(8, 0.7)),
    Bar("the same of 64", "", "sums", _sum_over_copy(64, None)),
    Bar("the same of 8 workers' bfloat16", "", "sums", _sum_over_copy(8, None, "bfloat16")),
)
