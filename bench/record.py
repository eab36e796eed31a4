"""Measures the figures that the bars of bench/bars.py ask for, and prints the table of both.

    python -m bench.record                      every run, then the table
    python -m bench.record --only large,small   these runs, then the table of all results there are
    python -m bench.record --table              only the table

A run is one of the commands below. It takes one minute or a few, and writes FOLDER/NAME.json. Nothing else should run
on the machine meanwhile.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from bench.bars import BARS, Content, rows_of
from bench.harness import report, step_report
from bench.harness.command import run_command
from bench.harness.errors import BenchError
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
    "unlimited": (
        "bench.allreduce --workers 2 --reducers 2 --rate none --in-place --sizes 64MiB,256MiB "
        "--engine jaxhetero,jaxhetero:failover=0,gloo,echo:262144x8,echo:131072x8 --rounds 4"
    ),
    "cores": "bench.cores --strands 1,2,4 --size 256MiB",
    "rails": (
        "bench.allreduce --workers 2 --reducers 2 --rate 200mbit --nics 2 --in-place --sizes 16MiB,64MiB "
        "--engine jaxhetero,jaxhetero:interface=eth0 --rounds 4"
    ),
    "sums": "bench.sums",
    "many": f"{_EIGHT} --concurrent 50 --in-place --sizes 25MiB --engine jaxhetero --rounds 3 --warmup 1",
    **{
        f"step-{name}": f"bench.train_step {options} --workers 8 --engine jaxhetero,gloo"
        for name, options in {
            "bert-fifth": "--profile bert-large --size-scale 0.2",
            "bert-tenth": "--profile bert-large --size-scale 0.1",
            "bert-twentieth": "--profile bert-large --size-scale 0.05",
            "bert-bfloat16": "--profile bert-large --size-scale 0.1 --wire-dtype bfloat16",
            "resnet50": "--profile resnet50 --size-scale 0.2",
            "mask-rcnn": "--profile mask-rcnn --size-scale 0.2",
        }.items()
    },
    "step-scaling": (
        "bench.train_step --profile bert-large --size-scale 0.02 --workers 1,2,4,8 --engine jaxhetero,gloo "
        "--rounds 1 --batch 3"
    ),
}


@dataclass(frozen=True)
class Options:
    """Measures the figures that the bars ask for, and prints the table of both."""

    only: str | None = None
    """Names of runs, or the beginnings of names, as in large,colocated. Default: all runs."""
    folder: Path = _ROOT / "bench" / "results"
    """The folder of the results."""
    table: bool = False
    """Only print the table."""
    plots: bool = False
    """Draw allreduce.png and train_step.png in the folder, from its results."""
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
    """Run the chosen commands. Returns the names of the runs that failed."""
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
    """The table of all bars with the figures of the results in ``folder``, and the machines that measured them."""
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
    """Draw the all-reduces of eight workers at 200 Mbit/s, and the train steps of one to eight workers."""
    contents = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("small", "large", "mpi")}
    # Only MPICH's rows of its run: jaxhetero has rows of that size in another run.
    parts = [*contents["small"]["rows"], *contents["large"]["rows"], *rows_of(contents["mpi"], "mpi")]
    shown = [row for row in parts if not row["engine"].startswith("echo")]
    rows = [report.Row(**row) for row in sorted(shown, key=lambda row: row["bytes"])]
    conditions = Conditions(**contents["large"]["conditions"])
    write_plot(folder / "allreduce.png", rows, conditions, "all-reduce of float32, n = 8, k = 8, 200 Mbit/s")
    steps = [step_report.Row(**row) for row in json.loads((folder / "step-scaling.json").read_text())["rows"]]
    step_report.write_plot(folder / "train_step.png", steps, "BERT-large, a reducer for each worker, 200 Mbit/s")


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
