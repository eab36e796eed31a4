"""Measures what this project promises of its speed, and prints the table of it.

    python -m bench.record                      every run, then the table
    python -m bench.record --only large,small   these runs, then the table of all results there are
    python -m bench.record --table              only the table

A run is one command below, which takes a minute or a few; it writes FOLDER/NAME.json. Nothing else should run on
the machine meanwhile.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from bench import train_step
from bench.errors import BenchError
from bench.harness import report
from bench.harness.command import run_command
from bench.harness.job import Conditions
from bench.harness.plot import write_plot

_ROOT = Path(__file__).parent.parent

_EIGHT = "bench.allreduce --workers 8 --reducers 8 --rate 200mbit"
RUNS = {
    "large": (
        f"{_EIGHT} --in-place --sizes 4MiB,16MiB,64MiB --engine jaxhetero,gloo,echo:8192x2,echo:32768x2 --rounds 4"
    ),
    "apart": f"{_EIGHT} --sizes 4MiB,16MiB,64MiB --engine jaxhetero --rounds 4",
    "mpi": f"{_EIGHT} --sizes 16MiB --engine jaxhetero,mpi --rounds 2 --warmup 1",
    "gigabit": (
        "bench.allreduce --workers 4 --reducers 4 --rate 1gbit --in-place --sizes 64MiB "
        "--engine jaxhetero,gloo,echo:131072x2"
    ),
    **{
        f"colocated-{count}": (
            f"bench.allreduce --workers 8 --reducers {count} --colocated 8 --rate 200mbit --in-place "
            "--sizes 16MiB --engine jaxhetero --rounds 4"
        )
        for count in (0, 1, 2, 4, 6, 8)
    },
    "unequal": (
        f"{_EIGHT} --colocated 8 --reducer-rates 200mbit,100mbit --in-place --sizes 16MiB --engine jaxhetero --rounds 4"
    ),
    "bfloat16": f"{_EIGHT} --wire-dtype bfloat16 --in-place --sizes 16MiB,64MiB --engine jaxhetero,gloo --rounds 2",
    "small": f"{_EIGHT} --sizes 4,64,1KiB,4KiB,16KiB,64KiB --engine jaxhetero,gloo,echo --batch 50",
    "loopback": (
        "bench.allreduce --workers 4 --reducers 4 --loopback --rate none "
        "--sizes 4,4KiB,64KiB,1MiB,4MiB,16MiB,64MiB --engine jaxhetero,gloo,echo"
    ),
    "sixteen": (
        "bench.allreduce --workers 16 --reducers 16 --rate 100mbit --in-place --sizes 16MiB "
        "--engine jaxhetero,echo:8192x2 --rounds 3"
    ),
    "memory": f"{_EIGHT} --sizes 256MiB --engine jaxhetero --rounds 1 --warmup 1 --batch 1",
    "concurrent": f"{_EIGHT} --concurrent 24 --in-place --sizes 48MiB --engine jaxhetero --rounds 3 --warmup 1",
    "many": f"{_EIGHT} --concurrent 50 --in-place --sizes 25MiB --engine jaxhetero --rounds 3 --warmup 1",
    **{
        f"step-{name}": f"bench.train_step {options} --workers 8 --engine jaxhetero,gloo"
        for name, options in {
            "bert-fifth": "--profile bert-large --size-scale 0.2",
            "bert-tenth": "--profile bert-large --size-scale 0.1",
            "bert-twentieth": "--profile bert-large --size-scale 0.05",
            "bert-bfloat16": "--profile bert-large --size-scale 0.1 --wire-dtype bfloat16",
            "resnet50": "--profile resnet50 --size-scale 0.2",
        }.items()
    },
    "step-scaling": (
        "bench.train_step --profile bert-large --size-scale 0.02 --workers 1,2,4,8 --engine jaxhetero,gloo "
        "--rounds 1 --batch 3"
    ),
}

Content = dict[str, Any]
Figure = tuple[str, bool | None]
"""What was measured, and whether it meets the bar; None where there is none."""


@dataclass(frozen=True)
class Bar:
    """One line of the table."""

    what: str
    bar: str
    run: str
    """One of ``RUNS``."""
    figure: Callable[[Content], Figure]


def _rows(content: Content, engine: str = "jaxhetero", least_bytes: int = 0) -> Iterator[Content]:
    return (row for row in content["rows"] if row["engine"] == engine and row.get("bytes", 0) >= least_bytes)


def _at_most(name: str, most: float, unit: str = "", least_bytes: int = 0) -> Callable[[Content], Figure]:
    def figure(content: Content) -> Figure:
        worst = max(row[name] for row in _rows(content, least_bytes=least_bytes))
        return f"{worst:.3f}{unit}", worst <= most

    return figure


def _over_ideal(most: float | None) -> Callable[[Content], Figure]:
    """The ratio to the limit, with the limit in units of S/B."""

    def figure(content: Content) -> Figure:
        worst = max(row["over_limit"] for row in _rows(content))
        factor = content["conditions"]["best_factor"]
        return f"{worst:.3f} x {factor:.3f} = {worst * factor:.3f} S/B", None if most is None else worst <= most

    return figure


def _times_faster(least: float, least_bytes: int = 0) -> Callable[[Content], Figure]:
    def figure(content: Content) -> Figure:
        ratios = [row["times_faster_than"]["gloo"] for row in _rows(content, least_bytes=least_bytes)]
        return f"{min(ratios):.2f} to {max(ratios):.2f} times", min(ratios) >= least

    return figure


def _peer(name: str, engine: str) -> Callable[[Content], Figure]:
    def figure(content: Content) -> Figure:
        values = [row[name] for row in _rows(content, engine)]
        return f"{min(values):.2f} to {max(values):.2f} S/B", None

    return figure


def _traffic(name: str, unit: str) -> Callable[[Content], Figure]:
    """What the traffic alone takes; at each size with the better window."""

    def figure(content: Content) -> Figure:
        found: dict[int, float] = {}
        for row in content["rows"]:
            if row["engine"].startswith("echo"):
                found[row["bytes"]] = min(row[name], found.get(row["bytes"], math.inf))
        return f"{min(found.values()):.3f} to {max(found.values()):.3f} {unit}", None

    return figure


def _traffic_against_gloo(content: Content) -> Figure:
    ratios = [row["times_faster_than"]["gloo"] for row in _rows(content, "echo")]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times", None


def _carried(most: float) -> Callable[[Content], Figure]:
    def figure(content: Content) -> Figure:
        worst = [max(row[name] for row in _rows(content)) for name in ("sent_over_size", "received_over_size")]
        return f"{worst[0]:.3f} sent, {worst[1]:.3f} received", max(worst) <= most

    return figure


def _cpu(most: float) -> Callable[[Content], Figure]:
    def figure(content: Content) -> Figure:
        pairs = list(zip(_rows(content), _rows(content, "gloo"), strict=True))
        ratios = [ours["worker_cpu_s_per_gb"] / theirs["worker_cpu_s_per_gb"] for ours, theirs in pairs]
        ours, theirs = pairs[ratios.index(max(ratios))]
        shown = f"{ours['worker_cpu_s_per_gb']:.2f} against {theirs['worker_cpu_s_per_gb']:.2f} s/GB"
        return f"{max(ratios):.2f} ({shown})", max(ratios) <= most

    return figure


def _pings(size_bytes: int, most: float) -> Callable[[Content], Figure]:
    def figure(content: Content) -> Figure:
        row = next(row for row in _rows(content) if row["bytes"] == size_bytes)
        ping_us = content["conditions"]["round_trip_s"] * 1e6
        return f"{row['round_trips']:.1f} ({row['median_s'] * 1e6:.0f} of {ping_us:.0f} us)", row["round_trips"] <= most

    return figure


def _memory(worker_bytes: int, reducer_bytes: int) -> Callable[[Content], Figure]:
    def figure(content: Content) -> Figure:
        row = next(_rows(content))
        worker, reducer = row["worker_extra_bytes"], row["reducer_extra_bytes"]
        met = worker <= row["bytes"] + worker_bytes and reducer <= reducer_bytes
        return f"worker {worker / 2**20:.1f} MiB, reducer {reducer / 2**20:.1f} MiB", met

    return figure


def _concurrent(most: float | None) -> Callable[[Content], Figure]:
    def figure(content: Content) -> Figure:
        one, many = sorted(_rows(content), key=lambda row: row["bucket_count"])
        ratio = many["median_s"] / one["median_s"]
        return f"{ratio:.3f}", None if most is None else ratio <= most

    return figure


def _efficiency(least: float | None) -> Callable[[Content], Figure]:
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
    Bar("memory, 256 MiB", "worker S + 16, reducer 64 MiB", "memory", _memory(16 * _MIB, 64 * _MIB)),
    Bar("24 concurrent buckets / one", "at most 1.03", "concurrent", _concurrent(1.03)),
    Bar("50 concurrent buckets of 0.5 MiB / one", "", "many", _concurrent(None)),
)


@dataclass(frozen=True)
class Options:
    """Measures what this project promises of its speed, and prints the table of it."""

    only: str | None = None
    """Names of runs, or their beginnings, as in large,colocated. Default: all."""
    folder: Path = _ROOT / "bench" / "results"
    """Where the results are."""
    table: bool = False
    """Only print the table."""
    plots: bool = False
    """Draw allreduce.png and train_step.png there, from the results."""
    list: bool = False
    """Only print the commands."""

    def runs(self) -> dict[str, str]:
        if self.only is None:
            return RUNS
        words = self.only.split(",")
        if unknown := [word for word in words if not any(name.startswith(word) for name in RUNS)]:
            raise BenchError(f"--only {','.join(unknown)}: there are {', '.join(RUNS)}")
        return {name: text for name, text in RUNS.items() if name.startswith(tuple(words))}


def measure(options: Options) -> list[str]:
    """The names of the runs that failed."""
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, text in options.runs().items():
        command = [sys.executable, "-m", *shlex.split(text), "--json", str(options.folder / f"{name}.json")]
        print(f"## {name}: python {shlex.join(command[1:])}", flush=True)
        begin_s = time.monotonic()
        if subprocess.run(command, cwd=_ROOT).returncode != 0:
            failed.append(name)
        print(f"## {name}: {time.monotonic() - begin_s:.0f} s", flush=True)
    return failed


def format_markdown(folder: Path) -> str:
    """The table of all bars whose results are there, and the machine they are from."""
    lines = ["| what | bar | measured | met |", "|---|---|---|---|"]
    machines = {}
    for bar in BARS:
        path = folder / f"{bar.run}.json"
        if not path.is_file():
            lines.append(f"| {bar.what} | {bar.bar} | not measured | |")
            continue
        content = json.loads(path.read_text())
        machines[json.dumps(content["machine"])] = content["machine"]
        shown, met = bar.figure(content)
        lines.append(f"| {bar.what} | {bar.bar} | {shown} | {'' if met is None else 'yes' if met else 'no'} |")
    return "\n".join([*lines, "", *map(_describe, machines.values())])


def _describe(machine: Content) -> str:
    return (
        f"{machine['core_count']} cores of {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']} {machine['kernel']}, TCP {machine['tcp_congestion_control']}, "
        f"Python {machine['python']}, jax {machine['jax']}, jaxhetero {machine['jaxhetero']}"
    )


def write_plots(folder: Path) -> None:
    """Of the runs with eight workers at 200 Mbit/s, and of the train steps from one to eight."""
    contents = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("small", "large", "mpi")}
    # Our own of the run beside MPICH is the same size again.
    parts = [*contents["small"]["rows"], *contents["large"]["rows"], *_rows(contents["mpi"], "mpi")]
    shown = [row for row in parts if not row["engine"].startswith("echo")]
    rows = [report.Row(**row) for row in sorted(shown, key=lambda row: row["bytes"])]
    conditions = Conditions(**contents["large"]["conditions"])
    write_plot(folder / "allreduce.png", rows, conditions, "all-reduce of float32, n = 8, k = 8, 200 Mbit/s")
    steps = [train_step.Row(**row) for row in json.loads((folder / "step-scaling.json").read_text())["rows"]]
    train_step.write_plot(folder / "train_step.png", steps, "BERT-large, a reducer for each worker, 200 Mbit/s")


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        options = tyro.cli(Options, prog="python -m bench.record", args=arguments, description=__doc__)
        if options.list:
            for name, text in options.runs().items():
                print(f"{name}: python -m {text}")
            return 0
        failed = [] if options.table else measure(options)
        print(format_markdown(options.folder))
        if options.plots:
            write_plots(options.folder)
        if failed:
            print(f"error: failed: {' '.join(failed)}", file=sys.stderr)
        return 1 if failed else 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
