"""Whether the collectives are right for arrays on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero


def count_wrong() -> int:
    """The number of wrong elements in sums of several dtypes and sizes, and in the collectives of a tree."""
    rank, size, wrong = jaxhetero.rank(), jaxhetero.size(), 0
    for dtype in ("float32", "bfloat16", "float16", "int32", "int8"):
        for count in (0, 1, 1023, 1_000_003):
            pattern = np.arange(count) % 7
            total = np.asarray(jax.jit(jaxhetero.psum)(jnp.asarray(pattern + rank, dtype)))
            wrong += _differ(total, (pattern * size + size * (size - 1) // 2).astype(total.dtype))
    return wrong + sum(_count_wrong_in_tree(*case) for case in _cases())


Collective = Callable[..., Any]
Expected = Callable[[np.ndarray], Any]  # what becomes of a leaf, from all workers' stacked


def _cases() -> list[tuple[Collective, Expected]]:
    rank, size = jaxhetero.rank(), jaxhetero.size()

    def sum_in_bfloat16(x: Any, bucket_bytes: int) -> Any:
        return jaxhetero.psum(x, wire_dtype="bfloat16", bucket_bytes=bucket_bytes)

    def broadcast(x: Any, bucket_bytes: int) -> Any:
        return jaxhetero.broadcast(x, root=size - 1, bucket_bytes=bucket_bytes)

    return [
        (jaxhetero.psum, lambda stack: stack.sum(0)),
        (sum_in_bfloat16, lambda stack: stack.sum(0)),
        (jaxhetero.pmax, lambda stack: stack.max(0)),
        (broadcast, lambda stack: stack[-1]),
        (jaxhetero.all_gather, lambda stack: stack),
        (jaxhetero.psum_scatter, lambda stack: stack.sum(0)[rank]),
    ]


def _count_wrong_in_tree(collective: Collective, expected: Expected) -> int:
    """For a tree of several leaves, in two buckets."""
    size = jaxhetero.size()
    shapes = [(size, 3), (size,), (size, 0), (size, 5, 1000), (size, 7)]

    def contribution(rank: int) -> list[np.ndarray]:
        return [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 11 + rank for shape in shapes]

    def run(tree: list[jax.Array]) -> Any:
        return collective(tree, bucket_bytes=20_000)

    found = jax.jit(run)([jnp.asarray(leaf) for leaf in contribution(jaxhetero.rank())])
    stacks = [np.stack(leaves) for leaves in zip(*map(contribution, range(size)), strict=True)]
    return sum(_differ(np.asarray(x), expected(stack)) for x, stack in zip(found, stacks, strict=True))


def _differ(found: np.ndarray, expected: np.ndarray) -> int:
    return int(np.count_nonzero(found != expected))
