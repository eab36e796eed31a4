"""Cutting a sequence of operations: the best partition is found."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from jaxhetero.pipeline.partition import FORBIDDEN, Chain, Partition, cut


def random_chain(seed: int) -> tuple[Chain, int]:
    draw = random.Random(seed)
    count = draw.randint(4, 11)
    part_count = draw.randint(2, min(4, count))
    made, used, sizes = [], [], []
    for operation in range(count - 1):
        for _ in range(draw.randint(0, 2)):
            later = range(operation + 1, count)
            made.append(operation)
            used.append(sorted(draw.sample(later, draw.randint(1, min(3, len(later))))))
            sizes.append(float(draw.randint(1, 50)))
    return Chain(np.array([draw.choice([1.0, 2.0, 3.0, 5.0]) for _ in range(count)]), made, used, sizes), part_count


def received_bytes(chain: Chain, edges: tuple[int, ...]) -> float:
    return sum(
        size
        for begin, end in pairwise(edges)
        for made, used, size in zip(chain.made, chain.used, chain.sizes, strict=True)
        if made < begin and any(begin <= user < end for user in used)
    )


def all_partitions(chain: Chain, part_count: int) -> list[Partition]:
    found = []
    for inner in combinations(range(1, len(chain)), part_count - 1):
        edges = (0, *inner, len(chain))
        largest = max(float(chain.costs[begin:end].sum()) for begin, end in pairwise(edges))
        found.append(Partition(edges, largest, received_bytes(chain, edges)))
    return found


@pytest.mark.parametrize("slack", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(50))
def test_no_partition_is_better(seed: int, slack: float) -> None:
    chain, part_count = random_chain(seed)
    every = all_partitions(chain, part_count)
    least = min(partition.largest_s for partition in every)
    allowed = [partition for partition in every if partition.largest_s <= least * (1 + slack) + 1e-9]
    found = cut(chain, part_count, slack=slack)
    assert found is not None
    assert found.largest_s <= least * (1 + slack) + 1e-9
    assert found.received_bytes == min(partition.received_bytes for partition in allowed)
    assert found.received_bytes == received_bytes(chain, found.edges)


@pytest.mark.parametrize("seed", range(20))
def test_every_part_fits(seed: int) -> None:
    """With room for so much in each part, the least largest part that this allows, to 5 %."""
    chain, part_count = random_chain(seed)
    weights = [random.Random(1000 + seed + operation).randint(1, 9) for operation in range(len(chain))]
    room = 1.4 * sum(weights) / part_count

    def fits(part: int, begin: int, end: int) -> bool:
        return sum(weights[begin:end]) <= room + part

    allowed = [
        partition.largest_s
        for partition in all_partitions(chain, part_count)
        if all(fits(part, begin, end) for part, (begin, end) in enumerate(pairwise(partition.edges)))
    ]
    found = cut(chain, part_count, fits=fits)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found.largest_s <= min(allowed) * 1.05 + 1e-9
    assert all(fits(part, begin, end) for part, (begin, end) in enumerate(pairwise(found.edges)))


def test_what_must_not_travel_stays_in_one_part() -> None:
    chain = Chain(np.ones(6), [1], [[4]], [FORBIDDEN])
    found = cut(chain, 2)
    assert found is not None
    assert not any(1 < edge <= 4 for edge in found.edges[1:-1])


def test_parts_are_nearly_equal_where_no_operation_is_large() -> None:
    draw = random.Random(0)
    costs = np.array([draw.uniform(0, 1) for _ in range(6000)])
    count = len(costs)
    chain = Chain(costs, range(count - 1), [[operation + 1] for operation in range(count - 1)], [1.0] * (count - 1))
    for part_count in (2, 8, 32):
        found = cut(chain, part_count)
        assert found is not None
        assert found.largest_s <= 1.05 * costs.sum() / part_count
