"""The workers and reducers of a benchmark, on hosts w0, w1, ... and r0, r1, ..., and the conditions there."""

from __future__ import annotations

from dataclasses import dataclass

from bench.harness.errors import BenchError
from jaxhetero import best_time_s
from lab.netlab import Lab, Rate, measure_goodput, measure_round_trip


def worker_host(rank: int) -> str:
    return f"w{rank}"


def reducer_host(index: int) -> str:
    return f"r{index}"


@dataclass(frozen=True)
class Job:
    """The numbers of workers and reducers, and the rates of their network interfaces; None for no limit."""

    worker_count: int
    reducer_count: int
    """Dedicated reducers."""
    colocated_count: int = 0
    """The number of workers, from rank 0 on, that reduce as well."""
    rate: str | None = None
    reducer_rates: tuple[str, ...] = ()
    """Rates of the dedicated reducers, in turn, in place of ``rate``."""

    def __post_init__(self) -> None:
        if self.worker_count < 1 or self.reducer_count < 0:
            raise BenchError(f"{self.worker_count} workers and {self.reducer_count} reducers make no job")
        if not 0 <= self.colocated_count <= self.worker_count:
            raise BenchError(f"--colocated is {self.colocated_count}; there are {self.worker_count} workers")
        if self.worker_count > 1 and self.reducer_count + self.colocated_count == 0:
            raise BenchError("nobody would reduce: give --reducers K or --colocated N")
        if self.reducer_rates and self.rate is None:
            raise BenchError("--reducer-rates needs a --rate for the workers")

    def reducer_rate(self, index: int) -> str | None:
        return self.reducer_rates[index % len(self.reducer_rates)] if self.reducer_rates else self.rate

    def hosts(self) -> dict[str, str | None]:
        """The rate of every host."""
        workers = {worker_host(rank): self.rate for rank in range(self.worker_count)}
        return workers | {reducer_host(index): self.reducer_rate(index) for index in range(self.reducer_count)}

    def best_factor(self, collective: str = "psum") -> float:
        """The best possible time in units of S/B, where B is the goodput of a worker's interface."""
        reducers = [self._relative_rate(index) for index in range(self.reducer_count)]
        if collective == "psum":
            return best_time_s(1, [1.0] * self.worker_count, reducers, self.colocated_count)
        others = self.worker_count - 1
        if self.colocated_count == self.worker_count:  # each worker's own row stays there
            return others / self.worker_count
        if self.colocated_count > 0:
            raise BenchError(f"--collective {collective} wants --colocated 0, or {self.worker_count} as --workers")
        if collective == "psum_scatter":  # workers send S, reducers get it from all of them
            return max(1.0, self.worker_count / sum(reducers))
        return max(others / self.worker_count, others / sum(reducers))  # reducers send each row to all others

    def _relative_rate(self, index: int) -> float:
        own = self.reducer_rate(index)
        return Rate.parse(own).bits_per_s / Rate.parse(self.rate).bits_per_s if own and self.rate else 1.0


@dataclass(frozen=True)
class Conditions:
    """The reference values of a run, measured before it."""

    worker_count: int
    reducer_count: int
    colocated_count: int
    rate_bytes_per_s: float | None
    """The configured rate of a worker's interface; None without a limit."""
    goodput_bytes_per_s: float
    """B: the goodput of one TCP connection between two workers, in one direction."""
    round_trip_s: float
    """The median time of a byte from one worker to another and back over TCP."""
    best_factor: float
    """The best possible time in units of S/B."""

    def limit_s(self, size_bytes: float) -> float:
        return self.best_factor * size_bytes / self.goodput_bytes_per_s

    def describe(self) -> str:
        share = f", {self.goodput_bytes_per_s / self.rate_bytes_per_s:.3f} of the rate" if self.rate_bytes_per_s else ""
        return (
            f"TCP goodput B of one interface: {self.goodput_bytes_per_s / 1e6:.3f} MB/s{share}; "
            f"ping: {self.round_trip_s * 1e6:.0f} us; best possible time: {self.best_factor:.3f} S/B"
        )


def measure_conditions(job: Job, lab: Lab, collective: str = "psum") -> Conditions:
    first, second = (lab[worker_host(rank)] for rank in range(2))
    return Conditions(
        job.worker_count,
        job.reducer_count,
        job.colocated_count,
        rate_bytes_per_s=first.rate.bytes_per_s if lab.isolated and first.rate else None,
        goodput_bytes_per_s=measure_goodput(first, second),
        round_trip_s=measure_round_trip(first, second),
        best_factor=job.best_factor(collective),
    )
