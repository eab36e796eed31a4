"""Steps of a model that is cut over workers with emulated accelerators, by schedule, beside data parallelism.

    python -m bench.pipeline --stages 4 --microbatches 16 --schedules interleaved,virtual:2,zero_bubble
    python -m bench.pipeline --stages 4 --replicas 2 --microbatches 32 --schedules breadth_first:4 --reduce 3

The model is a chain of timed waits (bench/accelerator/stages.py), one for each stage, all alike. With ``--profile
bert-large`` each stage has the layers of BERT-large that come to its share of the arithmetic, and takes its time and
its parameters in proportion to theirs; the last one uses the embeddings as well, as BERT does.
Activations, gradients and the network between the hosts (lab/netlab; needs root) are real.

``--reduce R`` gives the model so many parameters that an all-reduce of their gradients takes R times the computation of
a step, C, and measures data parallelism with the same workers as well: every worker has the whole model, and reduces a
bucket of gradients as soon as its backward pass has them.

The columns:

    step_ms     a step: from the first worker's begin to the last worker's end
    over_C      step / (the time of all tasks / the workers that share them)
    simulated   the same, simulated: with the waits as tasks, the network, and the reductions
    ratio       step / simulated step
    bubble      1 - C / step
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import tyro

from bench.accelerator.emulation import WAIT_SOURCE
from bench.accelerator.profiles import PROFILES
from bench.accelerator.schedule import make_schedule
from bench.engines import build_native as native
from bench.engines.specs import EngineSpec, parse_size
from bench.harness.command import check_folders, run_command
from bench.harness.errors import BenchError
from bench.harness.job import Conditions, Job, measure_conditions
from bench.harness.report import format_columns, write_json
from bench.harness.team import Team, start_teams
from bench.train_step import from_first_begin_to_last_end
from lab.netlab import Lab

_BUCKETS = 32


@dataclass(frozen=True)
class Options:
    """Steps of a model that is cut over workers with emulated accelerators."""

    stages: int = 4
    """Workers in a pipeline. Each worker has a host of its own."""
    replicas: int = 1
    """Pipelines."""
    reducers: int | None = None
    """Dedicated reducers. Default: as many as workers, or one without replicas."""
    microbatches: int = 16
    """Microbatches of a step."""
    schedules: str = "simple,interleaved,virtual:2,breadth_first:2,zero_bubble"
    """Schedules to measure in turn; behind a colon the stages of each worker."""
    profile: Literal["even", *PROFILES] = "even"  # type: ignore[valid-type]
    """The proportions of the model's layers: all alike, or those of a real model."""
    task_ms: float = 50
    """What the forward pass of one worker's part of a microbatch takes. The backward pass takes twice as long."""
    reduce: float = 0
    """How many times as long as the computation of a step an all-reduce of all gradients takes."""
    activation_bytes: str = "16KiB"
    """Of a microbatch, between two stages."""
    rate: str = "200mbit"
    """Rate of every host's network interface, each way. none: no limit."""
    rounds: int = 2
    """Turns that everything gets."""
    batch: int = 2
    """Measured steps in a turn."""
    json: Path | None = None
    """Write all figures to this file."""
    loopback: bool = False
    """Use loopback, without rates."""

    def __post_init__(self) -> None:
        if min(self.stages, self.replicas, self.microbatches, self.rounds, self.batch) < 1:
            raise BenchError("--stages, --replicas, --microbatches, --rounds and --batch must be at least 1")
        if self.reduce and self.replicas == 1:
            raise BenchError("--reduce needs --replicas: without them there is nothing to reduce")
        check_folders(self.json)

    @property
    def compute_s(self) -> float:
        """C: what one worker computes in a step."""
        return 3 * self.microbatches * self.task_ms / 1e3

    def job(self) -> Job:
        count = self.stages * self.replicas
        reducers = (count if self.replicas > 1 else 1) if self.reducers is None else self.reducers
        return Job(count, reducers, 0, None if self.rate == "none" else self.rate)

    def choices(self) -> list[tuple[str, int]]:
        """Names of schedules, with the stages of each worker."""
        found = []
        for word in self.schedules.split(","):
            name, _, count = word.strip().partition(":")
            if count and not count.isdigit():
                raise BenchError(f"--schedules has {word!r}; behind the colon must be a number, as in virtual:2")
            found.append((name, int(count or 1)))
        return found


@dataclass(frozen=True)
class Row:
    """The figures of one schedule, or of data parallelism."""

    name: str
    step_s: float
    compute_s: float
    simulated_s: float | None
    times_s: list[float]


def run(options: Options) -> list[Row]:
    job = options.job()
    with Lab(job.hosts(), loopback=options.loopback) as lab:
        print(f"# {lab.description}", flush=True)
        conditions = measure_conditions(job, lab)
        print(f"# {conditions.describe()}", flush=True)
        rows = [_measure(options, job, lab, conditions, name, count) for name, count in options.choices()]
        if options.reduce:
            rows.append(_measure_data_parallel(options, job, lab, conditions))
        if options.json:
            write_json(options.json, "pipeline", rows, conditions, options, lab.description)
    print(_table(rows), flush=True)
    return rows


def _parameter_bytes(options: Options, conditions: Conditions) -> int:
    """Of the whole model."""
    return int(options.reduce * options.compute_s * conditions.goodput_bytes_per_s)


@dataclass(frozen=True)
class _Model:
    """What its stages take in a step on one accelerator, and their parameters."""

    seconds: list[float]
    counts: list[int]
    tied: tuple[int, ...] = ()


def _model(options: Options, stage_count: int, parameter_count: int) -> _Model:
    # The stages of a pipeline share a step of the whole model.
    step_s = options.compute_s * options.stages
    if options.profile == "even":
        return _Model([step_s / stage_count] * stage_count, [parameter_count // stage_count] * stage_count)
    profile = PROFILES[options.profile]
    work = sum(layer.multiply_adds for layer in profile.layers)
    model = _Model([0.0] * stage_count, [1] * stage_count)
    stage_of, done = [], 0.0
    for layer in profile.layers:
        stage_of.append(min(int((done + layer.multiply_adds / 2) / work * stage_count), stage_count - 1))
        done += layer.multiply_adds
        model.seconds[stage_of[-1]] += step_s * layer.multiply_adds / work
        count = sum(layer.parameter_counts)
        model.counts[stage_of[-1]] += round(parameter_count * count / profile.parameter_count)
    return replace(model, tied=tuple(stage_of[layer] for layer in profile.tied))


def _measure(options: Options, job: Job, lab: Lab, conditions: Conditions, name: str, count: int) -> Row:
    stage_count = options.stages * count
    model = _model(options, stage_count, max(_parameter_bytes(options, conditions) // 4, 16 * stage_count))
    settings = {"stages": options.stages, "microbatches": options.microbatches, "schedule": name}
    settings["stages_per_worker"] = count
    with ExitStack() as stack:
        team = _start(lab, job, stack)
        facts = team.request(
            "prepare_stages",
            seconds=model.seconds,
            counts=model.counts,
            tied=model.tied,
            activation_bytes=parse_size(options.activation_bytes),
            is_parted=name == "zero_bubble",
            bytes_per_s=conditions.goodput_bytes_per_s,
            latency_s=conditions.round_trip_s / 2,
            library=_build_wait(stack),
            settings=settings,
        )[0]
        times_s: list[float] = []
        for _ in range(options.rounds):
            times_s += from_first_begin_to_last_end(team.request("measure_stages", count=options.batch))
        team.stop()
    label = name if count == 1 else f"{name}:{count}"
    print(f"# {label}: millions of parameters of each stage:", *(f"{n / 1e6:.1f}" for n in facts["parameter_counts"]))
    return Row(label, median(times_s), options.compute_s, facts["simulated_s"], times_s)


def _measure_data_parallel(options: Options, job: Job, lab: Lab, conditions: Conditions) -> Row:
    """Each worker computes its share of the batch with the whole model, so a step of one worker takes C as well."""
    counts, ready_s = _buckets(options, _parameter_bytes(options, conditions) // 4)
    with ExitStack() as stack:
        team = _start(lab, job, stack)
        library = _build_wait(stack)
        team.request("prepare_emulation", counts=counts, ready_s=ready_s, combined=False, library=library)
        times_s: list[float] = []
        for _ in range(options.rounds):
            answers = team.request("measure_emulation", program="step", count=options.batch)
            times_s += from_first_begin_to_last_end(answers)
        team.stop()
    return Row("data parallel", median(times_s), options.compute_s, None, times_s)


def _buckets(options: Options, parameter_count: int) -> tuple[list[int], list[float]]:
    """The parameters of each bucket, and when its gradients are ready."""
    compute_s = options.compute_s
    if options.profile == "even":
        ready_s = [compute_s / 3 + 2 / 3 * compute_s * (index + 1) / _BUCKETS for index in range(_BUCKETS)]
        return [parameter_count // _BUCKETS] * _BUCKETS, ready_s
    profile = PROFILES[options.profile]
    size_scale = parameter_count / profile.parameter_count
    buckets = make_schedule(profile, size_scale, compute_s / profile.step_s / size_scale)
    return [bucket.count for bucket in buckets], [bucket.ready_s for bucket in buckets]


def _build_wait(stack: ExitStack) -> str:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    return str(native.build(WAIT_SOURCE, folder, include=jax.ffi.include_dir()))


def _start(lab: Lab, job: Job, stack: ExitStack) -> Team:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    (team,) = start_teams([EngineSpec.parse("jaxhetero")], lab, job, folder, stack)
    return team


def _table(rows: Sequence[Row]) -> str:
    lines: list[list[str]] = [["schedule", "step_ms", "over_C", "simulated", "ratio", "bubble"]]
    for row in rows:
        simulated: list[Any] = ["-", "-"]
        if row.simulated_s is not None:
            simulated = [f"{row.simulated_s / row.compute_s:.3f}", f"{row.step_s / row.simulated_s:.3f}"]
        name = row.name.replace(" ", "_")
        lines.append(
            [
                name,
                f"{row.step_s * 1e3:.1f}",
                f"{row.step_s / row.compute_s:.3f}",
                *simulated,
                f"{1 - row.compute_s / row.step_s:.4f}",
            ]
        )
    return format_columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.pipeline", args=arguments, description=__doc__))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
