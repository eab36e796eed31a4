"""Data-parallel train steps with an emulated accelerator: how much of the all-reduce hides behind the backward pass.

    python -m bench.train_step --profile bert-large --workers 1,2,4,8 --rate 200mbit --engine jaxhetero,gloo

The emulated accelerator is a timed wait for each bucket of gradients. The times are those of the real model's backward
pass on a V100 (bench/accelerator/profiles.py). Buffers, all-reduces and the network between the hosts (lab/netlab;
needs root) are real.

--size-scale shrinks arrays, buckets and times alike. --ring-exposes sets the speed of the accelerator relative to the
network: an ideal ring between the most workers would have this share of its time exposed. The engines take turns:

    jaxhetero       jaxhetero.psum of each bucket
    jaxhetero:across  jaxhetero.psum_start of each bucket, and jaxhetero.psum_done in the next step, whose forward pass
                    waits for it layer by layer (bench/accelerator/across.py)
    gloo            jax.lax.psum of each bucket, one after the other in the order of the backward pass
    gloo:combined   jax.lax.psum of each bucket, in no order. XLA's CPU compiler makes one all-reduce of them, which
                    starts after the backward pass

The columns:

    compute_ms     time of a step without all-reduces; the least of all engines is t1
    network_ms     time of all its all-reduces without the waits
    step_ms        time of a step, tn
    exposed_ms     tn - t1
    overlap        1 - exposed / network
    efficiency     t1 / tn
    best           computed efficiency with the best possible all-reduce between these hosts
    ring           computed efficiency with an ideal ring
    wrong          elements that differ from the exact sum
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import tyro

from bench.accelerator.emulation import WAIT_SOURCE
from bench.accelerator.profiles import PROFILES
from bench.accelerator.schedule import (
    Bucket,
    ideal_across_step_s,
    ideal_step_s,
    make_schedule,
    ring_factor,
    time_scale_that_exposes,
    total_bytes,
)
from bench.engines import build_native as native
from bench.engines.specs import EngineSpec, parse_engines
from bench.harness.command import check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.job import Conditions, Job, measure_conditions
from bench.harness.report import write_json
from bench.harness.step_report import Row, format_table, write_plot
from bench.harness.team import Team, start_teams
from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES
from lab.netlab import Lab

_PROGRAMS = ("compute", "communicate", "step")
_RING_BUCKET_BYTES = 25 * 2**20  # the default of PyTorch's DistributedDataParallel


@dataclass(frozen=True)
class Options:
    """Data-parallel train steps with an emulated accelerator."""

    profile: Literal[tuple(PROFILES)] = "bert-large"  # type: ignore[valid-type]
    """The model whose gradients and times are emulated."""
    workers: str = "1,2,4,8"
    """The numbers of workers to measure. Each worker has a host of its own."""
    reducers: int | None = None
    """Dedicated reducers of jaxhetero, each on a host of its own. Default: as many as workers."""
    colocated: int = 0
    """The first N workers reduce as well."""
    rate: str = "200mbit"
    """Rate of every host's network interface, each way. none: no limit."""
    size_scale: float = 1 / 64
    """Shrinks arrays, buckets and times alike."""
    bucket_bytes: int | None = None
    """The size of a bucket of gradients before it is shrunk like the arrays. Default: that of jaxhetero.psum for
    jaxhetero, 25 MiB for gloo and the ring."""
    time_scale: float | None = None
    """Factor of the accelerator's times. Default: the factor that --ring-exposes asks for."""
    ring_exposes: float = 0.5
    """The share of its time that an ideal ring between the most workers would have exposed."""
    network: float | None = None
    """In place of --ring-exposes: the time of the best possible all-reduces of a step, in units of the step's
    computation."""
    ring_factor: float | None = None
    """Time of that ring in units of S/B. Default: 2(n-1)/n, the time of an ideal ring."""
    wire_dtype: str | None = None
    """The dtype that jaxhetero sends in place of float32."""
    engine: str = "jaxhetero,gloo"
    """The engines to compare: jaxhetero, jaxhetero:across, gloo, gloo:combined."""
    rounds: int = 2
    """Turns that every engine gets."""
    batch: int = 3
    """Measured steps in a turn."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Draw workers against efficiency to this file (png, svg, pdf)."""
    loopback: bool = False
    """Use loopback, without rates. Then --time-scale must be given."""

    def __post_init__(self) -> None:
        if self.size_scale <= 0 or (self.time_scale is not None and self.time_scale <= 0):
            raise BenchError("--size-scale and --time-scale must be more than 0")
        if self.rounds < 1 or self.batch < 1 or (self.bucket_bytes is not None and self.bucket_bytes < 1):
            raise BenchError("--rounds, --batch and --bucket-bytes must be at least 1")
        check_folders(self.json, self.plot)

    def bucket_bytes_of(self, spec: EngineSpec) -> int:
        return self.bucket_bytes or (DEFAULT_BUCKET_BYTES if spec.kind == "jaxhetero" else _RING_BUCKET_BYTES)

    def jobs(self) -> list[Job]:
        try:
            counts = [int(word) for word in self.workers.split(",")]
        except ValueError:
            raise BenchError(f"--workers is {self.workers!r}; it must be numbers, as in 1,2,4,8") from None
        rate = None if self.rate == "none" else self.rate
        return [
            Job(
                worker_count=count,
                reducer_count=0 if count == 1 else count if self.reducers is None else self.reducers,
                colocated_count=min(self.colocated, count),
                rate=rate,
            )
            for count in counts
        ]


@dataclass
class _Sample:
    times_s: dict[str, list[float]] = field(default_factory=lambda: {program: [] for program in _PROGRAMS})
    wrong_count: int = 0


def run(options: Options) -> list[Row]:
    kinds = {word.strip().partition(":")[0] for word in options.engine.split(",")}
    if alone := " and ".join(sorted(kinds & {"mpi", "echo"})):
        raise BenchError(f"engine {alone} has no all-reduce that runs beside a train step")
    jobs, specs = options.jobs(), parse_engines(options.engine, "float32", options.wire_dtype)
    largest = max(jobs, key=lambda job: job.worker_count)
    # At least two workers: measuring the conditions takes two hosts.
    hosts = replace(largest, worker_count=max(2, largest.worker_count), reducer_count=max(1, largest.reducer_count))
    with Lab(hosts.hosts(), loopback=options.loopback) as lab:
        print(f"# {lab.description}", flush=True)
        conditions = measure_conditions(hosts, lab)
        print(f"# {conditions.describe()}", flush=True)
        schedules, facts = _make_schedules(options, specs, conditions)
        rows: list[Row] = []
        for job in jobs:
            rows += _measure_job(options, job, lab, conditions, schedules)
            if options.json:
                write_json(options.json, "train_step", rows, conditions, options, lab.description, schedule=facts)
    print(format_table(rows), flush=True)
    if options.plot:
        write_plot(options.plot, rows, f"{options.profile}, {options.rate}")
    return rows


@dataclass(frozen=True)
class _Schedules:
    """When buckets are ready, for each engine and for the ring. The arrays and their times are the same for all."""

    of_engines: dict[EngineSpec, list[Bucket]]
    of_ring: list[Bucket]

    @property
    def compute_s(self) -> float:
        return self.of_ring[-1].ready_s


def _make_schedules(
    options: Options, specs: Sequence[EngineSpec], conditions: Conditions
) -> tuple[_Schedules, dict[str, object]]:
    profile, goodput = PROFILES[options.profile], conditions.goodput_bytes_per_s
    if options.network:
        best_s = conditions.limit_s(4 * options.size_scale * profile.parameter_count)
        options = replace(options, time_scale=best_s / options.network / (profile.step_s * options.size_scale))
    factor, ring_bytes = options.ring_factor or ring_factor(conditions.worker_count), _RING_BUCKET_BYTES
    time_scale = options.time_scale or time_scale_that_exposes(
        profile, options.size_scale, factor / goodput, options.ring_exposes, ring_bytes
    )
    of_engines = {
        spec: make_schedule(profile, options.size_scale, time_scale, options.bucket_bytes_of(spec)) for spec in specs
    }
    schedules = _Schedules(of_engines, make_schedule(profile, options.size_scale, time_scale, ring_bytes))
    size_bytes = total_bytes(schedules.of_ring)
    facts = {
        "profile": profile.name,
        "parameter_count": profile.parameter_count,
        "v100_step_s": profile.step_s,
        "size_scale": options.size_scale,
        "time_scale": time_scale,
        "bytes": size_bytes,
        "compute_s": schedules.compute_s,
        "as_goodput_bytes_per_s": goodput * time_scale,
    }
    print(
        f"# {profile.name}: {profile.parameter_count} parameters, {profile.step_s * 1e3:.0f} ms a step on a V100; "
        f"here sizes and times by {options.size_scale:.4g} and times by {time_scale:.4g} more: "
        f"{size_bytes / 1e6:.2f} MB, {schedules.compute_s * 1e3:.0f} ms; "
        f"as V100s with {goodput * time_scale * 8 / 1e9:.2f} Gbit/s of goodput",
        flush=True,
    )
    return schedules, facts


def _measure_job(options: Options, job: Job, lab: Lab, conditions: Conditions, schedules: _Schedules) -> list[Row]:
    specs = list(schedules.of_engines)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        teams = start_teams(specs, lab, job, folder, stack)
        samples = {team.spec: _Sample() for team in teams}
        library = str(native.build(WAIT_SOURCE, folder, include=jax.ffi.include_dir()))
        for team in teams:
            schedule = schedules.of_engines[team.spec]
            counts, ready_s = [bucket.count for bucket in schedule], [bucket.ready_s for bucket in schedule]
            if team.spec.across:
                wire_dtype = team.spec.wire_dtype or ""
                team.request("prepare_across", counts=counts, ready_s=ready_s, library=library, wire_dtype=wire_dtype)
            team.request(
                "prepare_emulation", counts=counts, ready_s=ready_s, combined=team.spec.combined, library=library
            )
        for _, team in itertools.product(range(options.rounds), teams):
            _take_turn(team, samples[team.spec], options.batch)
        for team in teams:
            team.stop()
    print(f"# {job.worker_count} workers done", flush=True)
    alone_s = min(median(sample.times_s["compute"]) for sample in samples.values())
    return [_make_row(spec, samples[spec], alone_s, job, conditions, schedules) for spec in specs]


def _take_turn(team: Team, sample: _Sample, batch: int) -> None:
    for program in _PROGRAMS:
        if program == "step" and team.spec.across:
            _take_turn_across(team, sample, batch)
            return
        count = batch if program == "step" else max(1, batch - 1)
        answers = team.request("measure_emulation", program=program, count=count)
        sample.times_s[program] += from_first_begin_to_last_end(answers)
    sample.wrong_count += sum(answer["wrong_count"] for answer in team.request("check_emulation"))


def _take_turn_across(team: Team, sample: _Sample, batch: int) -> None:
    answers = team.request("measure_across", count=batch)
    sample.times_s["step"] += [time_s / batch for time_s in from_first_begin_to_last_end(answers)]
    sample.wrong_count += sum(answer["wrong_count"] for answer in answers)


def from_first_begin_to_last_end(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds of each run, from the first worker's begin to the last worker's end. All hosts have one clock."""
    begins_ns = map(min, zip(*(answer["begins_ns"] for answer in answers), strict=True))
    ends_ns = map(max, zip(*(answer["ends_ns"] for answer in answers), strict=True))
    return [(end - begin) / 1e9 for begin, end in zip(begins_ns, ends_ns, strict=True)]


def _make_row(
    spec: EngineSpec, sample: _Sample, alone_s: float, job: Job, conditions: Conditions, schedules: _Schedules
) -> Row:
    compute_s, network_s, step_s = (median(sample.times_s[program]) for program in _PROGRAMS)
    exposed_s = step_s - alone_s
    schedule, goodput = schedules.of_engines[spec], conditions.goodput_bytes_per_s
    ring_s = ideal_step_s(schedules.of_ring, ring_factor(job.worker_count) / goodput)
    wire_factor = job.best_factor() * (spec.wire_itemsize("float32") / 4)
    ideal_s = ideal_across_step_s if spec.across else ideal_step_s
    return Row(
        worker_count=job.worker_count,
        reducer_count=job.reducer_count,
        colocated_count=job.colocated_count,
        engine=spec.label,
        bucket_count=len(schedule),
        compute_s=compute_s,
        network_s=network_s,
        step_s=step_s,
        exposed_s=exposed_s,
        overlap=1 - exposed_s / network_s if job.worker_count > 1 else None,
        efficiency=alone_s / step_s,
        best_efficiency=schedules.compute_s / ideal_s(schedule, wire_factor / goodput),
        ring_efficiency=schedules.compute_s / ring_s,
        wrong_count=sample.wrong_count,
        times_s=sample.times_s,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        options = tyro.cli(Options, prog="python -m bench.train_step", args=arguments, description=__doc__)
        return 1 if any(row.wrong_count for row in run(options)) else 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
