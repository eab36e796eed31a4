"""Our own all-reduce, simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from jaxhetero import _simulator as native
from jaxhetero._collectives.best_time import best_time_s
from jaxhetero.config import MOST_CHUNK_BYTES, MOST_STRANDS, MOST_WORKERS
from jaxhetero.errors import ConfigError, InternalError
from jaxhetero.simulator.hosts import Costs, Host, Network, make_cluster

# The number and the bytes of each wire dtype: DType in xla_ffi/sum/reduce.h.
_DTYPES = {"float16": (1, 2), "bfloat16": (2, 2), "float32": (3, 4), "float64": (4, 8)}


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients of a train step."""

    bytes: int
    """On the wire."""
    ready_s: float = 0.0
    """When its last gradient is computed, after the start of the step."""
    priority: int = 0
    """As of ``jaxhetero.psum_start``: of the buckets on their way, a worker pushes those of the lowest one first."""
    needed_s: float | None = None
    """When the next step needs its total, after that step's start; None: its own step ends with it."""

    def __post_init__(self) -> None:
        if min(self.bytes, self.ready_s, self.needed_s or 0.0) < 0:
            raise ConfigError(f"{self}: no size and no time is below 0")


@dataclass(frozen=True)
class Job:
    """Workers and reducers on their hosts, with the settings that ``jaxhetero.initialize`` takes for them."""

    workers: tuple[Host, ...]
    reducers: tuple[Host, ...] = ()
    """Of the dedicated ones."""
    colocated: int = 0
    """In how many workers, from rank 0 on, a reducer runs as well."""
    dtype: str = "float32"
    """On the wire: float32, bfloat16, float16 or float64."""
    strands: int = 1
    """Of each process."""
    chunk_bytes: int = 0
    """0: chosen by the plan."""
    window_chunks: int = 0
    """0: adapted to the path."""
    measure_rates: bool = True
    worker_costs: Costs = field(default_factory=Costs)
    reducer_costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        if not 0 <= self.colocated <= len(self.workers):
            raise ConfigError(f"colocated is {self.colocated}; there are {len(self.workers)} workers")
        if len(self.workers) < 2 or not (self.reducers or self.colocated):
            raise ConfigError(
                "a simulated job has two or more workers, and somebody reduces: give reducers or colocated"
            )
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype is {self.dtype}; one of {', '.join(_DTYPES)}")
        if len(self.hosts) > MOST_WORKERS:
            raise ConfigError(f"{len(self.workers)} workers and {len(self.reducers)} reducers: {MOST_WORKERS} in all")
        rails = max(len(host.interfaces) for host in self.hosts)
        if not rails <= self.strands <= MOST_STRANDS:
            raise ConfigError(f"strands is {self.strands}; with {rails} interfaces it is in {rails}..{MOST_STRANDS}")
        if self.chunk_bytes and (not 1024 <= self.chunk_bytes <= MOST_CHUNK_BYTES or self.chunk_bytes % 64):
            raise ConfigError(
                f"chunk_bytes is {self.chunk_bytes}; 0, or a multiple of 64 from 1024 to {MOST_CHUNK_BYTES}"
            )
        if self.window_chunks < 0:
            raise ConfigError(f"window_chunks is {self.window_chunks}; at least 0")

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Workers, then reducers."""
        return self.workers + self.reducers

    def best_time_s(self, size_bytes: float, network: Network) -> float:
        """The best possible time of one all-reduce of so many bytes on the wire: see ``jaxhetero.best_time_s``."""
        share = network.payload_share
        return best_time_s(
            size_bytes,
            [share * host.bytes_per_s for host in self.workers],
            [share * host.bytes_per_s for host in self.reducers],
            self.colocated,
        )

    def part_counts(self, buckets: Sequence[Bucket], network: Network) -> list[int]:
        """How many strands carry a part of each of these buckets."""
        return self.to_native(buckets, 0).part_counts(make_cluster(self.hosts, network))

    def to_native(self, buckets: Sequence[Bucket], seed: int) -> native.Job:
        """What the native module takes."""
        worker_count = len(self.workers)
        job = native.Job(range(worker_count), range(worker_count, len(self.hosts)), self.colocated)
        job.set_shape(
            chunk_bytes=self.chunk_bytes,
            window_chunks=self.window_chunks,
            measure_rates=self.measure_rates,
            strands=self.strands,
        )
        job.strand_count = self.strands
        job.worker_costs = self.worker_costs.to_native()
        job.reducer_costs = self.reducer_costs.to_native()
        job.seed = seed
        number, item_bytes = _DTYPES[self.dtype]
        for bucket in buckets:
            needed_s = -1.0 if bucket.needed_s is None else bucket.needed_s
            job.add_bucket(bucket.bytes // item_bytes, number, bucket.ready_s, bucket.priority, needed_s)
        return job


@dataclass(frozen=True)
class Outcome:
    """What a simulation found."""

    times_s: tuple[float, ...]
    """Of each round, or step, that counts: from the end of the one before on the last worker to its own end there."""
    best_s: float
    """The best possible time of its all-reduces: without processors, latency, or headers of chunks."""
    sent_bytes: tuple[tuple[float, ...], ...]
    """By host, workers first, and by interface: all that it sent, headers of packets and acknowledgements included."""
    received_bytes: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    """By process: workers, dedicated reducers, reducers in workers. The time on cores, of all strands together."""
    lost_count: int
    """Pieces of messages that a full queue dropped."""
    event_count: int
    total_s: float
    """From the start to the end on the last worker, with the rounds that do not count."""

    @property
    def time_s(self) -> float:
        """The median of the rounds that count."""
        return median(self.times_s)

    @property
    def over_limit(self) -> float:
        """``time_s`` over ``best_s``: 1 for a perfect all-reduce."""
        return self.time_s / self.best_s


def simulate(
    job: Job,
    size_bytes: int,
    network: Network | None = None,
    *,
    bucket_count: int = 1,
    rounds: int = 5,
    warmup: int = 2,
    seed: int = 0,
) -> Outcome:
    """All-reduces of so many bytes, one after the other, as ``python -m bench.allreduce`` measures them.

    Args:
      job: workers and reducers.
      size_bytes: of a worker's contribution on the wire.
      network: between the hosts. Default: ``Network()``.
      bucket_count: how many buckets of one program carry the bytes, all at once.
      rounds: how many all-reduces count.
      warmup: how many before them do not: windows adapt to the path.
      seed: decides with which reducer a bucket begins.

    Returns:
      The outcome; equal arguments give equal outcomes.

    Takes about a microsecond of one core for each chunk and worker, and blocks meanwhile, without the GIL.

    Raises:
      ConfigError: the arguments make no job.

    Example:
      >>> from jaxhetero.simulator import Host, Job, simulate
      >>> host = Host.of_gbits(1)
      >>> both = simulate(Job((host,) * 4, (host,) * 4), 2**24), simulate(Job((host,) * 4, colocated=4), 2**24)
      >>> both[0].time_s < both[1].time_s
      True
    """
    if size_bytes < 1 or bucket_count < 1 or rounds < 1 or warmup < 0:
        raise ConfigError(f"{size_bytes} bytes in {bucket_count} buckets, {rounds} rounds: all are at least 1")
    buckets = [Bucket(size_bytes // bucket_count)] * bucket_count
    return _run(job, buckets, network or Network(), 0.0, rounds, warmup, seed, (), 0)


def simulate_steps(
    job: Job,
    buckets: Sequence[Bucket],
    step_s: float,
    network: Network | None = None,
    *,
    rounds: int = 2,
    warmup: int = 1,
    seed: int = 0,
    straggling: float = 0.0,
    call_bytes: int | None = None,
) -> Outcome:
    """Train steps: each worker's buckets are all-reduced once they are ready, and the next step starts behind the last.

    A total with ``needed_s`` may come later: the next step waits for it there, and what it computes afterwards is late
    by as much.

    Args:
      job: workers and reducers.
      buckets: of a step, in the order in which they are ready. All are of one call of ``jaxhetero.psum``.
      step_s: the time that a worker computes in a step.
      network: between the hosts. Default: ``Network()``.
      rounds: how many steps count.
      warmup: how many before them do not.
      seed: for stragglers, and with which reducer a bucket begins.
      straggling: how much the times of workers differ. In each step, each worker's times are multiplied by
        ``exp(straggling * x)``, where x has a normal distribution.
      call_bytes: of all buckets of the call of ``jaxhetero.psum``, where those here are a part of it: it decides how
        large chunks are.

    Returns:
      The outcome. ``best_s`` is of the all-reduces, without the step's own time.

    Blocks, without the GIL.

    Raises:
      ConfigError: the arguments make no job.

    Example:
      >>> from jaxhetero.simulator import Bucket, Host, Job, simulate_steps
      >>> host = Host.of_gbits(10)
      >>> buckets = [Bucket(2**23, ready_s) for ready_s in (0.02, 0.03, 0.04)]
      >>> 0.04 < simulate_steps(Job((host,) * 4, (host,) * 4), buckets, 0.04).time_s < 0.06
      True
    """
    if not buckets or step_s < 0 or straggling < 0:
        raise ConfigError(f"{len(buckets)} buckets in {step_s} s, straggling {straggling}: at least 1, 0 and 0")
    chance = random.Random(seed)
    count = (rounds + warmup) * len(job.workers)
    slowdowns = tuple(chance.lognormvariate(0, straggling) for _ in range(count)) if straggling else ()
    call_bytes = call_bytes or sum(bucket.bytes for bucket in buckets)
    return _run(job, buckets, network or Network(), step_s, rounds, warmup, seed, slowdowns, call_bytes)


def across_steps(buckets: Sequence[Bucket], forward_s: float) -> list[Bucket]:
    """The same buckets where their all-reduce hides under the next forward pass, too: ``optimizers.across_steps``.

    Args:
      buckets: of the ordinary step, in the order in which the backward pass has them ready.
      forward_s: the time of the forward pass. It needs the last bucket first, and a bucket's part of it is as that of
        the backward pass.

    Raises:
      ConfigError: the backward pass ends before the forward pass.

    Example:
      >>> from jaxhetero.simulator import Bucket, across_steps
      >>> [(bucket.priority, bucket.needed_s) for bucket in across_steps([Bucket(8, 3.0), Bucket(8, 5.0)], 2.0)]
      [(2, 1.333...), (1, 0.0)]
    """
    ends_s = [forward_s, *(bucket.ready_s for bucket in buckets)]
    if not buckets or ends_s[-1] <= forward_s or sorted(ends_s) != ends_s:
        raise ConfigError(f"a forward pass of {forward_s} s, and buckets ready at {ends_s[1:]}: they come after it")
    factor = forward_s / (ends_s[-1] - forward_s)
    return [
        replace(bucket, priority=len(buckets) - index, needed_s=factor * (ends_s[-1] - bucket.ready_s))
        for index, bucket in enumerate(buckets)
    ]


def _run(
    job: Job,
    buckets: Sequence[Bucket],
    network: Network,
    step_s: float,
    rounds: int,
    warmup: int,
    seed: int,
    slowdowns: Sequence[float],
    call_bytes: int,
) -> Outcome:
    config = job.to_native(buckets, seed)
    config.step_s, config.step_count, config.call_bytes = step_s, warmup + rounds, call_bytes
    config.slowdowns = slowdowns
    simulation = native.TwoHop(make_cluster(job.hosts, network), config)
    try:
        simulation.run()
    except RuntimeError as error:
        raise InternalError(str(error)) from error
    ends, worker_count = simulation.step_ends_s, len(job.workers)
    last_ends = [0.0, *(max(ends[first : first + worker_count]) for first in range(0, len(ends), worker_count))]
    times = [later - earlier for earlier, later in itertools.pairwise(last_ends)]
    return Outcome(
        times_s=tuple(times[warmup:]),
        best_s=job.best_time_s(sum(bucket.bytes for bucket in buckets), network),
        sent_bytes=_by_host(job.hosts, simulation.sent_bytes),
        received_bytes=_by_host(job.hosts, simulation.received_bytes),
        busy_s=tuple(simulation.busy_s),
        lost_count=simulation.lost_count,
        event_count=simulation.event_count,
        total_s=last_ends[-1],
    )


def _by_host(hosts: Sequence[Host], by_interface: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    values = iter(by_interface)
    return tuple(tuple(itertools.islice(values, len(host.interfaces))) for host in hosts)
