"""Who sees which example when.

The order of the examples depends on the seed and the epoch only. Every global batch is cut into *pieces* of
``micro_batch`` examples, one forward and backward pass of one worker each; worker ``rank`` takes the pieces ``rank``,
``rank + worker_count``, ... So the same pieces go into the same step on any number of workers, and training on four
workers or with four times the accumulation on one differs by the rounding of sums only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from models.common.errors import DataError, require

READ_THREADS = 4
PREFETCHED_PIECES = 8

Example = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is shared out."""

    global_batch: int
    micro_batch: int
    rank: int
    worker_count: int

    @classmethod
    def make(cls, global_batch: int, micro_batch: int, *, rank: int, worker_count: int) -> BatchSplit:
        """``micro_batch`` 0: each worker's part of the global batch in one piece."""
        require(
            global_batch % worker_count == 0,
            f"global_batch {global_batch} cannot be shared equally by {worker_count} workers; "
            f"the next that can is {math.ceil(global_batch / worker_count) * worker_count}",
        )
        local_batch = global_batch // worker_count
        micro_batch = micro_batch or local_batch
        require(
            local_batch % micro_batch == 0,
            f"micro_batch is {micro_batch}; it must divide the {local_batch} examples of a worker "
            f"(global_batch {global_batch} on {worker_count} workers)",
        )
        return cls(global_batch, micro_batch, rank, worker_count)

    @property
    def accumulate_every(self) -> int:
        """Pieces of one worker in one step."""
        return self.global_batch // (self.worker_count * self.micro_batch)

    @property
    def pieces_per_step(self) -> int:
        """Pieces of all workers in one step."""
        return self.global_batch // self.micro_batch

    def piece(self, step: int, index: int) -> int:
        """The number of this worker's piece ``index`` of a step, counted over the whole run."""
        return step * self.pieces_per_step + index * self.worker_count + self.rank


@lru_cache(maxsize=2)
def epoch_order(example_count: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """The examples of an epoch in the order in which they are seen."""
    return np.random.default_rng((seed, epoch)).permutation(example_count)


@dataclass(frozen=True)
class ExampleStream:
    """Epoch after epoch: which example is seen at a position, and in which epoch."""

    example_count: int
    epoch_size: int
    """Positions per epoch: all examples, or fewer where an epoch consists of full batches only."""
    position_count: int
    seed: int

    def __len__(self) -> int:
        return self.position_count

    def __getitem__(self, position: Any) -> tuple[int, int]:
        epoch, place = divmod(int(position), self.epoch_size)
        return int(epoch_order(self.example_count, self.seed, epoch)[place]), epoch


def read_pieces(
    positions: Any, load: Callable[[Any], Example], split: BatchSplit, *, first_step: int = 0
) -> Iterator[Example]:
    """This worker's pieces from ``first_step`` on, read ahead by threads.

    ``positions`` is a sequence; ``load`` makes the example for one of its elements.
    """
    pieces = grain.MapDataset.source(positions).map(load).batch(split.micro_batch, drop_remainder=True)
    mine = pieces[split.piece(first_step, 0) :: split.worker_count]
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=PREFETCHED_PIECES)
    return iter(mine.to_iter_dataset(options))


def evaluation_batches(
    example_count: int, load: Callable[[int], Example], *, batch: int, rank: int, worker_count: int
) -> Iterator[tuple[Example, NDArray[np.bool_]]]:
    """This rank's share of a held-out set in batches of one size, the last one filled up with its first example.

    The second value is True for real examples and False for filling, so that a count over it is exact.
    """
    if example_count == 0:
        raise DataError("there is nothing to evaluate on: the held-out set is empty")
    mine = np.arange(rank, example_count, worker_count)
    if len(mine) == 0:
        return
    filled = np.concatenate([mine, np.full(-len(mine) % batch, mine[0])])
    batches = grain.MapDataset.source(filled).map(lambda number: load(int(number))).batch(batch)
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=PREFETCHED_PIECES)
    for number, stacked in enumerate(batches.to_iter_dataset(options)):
        yield stacked, np.arange(batch) < len(mine) - number * batch
