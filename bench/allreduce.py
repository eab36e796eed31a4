"""All-reduces of several engines side by side, between hosts with a network of a given rate.

    python -m bench.allreduce --workers 8 --reducers 8 --rate 200mbit --sizes 4,64KiB,16MiB --engine jaxhetero,gloo

Every host is a network namespace with an interface of that rate (see tests/netlab; needs root). The processes of all
engines are there all the time and take turns. The columns:

    algbw        S / median time, S being the bytes that each worker contributes
    of_rate      algbw / the interface's rate
    sent/S       bytes that the busiest worker's interface sent (received) for each byte of payload
    worker_s/GB  CPU seconds of one worker per GB all-reduced, and of one dedicated reducer
    /limit       time / the best possible time 2n(n-1) / (n^2 + kn - 2k) * S/B, where B is the TCP goodput of one
                 interface in one direction, measured before the run
    x_ENGINE     how many times faster than that engine
    wrong        elements that were not the exact sum
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import tyro

from bench.errors import BenchError
from bench.limit import best_factor
from bench.measure import Payload, measure
from bench.pattern import DTYPES, count_bases, itemsize
from bench.plot import write_plot
from bench.report import Conditions, Row, format_table, make_rows, write_json
from bench.specs import EngineSpec, parse_engines, parse_size
from bench.team import Team, reducer_host, worker_host
from tests.netlab import Lab, LabError, measure_goodput


@dataclass(frozen=True)
class Options:
    """All-reduces of several engines side by side, between hosts with a network of a given rate."""

    workers: int = 8
    """Worker processes, each on a host of its own."""
    reducers: int = 8
    """Dedicated reducers of jaxhetero, each on a host of its own."""
    colocated: bool = False
    """The workers reduce as well."""
    rate: str = "200mbit"
    """Of every host's network interface, each way; none for no limit."""
    sizes: str = "4,4KiB,64KiB,4MiB,16MiB"
    """Bytes that every worker contributes."""
    dtype: Literal[DTYPES] = "float32"  # type: ignore[valid-type]
    """Every element is a whole number, so the sum is exact."""
    engine: str = "jaxhetero,gloo,mpi"
    """Which to compare. jaxhetero:32768x4 is jaxhetero with chunk_bytes 32768 and window_chunks 4."""
    rounds: int = 5
    """Turns that every engine gets at every size."""
    warmup: int = 2
    """All-reduces at the beginning of a turn that are not measured."""
    batch: int | None = None
    """Measured all-reduces in a turn. Default: 2 to 25, fewer for larger sizes."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Draw size against time to this file (png, svg, pdf)."""
    loopback: bool = False
    """On loopback, without rates, where the limit means little."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 2), ("reducers", 0), ("rounds", 1), ("warmup", 1), ("batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BenchError(f"--{name} is {value}; it must be at least {least}")
        if self.reducers == 0 and not self.colocated:
            raise BenchError("nobody would reduce: give --reducers K or --colocated")
        if self.reducers > 0 and self.colocated:
            raise BenchError("jaxhetero cannot mix yet: give --reducers K --no-colocated or --reducers 0 --colocated")
        for file in (self.json, self.plot):
            if file is not None and not file.absolute().parent.is_dir():
                raise BenchError(f"cannot write {file}: there is no folder {file.parent}")

    def rates(self) -> dict[str, str | None]:
        hosts = [worker_host(rank) for rank in range(self.workers)]
        hosts += [reducer_host(index) for index in range(self.reducers)]
        return dict.fromkeys(hosts, None if self.rate == "none" else self.rate)

    def payloads(self) -> list[Payload]:
        count_bases(self.dtype, self.workers)  # raises when the sum cannot be exact
        return [self._payload(text) for text in self.sizes.split(",")]

    def _payload(self, text: str) -> Payload:
        size_bytes, item_bytes = parse_size(text), itemsize(self.dtype)
        if size_bytes % item_bytes:
            raise BenchError(f"size {text} is no whole number of {self.dtype}, which has {item_bytes} bytes")
        return Payload(size_bytes, size_bytes // item_bytes, self.dtype)


def run(options: Options) -> list[Row]:
    specs, payloads = parse_engines(options.engine, options.dtype), options.payloads()
    with Lab(options.rates(), loopback=options.loopback) as lab, ExitStack() as stack:
        print(f"# {lab.description}", flush=True)
        conditions = _measure_conditions(options, lab)
        teams = _start_teams(options, specs, lab, stack)
        rows: list[Row] = []
        for payload in payloads:
            rows += make_rows(measure(teams, lab, payload, options.rounds, options.warmup, options.batch), conditions)
            _write_files(options, rows, conditions, lab.description)
            print(f"# {payload.bytes} bytes done", flush=True)
        print(format_table(rows), flush=True)
        for team in teams:
            team.stop()
    return rows


def _measure_conditions(options: Options, lab: Lab) -> Conditions:
    first, second = (lab[worker_host(rank)] for rank in range(2))
    rate = first.rate.bytes_per_s if lab.isolated and first.rate else None
    goodput = measure_goodput(first, second)
    factor = best_factor(options.workers, options.reducers)
    shown = f"{goodput / 1e6:.3f} MB/s" + (f", {goodput / rate:.3f} of the rate" if rate else "")
    print(f"# TCP goodput B of one interface: {shown}; best possible time: {factor:.3f} S/B", flush=True)
    return Conditions(options.workers, options.reducers, rate, goodput, factor)


def _start_teams(options: Options, specs: Sequence[EngineSpec], lab: Lab, stack: ExitStack) -> list[Team]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    teams = []
    for spec in specs:
        team = Team(spec, lab, options.workers, options.reducers, folder)
        stack.callback(team.close)
        teams.append(team)
    for team in teams:
        team.join()
    return teams


def _write_files(options: Options, rows: list[Row], conditions: Conditions, lab: str) -> None:
    """After every size, so that what was measured is kept whatever happens to the rest."""
    if options.json:
        shown = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(options).items()}
        write_json(options.json, rows, conditions, shown, lab)
    if options.plot:
        title = f"all-reduce, {options.workers} workers, {options.reducers} reducers, {options.rate}, {options.dtype}"
        write_plot(options.plot, rows, conditions, title)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = tyro.cli(Options, prog="python -m bench.allreduce", args=arguments, description=__doc__)
        rows = run(options)
    except (BenchError, LabError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 1 if any(row.wrong_count for row in rows) else 0


def _exit_on(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    # So that what `with` opened is closed.
    signal.signal(signal.SIGTERM, _exit_on)
    sys.exit(main())
