"""How fast an all-reduce can be at best."""

from __future__ import annotations


def best_factor(worker_count: int, reducer_count: int) -> float:
    """The best possible time in units of S/B: bytes of the payload over the bytes a second of one NIC.

    For k dedicated reducers beside n workers, all with NICs of the same rate, and the rest reduced by the workers
    themselves (BytePS, OSDI 2020). More reducers than workers do not help: every worker still sends and receives S.
    """
    n, k = worker_count, min(reducer_count, worker_count)
    if n == 1:
        return 0.0
    return 2 * n * (n - 1) / (n * n + k * n - 2 * k)
