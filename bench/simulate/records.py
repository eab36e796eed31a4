"""Simulates the lab's runs, and prints what was measured and what was simulated side by side.

    python -m bench.simulate                           the record: bench/results
    python -m bench.simulate --only large,sixteen      runs of these names, or with these beginnings
    python -m bench.simulate --measure FOLDER          measures the record's runs over a network, and cases that the
                                                       simulator has not seen, into FOLDER; then simulates those
    python -m bench.simulate --measure FOLDER --only new,large     some of them

The lab's hosts are modelled from what is known of them (lab/netlab): interfaces are token buckets of 64 KiB whose
rate counts Ethernet's headers, and all processes share two cores. What a message costs them is the record's own.
Nothing else is fitted to the measured times. --measure wants root and a quiet machine.

The columns:

    measured, simulated   the time over the best possible time; of a train step, its efficiency
    error                 simulated / measured - 1; of a train step, the difference in points
    cpu                   the processor seconds per GB of a worker, measured and simulated
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from bench.accelerator.profiles import PROFILES
from bench.accelerator.schedule import make_schedule
from bench.bars import Content, rows_of
from bench.harness.command import check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.report import format_columns, write_result
from bench.record import RUNS
from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES
from jaxhetero.simulator import Bucket, Costs, Host, Job, Network, Outcome, simulate, simulate_steps
from lab.netlab import Rate

_ROOT = Path(__file__).parents[2]
_WIRE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GB = 1e9

# lab/netlab: `tbf ... burst 64kb`, Ethernet's header without checksum and gap, and two cores for all hosts. A socket
# has about two packets in the queue at a time (TCP small queues).
_BURST_BYTES = 65536
_PACKET_OVERHEAD_BYTES = 66
_PIECE_BYTES = 2 * 1448
_MACHINE = "the lab"
_CORES = 2
# From bench/results: the processor time of a worker and a GB in chunks of 8 KiB and of 32 KiB (large.json, 4 and
# 64 MiB), and of a call with 64 bytes (small.json).
_COSTS = Costs(s_per_call=100e-6, s_per_message=7.6e-6, s_per_gb=0.44, wake_up_s=0)

# For --measure. Of the engines, ours alone is simulated; without MPI, that run is one of "apart".
RECORD = {
    name: re.sub(r"--engine \S+", "--engine jaxhetero", text)
    for name, text in RUNS.items()
    if re.search(r"--rate \d|^bench.train_step", text) and name != "mpi"
}
# Cases that were not used while the simulator was built. In place, sums are exact for numbers of workers
# that are powers of two. The others move 4 MiB, which memory that is not in place does not slow down.
_APART = "bench.allreduce --engine jaxhetero --rounds 4"
_IN_PLACE = f"{_APART} --in-place"
NEW_CASES = {
    "new-six": f"{_APART} --workers 6 --reducers 6 --rate 200mbit --sizes 4MiB",
    "new-five-three": f"{_APART} --workers 5 --reducers 3 --colocated 5 --rate 200mbit --sizes 4MiB",
    "new-more-reducers": f"{_IN_PLACE} --workers 4 --reducers 6 --rate 200mbit --sizes 32MiB",
    "new-four-three": f"{_IN_PLACE} --workers 4 --reducers 3 --colocated 4 --rate 200mbit --sizes 8MiB,32MiB",
    "new-some-inside": f"{_IN_PLACE} --workers 8 --reducers 5 --colocated 3 --rate 200mbit --sizes 16MiB",
    "new-slow-reducer": (
        f"{_IN_PLACE} --workers 8 --reducers 3 --colocated 8 --rate 200mbit --reducer-rates 200mbit,200mbit,50mbit "
        "--sizes 16MiB"
    ),
    "new-sixteen": f"{_IN_PLACE} --workers 16 --reducers 4 --colocated 16 --rate 100mbit --sizes 12MiB",
    "new-concurrent": f"{_IN_PLACE} --workers 4 --reducers 4 --rate 200mbit --concurrent 6 --sizes 24MiB",
    "new-bfloat16": (
        f"{_IN_PLACE} --workers 8 --reducers 4 --colocated 8 --rate 200mbit --wire-dtype bfloat16 --sizes 32MiB"
    ),
    "new-faster": f"{_IN_PLACE} --workers 4 --reducers 2 --colocated 4 --rate 500mbit --sizes 64MiB",
    "new-rails": f"{_IN_PLACE} --workers 4 --reducers 2 --colocated 4 --rate 100mbit --nics 2 --sizes 16MiB",
    "new-small": f"{_IN_PLACE} --workers 4 --reducers 4 --rate 200mbit --sizes 256KiB,1MiB",
    "new-step": (
        "bench.train_step --profile resnet50 --size-scale 0.2 --workers 6 --reducers 3 --colocated 6 --rate 200mbit "
        "--engine jaxhetero"
    ),
}


@dataclass(frozen=True)
class Options:
    """Simulates the lab's runs, and prints what was measured and what was simulated side by side."""

    only: str | None = None
    """Names of runs, or the beginnings of names, as in large,colocated. Default: all in the folder."""
    folder: Path = _ROOT / "bench" / "results"
    """The folder of the measured runs."""
    measure: Path | None = None
    """Measure the runs into this folder first, and then simulate those."""
    json: Path | None = None
    """Write all figures to this file."""

    def __post_init__(self) -> None:
        check_folders(self.json)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    run: str
    what: str
    measured: float
    simulated: float
    error: float
    """Relative; of a train step, in points of its efficiency."""
    measured_cpu_s_per_gb: float | None = None
    simulated_cpu_s_per_gb: float | None = None
    is_step: bool = False

    def cells(self) -> list[str]:
        cpu = [self.measured_cpu_s_per_gb, self.simulated_cpu_s_per_gb]
        return [
            self.run,
            self.what,
            f"{self.measured:.3f}",
            f"{self.simulated:.3f}",
            f"{100 * self.error:+.1f} {'points' if self.is_step else '%'}",
            *("" if value is None else f"{value:.2f}" for value in cpu),
        ]


def simulate_run(name: str, content: Content) -> Iterator[Case]:
    """The rows of a measured run that went over a network with rates; none of a run of another sort."""
    if not content.get("conditions", {}).get("rate_bytes_per_s"):
        return
    options = content["options"]
    if content["benchmark"] == "allreduce" and options.get("collective", "psum") == "psum":
        for row in rows_of(content):
            yield _simulate_row(name, content, row)
    elif content["benchmark"] == "train_step":
        for row in rows_of(content):
            if row["worker_count"] > 1:
                yield _simulate_step(name, content, row)


def _simulate_row(name: str, content: Content, row: dict[str, Any]) -> Case:
    conditions, options = content["conditions"], content["options"]
    wire_dtype = options["wire_dtype"] or row["dtype"]
    wire_bytes = row["count"] * _WIRE_BYTES[wire_dtype]
    job = _job(conditions, options, wire_dtype)
    outcome = simulate(job, wire_bytes, _network(conditions), bucket_count=row["bucket_count"])
    limit_s = row["median_s"] / row["over_limit"]
    simulated = outcome.time_s / limit_s
    hosts = f"{conditions['worker_count']}+{_reducers(conditions)}"
    if (interface_count := options.get("nics") or 1) > 1:
        hosts += f" with {interface_count} interfaces"
    return Case(
        run=name,
        what=f"{hosts} {_size(row['bytes'])} x{row['bucket_count']} {wire_dtype}",
        measured=row["over_limit"],
        simulated=simulated,
        error=simulated / row["over_limit"] - 1,
        measured_cpu_s_per_gb=row["worker_cpu_s_per_gb"],
        simulated_cpu_s_per_gb=_worker_cpu_s_per_gb(job, outcome, row["bytes"]),
    )


def _simulate_step(name: str, content: Content, row: dict[str, Any]) -> Case:
    options, facts = content["options"], content["schedule"]
    bucket_bytes = options["bucket_bytes"] or DEFAULT_BUCKET_BYTES
    schedule = make_schedule(PROFILES[facts["profile"]], facts["size_scale"], facts["time_scale"], bucket_bytes)
    wire_dtype = options["wire_dtype"] or "float32"
    buckets = [Bucket(bucket.count * _WIRE_BYTES[wire_dtype], bucket.ready_s) for bucket in schedule]
    job = _job(row | {"rate_bytes_per_s": content["conditions"]["rate_bytes_per_s"]}, options, wire_dtype)
    compute_s = schedule[-1].ready_s
    outcome = simulate_steps(job, buckets, compute_s, _network(content["conditions"]))
    simulated = compute_s / outcome.time_s
    return Case(
        run=name,
        what=f"{row['worker_count']}+{_reducers(row)} {facts['profile']} {_size(facts['bytes'])} {wire_dtype}",
        measured=row["efficiency"],
        simulated=simulated,
        error=simulated - row["efficiency"],
        is_step=True,
    )


def _job(conditions: dict[str, Any], options: dict[str, Any], wire_dtype: str) -> Job:
    interface_count = options.get("nics") or 1

    def host(rate_bytes_per_s: float) -> Host:
        return Host((rate_bytes_per_s,) * interface_count, cores=_CORES, machine=_MACHINE)

    rate = conditions["rate_bytes_per_s"]
    words = options.get("reducer_rates")
    rates = [Rate.parse(word).bytes_per_s for word in words.split(",")] if words else [rate]
    return Job(
        workers=(host(rate),) * conditions["worker_count"],
        reducers=tuple(host(rates[index % len(rates)]) for index in range(conditions["reducer_count"])),
        colocated=conditions["colocated_count"],
        dtype=wire_dtype,
        strands=interface_count,  # at least one for each
        worker_costs=_COSTS,
        reducer_costs=_COSTS,
    )


def _network(conditions: dict[str, Any]) -> Network:
    return Network(
        latency_s=conditions["round_trip_s"] / 2,
        packet_overhead_bytes=_PACKET_OVERHEAD_BYTES,
        ack_bytes=_PACKET_OVERHEAD_BYTES,
        piece_bytes=_PIECE_BYTES,
        burst_bytes=_BURST_BYTES,
    )


def _worker_cpu_s_per_gb(job: Job, outcome: Outcome, size_bytes: int) -> float:
    """As bench.allreduce has it: of a worker's process, with the reducer inside."""
    worker_count = len(job.workers)
    inside = outcome.busy_s[worker_count + len(job.reducers) :]
    rounds = outcome.total_s / outcome.time_s
    return (sum(outcome.busy_s[:worker_count]) + sum(inside)) / worker_count / rounds / (size_bytes / _GB)


def _reducers(conditions: dict[str, Any]) -> str:
    inside = conditions["colocated_count"]
    return f"{conditions['reducer_count']}+{inside}" if inside else str(conditions["reducer_count"])


def _size(size_bytes: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def measure(folder: Path, only: str | None) -> None:
    """Measure runs of these names in the lab, each into a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (RECORD | NEW_CASES).items():
        if not name.startswith(_beginnings(only)):
            continue
        command = [sys.executable, "-m", *shlex.split(text), "--json", str(folder / f"{name}.json")]
        print(f"## {name}: python {shlex.join(command[1:])}", flush=True)
        if subprocess.run(command, cwd=_ROOT).returncode != 0:
            raise BenchError(f"{name} failed")


def _beginnings(only: str | None) -> tuple[str, ...]:
    return tuple(only.split(",")) if only else ("",)


def simulate_all(folder: Path, only: str | None) -> Iterator[Case]:
    for path in sorted(folder.glob("*.json")):
        if path.stem.startswith(_beginnings(only)):
            yield from simulate_run(path.stem, json.loads(path.read_text()))


def run(options: Options) -> list[Case]:
    if options.measure:
        measure(options.measure, options.only)
    cases = []
    for case in simulate_all(options.measure or options.folder, options.only):
        cases.append(case)
        print("  ".join(case.cells()), file=sys.stderr, flush=True)
    if not cases:
        raise BenchError(
            f"no run of {options.only or 'any name'} over a network in {options.measure or options.folder}"
        )
    heads = ["run", "workers+reducers, bytes, buckets", "measured", "simulated", "error", "cpu", "cpu simulated"]
    print(format_columns([heads, *(case.cells() for case in cases)]))
    if options.json:
        write_result(options.json, {"cases": [asdict(case) for case in cases]})
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.simulate", args=arguments, description=__doc__))
        return 0

    return run_command(command)
