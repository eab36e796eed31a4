"""Compares the all-reduces of several engines between hosts whose network has a given rate.

Or, with --collective, their psum_scatter or all_gather.

    python -m bench.allreduce --workers 8 --reducers 8 --rate 200mbit --sizes 4,64KiB,16MiB --engine jaxhetero,gloo

Every host is a network namespace with an interface of that rate (lab/netlab; needs root). The processes of all
engines run for the whole benchmark, and the engines take turns. The columns, where S is the bytes that each worker
contributes, or gets of an all_gather:

    buckets      all-reduces of one compiled program, which carry S bytes together
    algbw        S / median time
    of_rate      algbw / rate of the interface
    sent/S       bytes that the busiest worker's interface sent, for each byte of payload; recv/S: bytes received
    worker_s/GB  CPU seconds of one worker per GB all-reduced; reducer_s/GB: of one dedicated reducer
    worker_MB    most memory of a worker, less operand, result (in place they are one), and its memory before the first
                 payload
    reducer_MB   most memory of a dedicated reducer, less its memory before the first payload
    pings        time / ping; a ping is the median time of a byte from one worker to another and back over TCP
    /limit       time / best possible time. A cut of the payload among the reducers takes as long as its busiest
                 interface; the best cut takes the least. The interfaces carry the TCP goodput B, measured in one
                 direction before the run. With equal rates, n workers that all reduce, and k dedicated reducers, the
                 best possible time is 2n(n-1) / (n^2 + kn - 2k) * S/B. Of a psum_scatter, it is S/B with at least n
                 dedicated reducers; of an all_gather, and of both where every worker reduces, (n-1)/n * S/B
    x_ENGINE     how many times faster than that engine
    wrong        elements that differ from the exact sum; not counted for echo, which sums nothing
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from bench.engines.pattern import DTYPES, NUMBERS, count_bases, itemsize, most_sums
from bench.engines.specs import COLLECTIVES, parse_engines, parse_size
from bench.harness.command import check_at_least, check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.job import Conditions, Job, measure_conditions
from bench.harness.measure import Payload, measure
from bench.harness.plot import write_plot
from bench.harness.report import Row, format_table, make_rows, write_json
from bench.harness.team import start_teams
from lab.netlab import Lab


@dataclass(frozen=True)
class Options:
    """Compares the all-reduces of several engines between hosts whose network has a given rate."""

    workers: int = 8
    """Worker processes, each on a host of its own."""
    reducers: int = 8
    """Dedicated reducers of jaxhetero, each on a host of its own."""
    colocated: int = 0
    """The first N workers reduce as well."""
    rate: str = "200mbit"
    """Rate of every host's network interface, each way. none: no limit."""
    reducer_rates: str | None = None
    """Rates of the dedicated reducers' interfaces, in turn, as in 200mbit,100mbit. Default: --rate."""
    nics: int = 1
    """Interfaces of every host, each of that rate. jaxhetero uses all of them, unless a setting of the engine says
    which, as in jaxhetero:interface=eth0. The others, and the column /limit, know the first one only."""
    sizes: str = "4,4KiB,64KiB,4MiB,16MiB"
    """Bytes that every worker contributes."""
    collective: Literal[COLLECTIVES] = "psum"  # type: ignore[valid-type]
    """What to measure, of the engines that have it."""
    dtype: Literal[DTYPES] = "float32"  # type: ignore[valid-type]
    """The dtype of the payload. Every element is a whole number, so the sum is exact."""
    wire_dtype: Literal[(*DTYPES, *NUMBERS)] | None = None  # type: ignore[valid-type]
    """The dtype that jaxhetero sends in place of --dtype. The sum is exact in this dtype too; but int8 and int4 are for
    --values, and the sum is what the docs define."""
    values: Path | None = None
    """A folder of gradients, 0.npy for rank 0 and so on, of --dtype, to contribute over and over in place of whole
    numbers. jaxhetero:compress=always sends them in shorter codes; without that setting it sends no codes."""
    concurrent: int = 1
    """Also measure each size cut into this many all-reduces of one program."""
    in_place: bool = False
    """A sum takes the memory of its operand, as in a train step, where the operand is a computed gradient. Each
    all-reduce then sums the results of the one before. Default: the operand is an argument that the program keeps."""
    engine: str = "jaxhetero,gloo,mpi"
    """The engines to compare. jaxhetero:32768x4 is jaxhetero with chunk_bytes 32768 and window_chunks 4, and
    jaxhetero:strands=2+failover=0 has these settings. echo is the traffic of an all-reduce without the sums: the limit
    of network and hosts. echo:32768x4 has at most 4 times 32768 bytes in flight to a reducer."""
    rounds: int = 5
    """Turns that every engine gets at every size."""
    warmup: int = 2
    """All-reduces at the start of a turn that are not measured. After them, one more starts the workers together."""
    batch: int | None = None
    """Measured all-reduces in a turn. Default: 2 to 25, fewer for larger sizes."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Draw size against time to this file (png, svg, pdf)."""
    loopback: bool = False
    """Use loopback, without rates. There /limit means little."""

    def __post_init__(self) -> None:
        check_at_least(self, workers=2, reducers=0, rounds=1, concurrent=1, nics=1, warmup=0, batch=1)
        check_folders(self.json, self.plot)
        if self.collective != "psum" and (self.in_place or self.wire_dtype):
            raise BenchError(f"--collective {self.collective} goes with neither --in-place nor --wire-dtype")
        if self.wire_dtype in NUMBERS and self.dtype != "float32":
            raise BenchError(f"--wire-dtype {self.wire_dtype} goes with --dtype float32")
        if (self.wire_dtype in NUMBERS) != bool(self.wire_dtype and self.values):
            raise BenchError("--wire-dtype int8 and int4 go with --values, and no other --wire-dtype does")
        if self.values and (self.in_place or self.collective != "psum" or self.dtype == "int32"):
            raise BenchError("--values goes with a psum of floats alone, and not with --in-place")
        if self.in_place:
            self._check_in_place()

    def _check_in_place(self) -> None:
        """Raise if a sum of a turn cannot be exact: each one sums the results of the one before."""
        dtype = self.wire_dtype or self.dtype
        batch = self.batch or max(payload.default_batch() for payload in self.payloads())
        sum_count, most = self.warmup + 1 + batch, most_sums(dtype, self.workers)
        if sum_count > most:
            raise BenchError(
                f"--in-place makes {sum_count} sums on top of each other, of {self.workers} workers, and {dtype} holds "
                f"{most} exactly: take fewer with --warmup and --batch, or a power of two of --workers"
            )

    def job(self) -> Job:
        rates = tuple(self.reducer_rates.split(",")) if self.reducer_rates else ()
        return Job(self.workers, self.reducers, self.colocated, None if self.rate == "none" else self.rate, rates)

    def payloads(self) -> list[Payload]:
        if not self.values:
            count_bases(self.wire_dtype or self.dtype, self.workers)  # raises if the sum cannot be exact
        return [self._payload(text) for text in self.sizes.split(",")]

    def _payload(self, text: str) -> Payload:
        size_bytes, item_bytes = parse_size(text), itemsize(self.dtype)
        if size_bytes % item_bytes:
            raise BenchError(f"size {text} is no whole number of {self.dtype}, which has {item_bytes} bytes")
        payload = Payload(size_bytes, size_bytes // item_bytes, self.dtype, in_place=self.in_place)
        if self.collective == "psum":
            return replace(payload, values=str(self.values.absolute()) if self.values else None)
        if payload.count % (self.workers * self.concurrent):
            raise BenchError(f"size {text} cannot be cut into rows of {self.dtype}, one for each worker")
        return replace(payload, collective=self.collective, row_count=self.workers)


def run(options: Options) -> list[Row]:
    specs = parse_engines(options.engine, options.dtype, options.wire_dtype, options.collective)
    payloads = options.payloads()
    job = options.job()
    if job.reducer_count == 0 and any(spec.kind == "echo" for spec in specs):
        raise BenchError("engine echo needs --reducers: its workers do not reduce")
    with Lab(job.hosts(), loopback=options.loopback, nic_count=options.nics) as lab, ExitStack() as stack:
        print(f"# {lab.description}", flush=True)
        conditions = measure_conditions(job, lab, options.collective)
        print(f"# {conditions.describe()}", flush=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        teams = start_teams(specs, lab, job, folder, stack)
        rows: list[Row] = []
        for payload in payloads:
            most = min(options.concurrent, payload.count)
            cuts = [replace(payload, bucket_count=count) for count in sorted({1, most})]
            samples = measure(teams, lab, cuts, options.rounds, options.warmup, options.batch)
            rows += make_rows(samples, conditions)
            _write_files(options, rows, conditions, lab.description)
            print(f"# {payload.bytes} bytes done", flush=True)
        print(format_table(rows), flush=True)
        for team in teams:
            team.stop()
    return rows


def _write_files(options: Options, rows: list[Row], conditions: Conditions, lab: str) -> None:
    """Call it after every size, so that a failure later does not lose the figures so far."""
    if options.json:
        write_json(options.json, "allreduce", rows, conditions, options, lab)
    if options.plot:
        hosts = f"{options.workers} workers, {options.reducers} reducers, {options.rate}"
        title = f"{options.collective}, {hosts}, {options.dtype}"
        write_plot(options.plot, [row for row in rows if row.bucket_count == 1], conditions, title)


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        options = tyro.cli(Options, prog="python -m bench.allreduce", args=arguments, description=__doc__)
        return 1 if any(row.wrong_count for row in run(options)) else 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
