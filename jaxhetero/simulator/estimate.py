"""What a cluster would give and cost: train steps, simulated for several numbers and kinds of reducer hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxhetero._job.cores import MOST_CHOSEN_STRANDS
from jaxhetero.cluster.prices import Instance, read_prices
from jaxhetero.errors import ConfigError
from jaxhetero.simulator.hosts import Costs, Host, Network
from jaxhetero.simulator.job import Bucket, Job, across_steps, simulate_steps

_BUCKET_BYTES = 8 << 20  # of jaxhetero.psum
_FORWARD_SHARE = 1 / 3  # of a step: the backward pass has twice the products of the forward pass
_STRAND_BYTES_PER_S = 1.25e9  # as a job chooses strands: docs/how_to/cores.md


@dataclass(frozen=True)
class Question:
    """A train step on a cluster that is not there yet."""

    workers: int
    gradient_bytes: int
    """Of one worker, on the wire."""
    step_s: float
    """What a step takes without an all-reduce between hosts."""
    worker_gbits: float
    """Of a worker's network interfaces together."""
    worker_usd_per_hour: float | None = None
    gpus_per_worker: int = 1
    """For the efficiency per GPU; the sum over the GPUs of a host is part of ``step_s``."""
    reducer_types: tuple[str, ...] = ()
    """Names in jaxhetero/cluster/prices.toml. Default: the cheapest with a worker's rate, or with the cheapest rate."""
    reducer_counts: tuple[int, ...] = ()
    """Default: none, and a quarter, a half and all of the number of workers."""
    network: Network = field(default_factory=Network)
    costs: Costs = field(default_factory=Costs)
    """Of workers and reducers."""
    buckets: tuple[Bucket, ...] = ()
    """Of a step, in the order in which they are ready. Default: of 8 MiB, at equal distances in the backward pass."""
    across_steps: bool = False
    """Whether to simulate the step of ``jaxhetero.optimizers.across_steps``, too."""

    def __post_init__(self) -> None:
        if self.across_steps and self.step_s == 0:
            raise ConfigError("a step of 0 s has no forward pass under which an all-reduce hides")
        if self.workers < 2 or self.gradient_bytes < 1 or self.step_s < 0 or self.worker_gbits <= 0:
            raise ConfigError(
                "an estimate wants 2 workers or more, a gradient and a rate above 0, and a step from 0 on"
            )


@dataclass(frozen=True)
class Answer:
    """One number and kind of reducer hosts."""

    reducer_count: int
    reducer_type: str
    """Empty where only workers reduce."""
    step_s: float
    efficiency: float
    """The step without an all-reduce over the step with it."""
    exposed_s: float
    usd_per_hour: float | None
    """Of workers and reducers; None without a price of workers."""
    usd_per_step: float | None
    """Of the faster of both steps."""
    across_step_s: float | None = None
    """Of the step whose all-reduce hides under the next forward pass, too; None where the question does not ask it."""
    across_efficiency: float | None = None

    @property
    def fastest_step_s(self) -> float:
        """The faster of both steps."""
        return self.step_s if self.across_step_s is None else min(self.step_s, self.across_step_s)


# Well-known clusters, with BERT-large in float32. 64 sequences of 128 tokens take a V100 286 ms:
# bench/accelerator/profiles.py tells by whom that was measured.
_BERT_LARGE: dict[str, Any] = {"gradient_bytes": 1_344_904_432, "step_s": 0.2857, "gpus_per_worker": 8}
_P3: dict[str, Any] = {
    "worker_gbits": 25.0,
    "worker_type": "p3.16xlarge",
    "reducer_types": ("m4.16xlarge",),
    **_BERT_LARGE,
}
SETUPS: dict[str, dict[str, Any]] = {
    "p3-8+m4": {"workers": 8, **_P3},
    "p3-64+m4": {"workers": 64, **_P3},
    "p3dn-256": {
        "workers": 256,
        "worker_gbits": 100.0,
        "worker_type": "p3dn.24xlarge",
        "reducer_types": ("c5n.18xlarge",),
        **_BERT_LARGE,
    },
}


def estimate(question: Question) -> list[Answer]:
    """Simulate one step for each number and kind of reducers. Takes seconds, and a minute for hundreds of workers.

    Example:
      >>> from jaxhetero.simulator.estimate import Question, estimate, recommend
      >>> answers = estimate(Question(4, 10**8, step_s=0.1, worker_gbits=10, reducer_types=("c5n.9xlarge",)))
      >>> [answer.reducer_count for answer in answers]
      [0, 1, 2, 4]
      >>> answers[0].efficiency < answers[-1].efficiency
      True
      >>> recommend(answers) in answers
      True
    """
    counts = question.reducer_counts or (0, *_parts(question.workers))
    types = [_instance(name) for name in question.reducer_types] or [_cheapest(question.worker_gbits)]
    answers = []
    for instance in types:
        for count in counts:
            if count == 0 and instance is not types[0]:
                continue
            answers.append(_answer(question, count, instance))
    return answers


def recommend(answers: Sequence[Answer]) -> Answer:
    """The cheapest step; without prices, the fewest reducers within a hundredth of the fastest step."""
    if all(answer.usd_per_step is not None for answer in answers):
        return min(answers, key=lambda answer: answer.usd_per_step or 0)
    fastest_s = min(answer.fastest_step_s for answer in answers)
    close = [answer for answer in answers if answer.fastest_step_s <= 1.01 * fastest_s]
    return min(close, key=lambda answer: answer.reducer_count)


def _answer(question: Question, count: int, instance: Instance) -> Answer:
    job, buckets = _job(question, count, instance), _buckets(question)
    step_s = simulate_one_strand(job, buckets, question.step_s, question.network)
    answer = Answer(
        reducer_count=count,
        reducer_type=instance.name if count else "",
        step_s=step_s,
        efficiency=question.step_s / step_s,
        exposed_s=step_s - question.step_s,
        usd_per_hour=None,
        usd_per_step=None,
    )
    if question.across_steps:
        forward_s = min(_FORWARD_SHARE * question.step_s, buckets[0].ready_s)
        later = across_steps(buckets, forward_s)
        across_step_s = simulate_one_strand(job, later, question.step_s, question.network)
        answer = replace(answer, across_step_s=across_step_s, across_efficiency=question.step_s / across_step_s)
    if question.worker_usd_per_hour is None:
        return answer
    usd_per_hour = question.workers * question.worker_usd_per_hour + count * instance.usd_per_hour
    return replace(answer, usd_per_hour=usd_per_hour, usd_per_step=usd_per_hour / 3600 * answer.fastest_step_s)


def _job(question: Question, count: int, instance: Instance) -> Job:
    all_gbits = question.workers * question.worker_gbits
    reducer_gbits = min(instance.nic_gbits, all_gbits / count) if count else 0.0
    return Job(
        (Host.of_gbits(question.worker_gbits),) * question.workers,
        (Host.of_gbits(instance.nic_gbits),) * count,
        question.workers if count * instance.nic_gbits < all_gbits else 0,
        strands=strands_for(max(question.worker_gbits, reducer_gbits)),
        worker_costs=question.costs,
        reducer_costs=question.costs,
    )


def strands_for(gbits: float) -> int:
    """How many strands a job takes whose busiest host carries this rate, if its hosts have the cores.

    Example:
      >>> from jaxhetero.simulator.estimate import strands_for
      >>> strands_for(25)
      3
    """
    return min(MOST_CHOSEN_STRANDS, math.ceil(gbits * 1e9 / 8 / _STRAND_BYTES_PER_S))


def simulate_one_strand(
    job: Job, buckets: Sequence[Bucket], step_s: float, network: Network, call_bytes: int | None = None
) -> float:
    """The seconds of a step, by one strand with its part of interfaces and cores. The others do the same beside it.

    That takes as many times less as the job has strands, and is the same where interfaces are the limit.
    ``call_bytes``: see ``simulate_steps``.

    Example:
      >>> from jaxhetero.simulator import Bucket, Host, Job, Network
      >>> from jaxhetero.simulator.estimate import simulate_one_strand
      >>> host = Host.of_gbits(40)
      >>> job = Job((host,) * 2, (host,) * 2, strands=4)
      >>> 0.02 < simulate_one_strand(job, [Bucket(10**8, 0.0)], 0.0, Network()) < 0.05
      True
    """
    strands = job.strands
    own: list[Bucket] = []
    # Where not all strands carry a bucket, they take turns. This one begins with the last bucket, which ends the step.
    turn = 0
    counts = job.part_counts(buckets, network)
    for bucket, count in zip(reversed(buckets), reversed(counts), strict=True):
        if -turn % strands < count:
            own.append(replace(bucket, bytes=max(4, bucket.bytes // count)))
        turn += count
    workers, reducers = (
        tuple(Host((host.bytes_per_s / strands,), max(1, host.cores // strands)) for host in hosts)
        for hosts in (job.workers, job.reducers)
    )
    one = replace(job, workers=workers, reducers=reducers, strands=1)
    call_bytes = call_bytes or sum(bucket.bytes for bucket in buckets)
    # A step that takes totals of the one before is as those behind it from the third on.
    takes_earlier = any(bucket.needed_s is not None for bucket in own)
    rounds, warmup = (2, 2) if takes_earlier else (1, 1)
    steps = simulate_steps(one, own[::-1], step_s, network, rounds=rounds, warmup=warmup, call_bytes=call_bytes)
    return steps.time_s


def _buckets(question: Question) -> list[Bucket]:
    """By default of equal size, and ready at equal distances from the end of the forward pass to that of the step."""
    if question.buckets:
        return list(question.buckets)
    count = max(1, round(question.gradient_bytes / _BUCKET_BYTES))
    forward_s = _FORWARD_SHARE * question.step_s
    backward_s = question.step_s - forward_s
    size_bytes = max(4, question.gradient_bytes // count)
    return [Bucket(size_bytes, forward_s + backward_s * (number + 1) / count) for number in range(count)]


def _parts(workers: int) -> list[int]:
    return sorted({max(1, workers // 4), max(1, workers // 2), workers})


def _instance(name: str) -> Instance:
    prices = read_prices()
    if name not in prices:
        raise ConfigError(f"no price of {name}; there are {', '.join(prices)}")
    return prices[name]


def _cheapest(gbits: float) -> Instance:
    """The cheapest host that is as fast; if there is none, the one whose bandwidth is cheapest."""
    hosts = [instance for instance in read_prices().values() if not instance.accelerator_count]
    fast = [instance for instance in hosts if instance.nic_gbits >= gbits]
    if fast:
        return min(fast, key=lambda instance: instance.usd_per_hour)
    return min(hosts, key=lambda instance: instance.usd_per_hour / instance.nic_gbits)
