"""Where a sequence of operations is cut: the least largest part, and then the fewest bytes that travel."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

FORBIDDEN = 1e18
"""More bytes than all that may travel together."""

_ROUNDING = 1e-9
_BISECTIONS = 60
# With more positions than this, those that a neighbour beats are left out: the search takes the square of their number.
_MANY = 400
_NEIGHBOURHOOD = 0.002


@dataclass(frozen=True)
class Chain:
    """A sequence of operations, and what passes between them.

    Attributes:
      costs: seconds of each operation.
      made: for each value that operations pass on, the number of the operation that makes it, ascending.
      used: for each value, the numbers of the operations that use it, ascending. They are above the one that makes it.
      sizes: bytes of each value; FORBIDDEN for one that must not travel.
    """

    costs: Floats
    made: Sequence[int]
    used: Sequence[Sequence[int]]
    sizes: Sequence[float]

    def __len__(self) -> int:
        return len(self.costs)


Fits = Callable[[int, int, int], bool]
"""``fits(part, begin, end)``: whether operations ``begin`` to ``end`` have room as this part. If not, nor have more."""


@dataclass(frozen=True)
class Partition:
    """Part ``k`` has the operations ``edges[k]`` to ``edges[k + 1]``."""

    edges: tuple[int, ...]
    largest_s: float
    received_bytes: float
    """Of all parts: each receives, once, the values that it uses and has not made."""


def least_largest(costs: Floats, part_count: int) -> float:
    """The cost of the most expensive part, in the partition into at most so many parts in which that is least."""
    sums = _sums(costs)
    low, high = max(float(costs.max()), sums[-1] / part_count), sums[-1]
    largest = high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = _largest_below(sums, middle, part_count)
        if found is None:
            low = middle
        else:
            high, largest = middle, min(largest, found)
    return largest


def _sums(costs: Floats) -> list[float]:
    """The cost of all operations before each one, and of all: a list, because it is searched very often."""
    sums: list[float] = np.concatenate([[0.0], np.cumsum(costs)]).tolist()
    return sums


def _largest_below(sums: list[float], limit: float, part_count: int) -> float | None:
    """The largest of at most so many parts of at most ``limit`` that cover all; None if there are no such parts."""
    position, largest = 0, 0.0
    for _ in range(part_count):
        # For a chain it is best that each part takes as much as it can.
        end = _furthest(sums, position, limit)
        position, largest = end, max(largest, sums[end] - sums[position])
        if position == len(sums) - 1:
            return largest
    return None


def _furthest(sums: list[float], begin: int, limit: float) -> int:
    """The last end of a part from ``begin`` that costs at most ``limit``."""
    return bisect_right(sums, sums[begin] + limit * (1 + _ROUNDING)) - 1


def cut(chain: Chain, part_count: int, *, slack: float = 0.0, fits: Fits | None = None) -> Partition | None:
    """The partition in which the fewest bytes travel, of those whose largest part is nearly the least possible.

    Args:
      slack: by which share the largest part may be larger than it has to be.
      fits: what a part has room for. The largest part is then the least that room allows, as far as it is found in
        steps of 5 %.

    Returns:
      None if no partition fits.
    """
    limit = least_largest(chain.costs, part_count) * (1 + slack)
    total = float(chain.costs.sum())
    while True:
        found = _fewest_bytes(chain, part_count, limit, fits)
        if found is not None or limit > total:
            return found
        limit *= 1.05


def _fewest_bytes(chain: Chain, part_count: int, limit: float, fits: Fits | None) -> Partition | None:
    """Dynamic programming over positions: exact, because the bytes of a part depend on its ends alone."""
    sums = _sums(chain.costs)
    positions = _positions(chain, sums, limit)
    crossing = _crossing(chain, positions)
    count = len(positions)
    best = np.full((part_count + 1, count), np.inf)
    came_from = np.zeros((part_count + 1, count), dtype=np.int64)
    best[0, 0] = 0
    for start in range(count - 1):
        begin = int(positions[start])
        stop = int(np.searchsorted(positions, _furthest(sums, begin, limit), side="right"))
        if stop <= start + 1:
            continue
        ends = slice(start + 1, stop)
        received = _received(chain, crossing[start], begin, positions[ends])
        reached = best[:-1, start, None] + received
        if fits is not None:
            for part in np.flatnonzero(best[:-1, start] < np.inf).tolist():
                reached[part, _last_that_fits(fits, part, positions, start, stop) - start - 1 :] = np.inf
        better = reached < best[1:, ends]
        best[1:, ends] = np.where(better, reached, best[1:, ends])
        came_from[1:, ends] = np.where(better, start, came_from[1:, ends])
    if best[part_count, count - 1] >= FORBIDDEN:
        return None
    edges = [count - 1]
    for part in range(part_count, 0, -1):
        edges.append(int(came_from[part, edges[-1]]))
    chosen = tuple(int(positions[index]) for index in reversed(edges))
    largest = max(sums[end] - sums[begin] for begin, end in pairwise(chosen))
    return Partition(chosen, largest, float(best[part_count, count - 1]))


def _last_that_fits(fits: Fits, part: int, positions: NDArray[np.int64], start: int, stop: int) -> int:
    """One past the last index of ``positions`` where the part may end."""
    begin = int(positions[start])
    return bisect_left(range(stop), True, lo=start + 1, key=lambda end: not fits(part, begin, int(positions[end])))


def _positions(chain: Chain, sums: list[float], limit: float) -> NDArray[np.int64]:
    """Where a cut may lie. Of very many positions, those where no neighbour of nearly the same cost is cut cheaper."""
    count = len(chain)
    everywhere = np.arange(count + 1)
    if count <= _MANY:
        return everywhere
    last_uses = np.array([used[-1] for used in chain.used])
    crossing = np.bincount(np.asarray(chain.made) + 1, chain.sizes, count + 1)
    crossing -= np.bincount(last_uses + 1, chain.sizes, count + 1)
    live = np.cumsum(crossing)
    width = limit * _NEIGHBOURHOOD
    before = np.asarray(sums)[1:-1]
    low = np.maximum(np.searchsorted(sums, before - width), 1)
    high = np.minimum(np.searchsorted(sums, before + width, side="right"), count)
    least = np.minimum.reduceat(live, np.stack([low, high], axis=1).ravel())[::2]
    return np.concatenate([[0], everywhere[1:-1][live[1:-1] <= least], [count]])


def _crossing(chain: Chain, positions: NDArray[np.int64]) -> list[list[int]]:
    """The values that are made before each position and used at it or after it."""
    found: list[list[int]] = [[] for _ in positions]
    firsts = np.searchsorted(positions, np.asarray(chain.made, np.int64) + 1)
    lasts = np.searchsorted(positions, np.array([used[-1] for used in chain.used], np.int64), side="right")
    for value, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
        for index in range(first, last):
            found[index].append(value)
    return found


def _received(chain: Chain, values: list[int], begin: int, ends: NDArray[np.int64]) -> Floats:
    """For each end, the bytes that a part from ``begin`` to there receives."""
    all_uses = [chain.used[value] for value in values]
    next_uses = np.array([used[bisect_left(used, begin)] for used in all_uses], np.int64)
    first_ends = np.searchsorted(ends, next_uses + 1)
    arriving = np.bincount(first_ends, [chain.sizes[value] for value in values], len(ends))
    return np.cumsum(arriving[: len(ends)])
