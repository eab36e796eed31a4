"""The contributions of the workers, and the results that an engine must give.

Worker r contributes ``base + r``, with a pseudo-random whole number ``base`` for each element. The dtype holds the sum
exactly, so an engine must give this sum in whatever order it adds. An element in the wrong place, an element left out
and an element added twice each give another sum. ``exact_dtype`` is the narrowest dtype in which values travel, that of
the wire.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from bench.harness.errors import BenchError

# Whole numbers up to this one are exact.
_EXACT = {"float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8, "int32": 1 << 31}
DTYPES = tuple(_EXACT)
# The largest number of each dtype of the wire that has scales.
NUMBERS = {"int8": 127, "int4": 7}
# How often the largest exact number can be doubled.
_DOUBLINGS = {"float32": 127 - 24, "float16": 15 - 11, "bfloat16": 127 - 8, "int32": 0}
_MOST_BASES = 4096


def contribution(
    count: int, dtype: str, rank: int, worker_count: int, seed: int, exact_dtype: str | None = None
) -> np.ndarray:
    numbers = _base(count, exact_dtype or dtype, worker_count, seed) + np.uint32(rank)
    mine: np.ndarray = numbers.astype(_dtype(dtype))
    return mine


def expected_sum(
    count: int, dtype: str, worker_count: int, seed: int, exact_dtype: str | None = None, sum_count: int = 1
) -> np.ndarray:
    """The result of ``sum_count`` sums. After the first, every worker contributes the result of the sum before."""
    ranks = worker_count * (worker_count - 1) // 2
    total = _base(count, exact_dtype or dtype, worker_count, seed) * np.uint32(worker_count) + np.uint32(ranks)
    sums: np.ndarray = total.astype(_dtype(dtype)) * _dtype(dtype).type(float(worker_count) ** (sum_count - 1))
    return sums


def read_contribution(folder: str, count: int, dtype: str, rank: int) -> np.ndarray:
    """The worker's own values, from ``folder/RANK.npy``, over and over."""
    file = Path(folder) / f"{rank}.npy"
    values = np.load(file)
    if values.dtype.itemsize != itemsize(dtype) or values.size == 0:
        raise BenchError(f"{file} has {values.size} elements of {values.dtype}; it must have some of {dtype}")
    read: np.ndarray = np.resize(values.ravel(), count).view(_dtype(dtype))
    return read


def sum_of_files(folder: str, count: int, dtype: str, worker_count: int) -> np.ndarray:
    """As reducers sum: in the order of the ranks, in float32, rounded once."""
    total = np.zeros(count, np.float32)
    for rank in range(worker_count):
        mine = read_contribution(folder, count, dtype, rank).astype(np.float32)
        total = mine if rank == 0 else total + mine
    return total.astype(_dtype(dtype))


def sum_in_numbers(folder: str, count: int, wire_dtype: str, worker_count: int) -> np.ndarray:
    """As docs/how_to/eight_bits.md defines it, of one leaf of float32."""
    padded = count + -count % 64
    blocks = [
        np.pad(read_contribution(folder, count, "float32", rank), (0, padded - count)).reshape(-1, 64)
        for rank in range(worker_count)
    ]
    most = functools.reduce(np.maximum, (np.abs(part).max(axis=1, keepdims=True) for part in blocks))
    part, exponent = np.frexp(most.astype(np.float64) / NUMBERS[wire_dtype])
    scales = np.ldexp(1.0, np.maximum(np.where(part > 0.5, exponent, exponent - 1), -126))
    total = functools.reduce(np.add, (np.round(part / scales) for part in blocks))
    means = np.round(total / worker_count) + 0.0  # whole numbers have no -0
    sums: np.ndarray = (means * worker_count * scales).astype(np.float32).ravel()[:count]
    return sums


def own_row(array: np.ndarray, rank: int, worker_count: int) -> np.ndarray:
    """The part that ``rank`` gives to a gather, or gets of a scattered sum."""
    row: np.ndarray = array.reshape(worker_count, -1)[rank]
    return row


def expected_gather(
    count: int, dtype: str, worker_count: int, seed: int, exact_dtype: str | None = None, bucket_count: int = 1
) -> np.ndarray:
    """The rows of all ranks, in every bucket."""
    rows = []
    for rank in range(worker_count):
        whole = contribution(count, dtype, rank, worker_count, seed, exact_dtype)
        rows.append([own_row(part, rank, worker_count) for part in np.array_split(whole, bucket_count)])
    return np.concatenate([row for bucket in zip(*rows, strict=True) for row in bucket])


def most_sums(dtype: str, worker_count: int) -> int:
    """How many sums are exact if each one adds up the results of the one before.

    Each sum multiplies the numbers by ``worker_count``, which must be a power of two. The partial sums, which have at
    least float32, must be exact as well.
    """
    largest = worker_count * count_bases(dtype, worker_count) + worker_count**2 // 2
    if worker_count < 2 or worker_count.bit_count() > 1 or worker_count * largest > _EXACT["float32"]:
        return 1
    return 1 + _DOUBLINGS[dtype] // (worker_count.bit_length() - 1)


def wrong_count(result: np.ndarray, expected: np.ndarray) -> int:
    """The number of elements that differ in any bit."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return expected.size
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    return int(np.count_nonzero(result.view(bits) != expected.view(bits)))


def itemsize(dtype: str) -> int:
    return _dtype(dtype).itemsize


def count_bases(dtype: str, worker_count: int) -> int:
    """The number of values that ``base`` can take."""
    ranks = worker_count * (worker_count - 1) // 2
    base_count = min(_MOST_BASES, (_EXACT[dtype] - ranks) // worker_count)
    if base_count < 2:
        raise BenchError(f"{dtype} cannot hold the sum of {worker_count} workers exactly: take a wider dtype")
    return base_count


def _dtype(name: str) -> np.dtype:
    return np.dtype(jnp.dtype(name))


def _base(count: int, dtype: str, worker_count: int, seed: int) -> np.ndarray:
    base_count = count_bases(dtype, worker_count)
    # Fibonacci hashing: neighbours get values that are far apart.
    mixed = (np.arange(count, dtype=np.uint32) + np.uint32(seed * 7919 % 2**32)) * np.uint32(2654435769)
    return (mixed >> np.uint32(12)) % np.uint32(base_count)
