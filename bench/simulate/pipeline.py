"""Simulates a decoder of 3 billion parameters on 256 hosts: cut over several workers, and with data parallelism alone.

    python -m bench.simulate.pipeline                                    takes some minutes
    python -m bench.simulate.pipeline --workers 64 --gbits 10,100 --stages 2,8

Nothing here is measured. Each host has one accelerator, and there are as many reducers as workers. jaxhetero.pipeline's
own planner cuts the model by its shapes (bench/accelerator/decoder.py), and takes the schedule whose simulated step is
the shortest. The planner also estimates the parts that operations have in the time of the whole.

A step has --sequences for each worker, whatever the cut. A pipeline of p workers gets p times as many, one for each
microbatch, and its gradients are reduced over workers / p replicas. With data parallelism alone a worker computes all
of its sequences at once, and buckets of 8 MiB are reduced as the backward pass makes them.

What a byte takes of an all-reduce between so many workers is simulated, processors included. Activations move at the
rate of the interfaces, and take no processor.

efficiency       the time that a worker computes / the step; one stage is data parallelism alone
weights, GB      of one worker, on average: parameters, gradients, two moments of an optimizer; 16 bytes a parameter
gradients, GB    that one worker sends in a step, on average
activations, GB  likewise, with their gradients; of the cut for the first rate
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import tyro

from bench.accelerator.decoder import Decoder
from bench.accelerator.schedule import Bucket as TimedBucket
from bench.accelerator.schedule import ideal_step_s
from bench.harness.command import run_command
from bench.harness.errors import BenchError
from bench.harness.report import format_columns
from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES
from jaxhetero.pipeline.arguments import Signature, trace_loss
from jaxhetero.pipeline.costs import BACKWARD, estimate
from jaxhetero.pipeline.decision import Decision, Wishes, decide
from jaxhetero.pipeline.operations import Operations
from jaxhetero.pipeline.simulation import Interconnect
from jaxhetero.simulator import Bucket, Costs, Host, Job, Network
from jaxhetero.simulator.estimate import simulate_one_strand, strands_for

_GB = 1e9
_GRADIENT_BYTES = 4  # of a parameter: float32 on the wire
_WEIGHT_BYTES = 16  # of a parameter: itself, its gradient, and two moments
_SAMPLE = 16  # buckets
Line = list[str]


@dataclass(frozen=True)
class Options:
    """Simulates a decoder of 3 billion parameters, cut over several workers and with data parallelism alone."""

    workers: int = 256
    """Worker hosts, and as many reducer hosts."""
    gbits: str = "10,25,50,100"
    """The rates of every host."""
    stages: str = "2,4,8,16"
    """Numbers of workers in a pipeline. Each divides --workers."""
    sequences: int = 8
    """Of 1,024 words each, for each worker and step."""
    layers: int = 32
    """Of the decoder, each of 89 million parameters."""
    teraflops: float = 100.0
    """What an accelerator reaches: a parameter and a word take it 6 operations in a step."""
    message_us: float = 5.0
    """Processor time for each message of an all-reduce: see docs/how_to/simulate.md."""

    def __post_init__(self) -> None:
        if min(self.workers, self.sequences, self.layers) < 1 or self.teraflops <= 0:
            raise BenchError("--workers, --sequences and --layers must be at least 1, and --teraflops above 0")
        if wrong := [
            count for count in self.stage_counts() if count < 2 or self.workers % count or count == self.workers
        ]:
            raise BenchError(f"--stages has {wrong[0]}; {self.workers} workers make no two or more pipelines of that")
        self.rates()

    def rates(self) -> list[float]:
        return [float(word) for word in _words(self.gbits, "--gbits")]

    def stage_counts(self) -> list[int]:
        return [int(word) for word in _words(self.stages, "--stages")]


def _words(text: str, option: str) -> list[str]:
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise BenchError(f"{option} is {text!r}; it must be numbers, as in 10,25")
    return words


@dataclass(frozen=True)
class Training:
    """Steps of the model on these workers."""

    options: Options

    @cached_property
    def decoder(self) -> Decoder:
        return Decoder(layer_count=self.options.layers)

    @cached_property
    def operations(self) -> Operations:
        """Of one microbatch, which is one sequence."""
        words, signature = self.decoder.words(1), Signature((), None, has_aux=False)
        traced = trace_loss(self.decoder.loss, signature, 1, 1, [self.decoder.params(), words])
        weights = [estimate(equation) for equation in traced.graph.equations]
        whole = float(Operations(traced.graph, traced.roles, weights).costs.sum())
        forward_s = 2 * self.decoder.parameter_count * self.decoder.token_count / (self.options.teraflops * 1e12)
        return Operations(traced.graph, traced.roles, [forward_s * weight / whole for weight in weights])

    @property
    def compute_s(self) -> float:
        """What a worker computes in a step, however the model is cut."""
        return self.options.sequences * (1 + BACKWARD) * float(self.operations.costs.sum())

    @property
    def gradient_bytes(self) -> int:
        return _GRADIENT_BYTES * self.decoder.parameter_count

    def seconds_per_byte(self, replicas: int, gbits: float) -> float:
        """Of an all-reduce of a worker's gradients."""
        call_bytes = self.gradient_bytes * replicas // self.options.workers
        return seconds_per_byte(replicas, gbits, call_bytes, self.options.message_us)

    def data_parallel_s(self, gbits: float) -> float:
        """A step of workers that have the whole model each."""
        s_per_byte = self.seconds_per_byte(self.options.workers, gbits)
        return data_parallel_s(self.compute_s, self.gradient_bytes, s_per_byte)

    def decide(self, stages: int, gbits: float) -> Decision:
        """The best cut over so many workers. Its simulated step is that of the whole job."""
        replicas = self.options.workers // stages
        s_per_byte = self.seconds_per_byte(replicas, gbits)
        rate = Host.of_gbits(gbits).bytes_per_s * Network().payload_share
        network = Interconnect(rate, 2 * Network().latency_s, 1 / s_per_byte)
        wishes = Wishes(stages, self.options.sequences * stages, network=network)
        return decide(self.operations, wishes, self.options.workers)


def data_parallel_s(compute_s: float, gradient_bytes: int, s_per_byte: float) -> float:
    """A step whose gradients are ready at equal distances during the backward pass, in buckets of 8 MiB."""
    count = max(1, round(gradient_bytes / DEFAULT_BUCKET_BYTES))
    forward_s = compute_s / (1 + BACKWARD)
    times_s = [forward_s + (compute_s - forward_s) * (number + 1) / count for number in range(count)]
    size = gradient_bytes // count // _GRADIENT_BYTES
    return ideal_step_s([TimedBucket(size, ready_s) for ready_s in times_s], s_per_byte)


def job_of(count: int, gbits: float, message_us: float) -> Job:
    """A worker and a reducer for each of ``count`` replicas."""
    hosts, costs = (Host.of_gbits(gbits),) * count, Costs(s_per_message=message_us / 1e6)
    return Job(hosts, hosts, strands=strands_for(gbits), worker_costs=costs, reducer_costs=costs)


@cache
def seconds_per_byte(count: int, gbits: float, call_bytes: int, message_us: float) -> float:
    """Of an all-reduce between so many workers and as many reducers: by some of the buckets of such a call."""
    buckets = [Bucket(DEFAULT_BUCKET_BYTES)] * _SAMPLE
    time_s = simulate_one_strand(job_of(count, gbits, message_us), buckets, 0.0, Network(), call_bytes)
    return time_s / sum(bucket.bytes for bucket in buckets)


def table(training: Training) -> Iterator[Line]:
    options, whole = training.options, training.decoder.parameter_count
    rates = options.rates()
    yield [
        "stages",
        "replicas",
        "weights, GB",
        "gradients, GB",
        "activations, GB",
        *(f"{rate:g} Gbit/s" for rate in rates),
    ]
    alone = [f"{100 * training.compute_s / training.data_parallel_s(rate):.1f} %" for rate in rates]
    yield [
        "1",
        str(options.workers),
        f"{_WEIGHT_BYTES * whole / _GB:.1f}",
        f"{_GRADIENT_BYTES * whole / _GB:.1f}",
        "0",
        *alone,
    ]
    for count in options.stage_counts():
        decisions = [training.decide(count, rate) for rate in rates]
        moved_bytes = 2 * decisions[0].partition.received_bytes * options.sequences  # each microbatch, there and back
        sizes = [size / _GB for size in (_WEIGHT_BYTES * whole / count, _GRADIENT_BYTES * whole / count, moved_bytes)]
        yield [
            str(count),
            str(options.workers // count),
            *(f"{size:.1f}" for size in sizes),
            *(_cell(training, decision) for decision in decisions),
        ]


def _cell(training: Training, decision: Decision) -> str:
    schedule, several = decision.schedule.name, decision.schedule.stages_per_place
    name = f"{schedule}:{several}" if several > 1 else schedule
    return f"{100 * training.compute_s / decision.simulation.step_s:.1f} % {name}"


def reductions(training: Training) -> Iterator[Line]:
    """What the step's reductions are reckoned with, over the best possible."""
    options = training.options
    yield ["replicas", *(f"{rate:g} Gbit/s" for rate in options.rates())]
    for stages in (1, *options.stage_counts()):
        count = options.workers // stages
        limits = [job_of(count, rate, options.message_us).best_time_s(1, Network()) for rate in options.rates()]
        ratios = [
            training.seconds_per_byte(count, rate) / limit for rate, limit in zip(options.rates(), limits, strict=True)
        ]
        yield [str(count), *(f"{ratio:.3f}" for ratio in ratios)]


def run(options: Options) -> list[Line]:
    training = Training(options)
    print(
        f"# {options.workers} workers and as many reducers, {training.decoder.parameter_count / _GB:.2f} billion "
        f"parameters, {options.workers * options.sequences} sequences a step, of which a worker computes "
        f"{training.compute_s:.2f} s; simulated",
        flush=True,
    )
    lines = list(table(training))
    print(f"# efficiency, and the schedule\n{format_columns(lines)}\n", flush=True)
    print(f"# an all-reduce between replicas / the best possible\n{format_columns(list(reductions(training)))}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    def command() -> int:
        run(tyro.cli(Options, prog="python -m bench.simulate.pipeline", args=arguments, description=__doc__))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
