"""Steps of optimizers that the reducers run, beside optax's on the workers, and sums, over a network that has a rate.

    python -m bench.optimizer_steps --size 16MiB
    python -m bench.optimizer_steps --profile bert-large --optimizers adamw,lamb,lamb-clipped --dtypes float32

Every host is a network namespace with an interface of that rate (lab/netlab; needs root). S is the size of the
weights in float32. The gradients are one array that is there at once, or, with --profile, the buckets of a model, each
of which is there when bench.train_step's emulated accelerator has it. "Worker" is the sum with optax's update behind
it, of float32 weights, by the lab's processors, which all workers share. The columns:

    step_ms    the median step: from the first worker's begin to the last worker's end
    over_sum   that, over the step whose gradients are only summed
    limit_ms   the shortest step that the network allows. A bucket whose optimizer has a norm of a tensor leaves a
               reducer once it is all there; with clipping, once all gradients are there. Backups are not counted
    /limit     the step, over that
    sent/S     bytes that a worker sent in a step; recv/S: received
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import tyro

from bench.accelerator.emulation import WAIT_SOURCE
from bench.accelerator.profiles import PROFILES
from bench.accelerator.schedule import (
    Bucket,
    make_schedule,
    ring_factor,
    time_scale_that_exposes,
    total_bytes,
)
from bench.engines import build_native as native
from bench.engines.optimizer import OPTIMIZERS
from bench.engines.pattern import itemsize
from bench.engines.specs import EngineSpec, parse_size
from bench.harness.command import check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.job import Conditions, Job, measure_conditions
from bench.harness.report import format_columns, write_json
from bench.harness.team import start_teams
from bench.train_step import from_first_begin_to_last_end
from lab.netlab import Lab

_RING_BUCKET_BYTES = 25 * 2**20  # as in bench.train_step, whose accelerator is as fast
_RING_EXPOSES = 0.5


@dataclass(frozen=True)
class Options:
    """Steps of optimizers that the reducers run."""

    workers: int = 8
    """Each on a host of its own."""
    reducers: int = 8
    """Dedicated ones, likewise."""
    size: str = "16MiB"
    """Of the weights in float32, without --profile."""
    profile: Literal[tuple(PROFILES)] | None = None  # type: ignore[valid-type]
    """The model whose gradients and times are emulated."""
    size_scale: float = 0.05
    """With --profile: shrinks arrays, buckets and times alike."""
    optimizers: str = "adamw"
    """Some of: adamw, lamb, lamb-clipped."""
    dtypes: str = "float32,bfloat16"
    """Of gradients and weights."""
    rate: str = "200mbit"
    """Rate of every host's network interface, each way."""
    engine: str = "jaxhetero"
    """Or with settings: ``jaxhetero:32768x4``."""
    rounds: int = 3
    """Turns that everything gets."""
    batch: int = 5
    """Steps in a turn."""
    json: Path | None = None
    """Write all figures to this file."""

    def __post_init__(self) -> None:
        if unknown := set(self.optimizers.split(",")) - set(OPTIMIZERS):
            raise BenchError(f"--optimizers: there is no {', '.join(sorted(unknown))}, only {', '.join(OPTIMIZERS)}")
        check_folders(self.json)

    def cases(self) -> list[Case]:
        """A sum for each dtype, and the optimizers on workers, and on reducers without and with backups."""
        optimizers = [(name, backups) for name in self.optimizers.split(",") for backups in (None, 0, 1)]
        return [Case(*how, dtype) for dtype in self.dtypes.split(",") for how in ((None, None), *optimizers)]

    def schedule(self, conditions: Conditions) -> list[Bucket]:
        if self.profile is None:
            return [Bucket(parse_size(self.size) // 4, 0.0)]
        profile, s_per_byte = PROFILES[self.profile], ring_factor(self.workers) / conditions.goodput_bytes_per_s
        ring = time_scale_that_exposes(profile, self.size_scale, s_per_byte, _RING_EXPOSES, _RING_BUCKET_BYTES)
        return make_schedule(profile, self.size_scale, ring)


@dataclass(frozen=True)
class Case:
    """What is measured."""

    optimizer: str | None
    """None: only sums."""
    backups: int | None
    """None: the update is the workers'."""
    dtype: str

    @property
    def label(self) -> str:
        if self.optimizer is None:
            return "psum"
        return self.optimizer + {None: ",worker", 0: "", 1: ",backup"}[self.backups]

    def limit_s(self, schedule: Sequence[Bucket], goodput_bytes_per_s: float) -> float:
        """When the last weight can be at the workers: buckets go in and out one after the other."""
        s_per_element = itemsize(self.dtype) / goodput_bytes_per_s
        arrived_s, in_s = [], 0.0
        for bucket in schedule:
            in_s = max(in_s, bucket.ready_s) + bucket.count * s_per_element
            arrived_s.append(in_s)
        if self.backups is None or self.optimizer == "adamw":  # what comes in can go out at once
            return in_s
        out_s = in_s if self.optimizer == "lamb-clipped" else 0.0
        for bucket, ready_s in zip(schedule, arrived_s, strict=True):
            out_s = max(out_s, ready_s) + bucket.count * s_per_element
        return out_s


@dataclass
class _Sample:
    times_s: list[float] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """The figures of one optimizer, with one dtype."""

    optimizer: str
    dtype: str
    step_s: float
    over_sum: float
    limit_s: float
    sent: float
    received: float
    times_s: list[float]


def run(options: Options) -> list[Row]:
    """Measure, and show the table."""
    job = Job(options.workers, options.reducers, 0, options.rate)
    with Lab(job.hosts()) as lab:
        print(f"# {lab.description}", flush=True)
        conditions = measure_conditions(job, lab)
        print(f"# {conditions.describe()}", flush=True)
        schedule = options.schedule(conditions)
        goodput = conditions.goodput_bytes_per_s
        print(
            f"# S: {total_bytes(schedule) / 1e6:.2f} MB in {len(schedule)} buckets, the last of them there after "
            f"{schedule[-1].ready_s * 1e3:.1f} ms; S/B: {total_bytes(schedule) / goodput * 1e3:.1f} ms",
            flush=True,
        )
        samples = _measure(options, job, lab, schedule)
    sums_s = {case.dtype: median(sample.times_s) for case, sample in samples.items() if case.optimizer is None}
    rows = [
        Row(
            case.label,
            case.dtype,
            median(sample.times_s),
            median(sample.times_s) / sums_s[case.dtype],
            case.limit_s(schedule, goodput),
            max(answer["sent"] for answer in sample.answers),
            max(answer["received"] for answer in sample.answers),
            sample.times_s,
        )
        for case, sample in samples.items()
    ]
    if options.json:
        write_json(options.json, "optimizer_steps", rows, conditions, options, lab.description)
    print(_table(rows), flush=True)
    return rows


def _measure(options: Options, job: Job, lab: Lab, schedule: Sequence[Bucket]) -> dict[Case, _Sample]:
    """All cases in turn."""
    samples = {case: _Sample() for case in options.cases()}
    counts, ready_s = [bucket.count for bucket in schedule], [bucket.ready_s for bucket in schedule]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        library = str(native.build(WAIT_SOURCE, folder, include=jax.ffi.include_dir()))
        (team,) = start_teams([EngineSpec.parse(options.engine)], lab, job, folder, stack)
        for case in samples:
            how = {"optimizer": case.optimizer, "backups": case.backups, "dtype": case.dtype}
            team.request("prepare_optimizer", counts=counts, ready_s=ready_s, library=library, **how)
        for _ in range(options.rounds):
            for number, sample in enumerate(samples.values()):
                sample.answers = team.request("measure_optimizer", number=number, count=options.batch)
                sample.times_s += from_first_begin_to_last_end(sample.answers)
        team.stop()
    return samples


def _table(rows: Sequence[Row]) -> str:
    lines = [["optimizer", "dtype", "step_ms", "over_sum", "limit_ms", "/limit", "sent/S", "recv/S"]]
    for row in rows:
        times = [f"{row.step_s * 1e3:.1f}", f"{row.over_sum:.3f}", f"{row.limit_s * 1e3:.1f}"]
        ratios = [f"{ratio:.3f}" for ratio in (row.step_s / row.limit_s, row.sent, row.received)]
        lines.append([row.optimizer, row.dtype, *times, *ratios])
    return format_columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""

    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.optimizer_steps", args=arguments, description=__doc__))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
