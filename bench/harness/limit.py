"""How fast an all-reduce can be at best."""

from __future__ import annotations

from collections.abc import Sequence

_BISECTIONS = 60


def best_factor(worker_count: int, reducer_count: int) -> float:
    """The best possible time in units of S/B: bytes of the payload over the bytes a second of one NIC.

    For k dedicated reducers beside n workers, all with NICs of the same rate, and the rest reduced by the workers
    themselves (BytePS, OSDI 2020). More reducers than workers do not help: every worker still sends and receives S.
    """
    n, k = worker_count, min(reducer_count, worker_count)
    if n == 1:
        return 0.0
    return 2 * n * (n - 1) / (n * n + k * n - 2 * k)


def ring_factor(worker_count: int) -> float:
    """The best possible time of a ring in units of S/B."""
    return 2 * (worker_count - 1) / worker_count


def best_s_per_byte(worker_rates: Sequence[float], reducer_rates: Sequence[float], colocated_count: int) -> float:
    """The best possible time per byte of the payload for NICs of any rates, in bytes per second.

    The first ``colocated_count`` workers may reduce a share as well. A dedicated reducer with share x of the bytes
    receives and sends n x, a worker with share a 1 + a (n - 2): the part that others reduce, and what it gets from and
    gives to the others as a reducer. The best cut makes the largest load over rate smallest; for equal rates that is
    ``best_factor`` over the rate.
    """
    n = len(worker_rates)
    if n == 1:
        return 0.0
    if not reducer_rates and not colocated_count:
        raise ValueError("nobody reduces")

    def reduced_share(time_s: float) -> float:
        """How much of a byte can be reduced in this time."""
        spare = [time_s * rate - 1 for rate in worker_rates[:colocated_count]]
        colocated = colocated_count if n == 2 else sum(spare) / (n - 2)
        return sum(time_s * rate / n for rate in reducer_rates) + colocated

    # Every worker sends its byte, whoever reduces it.
    low_s = max(1 / rate for rate in worker_rates)
    if reduced_share(low_s) >= 1:
        return low_s
    high_s = 2 * low_s
    while reduced_share(high_s) < 1:
        high_s *= 2
    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if reduced_share(middle_s) >= 1 else (middle_s, high_s)
    return high_s
