"""Which worker sees which example in which step.

The order of the examples depends only on the seed and the epoch. Every global batch is cut into *pieces* of
``micro_batch`` examples. A worker runs one forward and backward pass for each of its pieces. Worker ``rank`` takes the
pieces ``rank``, ``rank + worker_count``, ... A step therefore has the same pieces on any number of workers. Training on
four workers and training on one worker with four times the accumulation differ only by the rounding of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import grain
import jax
import numpy as np
from numpy.typing import NDArray

import jaxhetero
from models.common.errors import DataError, require

READ_THREADS = 4
PREFETCHED_PIECES = 8

Example = dict[str, NDArray[Any]]
Batch = tuple[Any, ...]


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is split into pieces, and which pieces are this worker's."""

    global_batch: int
    micro_batch: int
    rank: int
    worker_count: int

    @classmethod
    def make(cls, global_batch: int, micro_batch: int, *, rank: int, worker_count: int) -> BatchSplit:
        """Check the sizes. ``micro_batch`` 0 makes each worker's part of the global batch one piece.

        Raises:
          SettingsError: the workers cannot have equal parts, or a part is no whole number of pieces.
        """
        require(
            global_batch % worker_count == 0,
            f"global_batch {global_batch} cannot be shared equally by {worker_count} workers; "
            f"the next size that can is {math.ceil(global_batch / worker_count) * worker_count}",
        )
        local_batch = global_batch // worker_count
        micro_batch = micro_batch or local_batch
        require(
            local_batch % micro_batch == 0,
            f"micro_batch is {micro_batch}; it must divide the {local_batch} examples of a worker "
            f"(global_batch {global_batch} on {worker_count} workers)",
        )
        return cls(global_batch, micro_batch, rank, worker_count)

    @classmethod
    def of_pieces(cls, global_batch: int, pieces: int, *, rank: int, worker_count: int) -> BatchSplit:
        """A split into so many pieces, of which some workers may have one more than others.

        Raises:
          SettingsError: the pieces are no equal parts, or there are more workers than pieces.
        """
        require(
            global_batch % pieces == 0,
            f"--microbatches is {pieces}; the {global_batch} examples of a step must be a multiple of that",
        )
        require(
            worker_count <= pieces,
            f"--microbatches is {pieces}, fewer than the {worker_count} workers, each of which needs one in every step",
        )
        return cls(global_batch, global_batch // pieces, rank, worker_count)

    @property
    def accumulate_every(self) -> int:
        """Pieces of this worker in one step."""
        return len(range(self.rank, self.pieces_per_step, self.worker_count))

    @property
    def pieces_per_step(self) -> int:
        """Pieces of all workers in one step."""
        return self.global_batch // self.micro_batch

    def piece(self, step: int, index: int) -> int:
        """The number of this worker's piece ``index`` of a step, counted over the whole run."""
        return step * self.pieces_per_step + index * self.worker_count + self.rank


def pieces_for(global_batch: int, micro_batch: int, worker_count: int) -> int:
    """Into how many pieces a global batch is cut: as ``micro_batch`` says, or the least that gives each worker one."""
    if micro_batch:
        require(
            global_batch % micro_batch == 0,
            f"micro_batch is {micro_batch}; it must divide the global batch ({global_batch})",
        )
        return global_batch // micro_batch
    return next((n for n in range(worker_count, global_batch) if global_batch % n == 0), global_batch)


@dataclass(frozen=True)
class OwnPieces:
    """The numbers of a worker's pieces from a step on, as a sequence."""

    split: BatchSplit
    first_step: int
    step_count: int

    def __len__(self) -> int:
        return self.step_count * self.split.accumulate_every

    def __getitem__(self, place: Any) -> int:
        step, index = divmod(int(place), self.split.accumulate_every)
        return self.split.piece(self.first_step + step, index)


@lru_cache(maxsize=2)
def epoch_order(example_count: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """The indices of an epoch's examples, in the order of training."""
    return np.random.default_rng((seed, epoch)).permutation(example_count)


@dataclass(frozen=True)
class ExampleStream:
    """All epochs as one sequence of pairs: the index of the example at a position, and its epoch."""

    example_count: int
    epoch_size: int
    """Positions per epoch: all examples, or fewer if an epoch has only full batches."""
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
    """This worker's pieces from ``first_step`` on. Threads read ahead.

    ``positions`` is a sequence. ``load`` makes an example from one of its elements.
    """
    pieces = grain.MapDataset.source(positions).map(load).batch(split.micro_batch, drop_remainder=True)
    mine = OwnPieces(split, first_step, max(0, len(pieces) // split.pieces_per_step - first_step))
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=PREFETCHED_PIECES)
    return iter(grain.MapDataset.source(mine).map(lambda number: pieces[number]).to_iter_dataset(options))


class Pieces:
    """This worker's pieces, step by step, as each step is dealt.

    Args:
      split: how a step is shared out.
      batches: from a split and a step to this worker's batches from that step on. It is called anew where the steps do
        not follow each other, or are dealt otherwise.
      are_joined: the pieces of a step are one batch.
    """

    def __init__(
        self, split: BatchSplit, batches: Callable[[BatchSplit, int], Iterator[Batch]], *, are_joined: bool = False
    ) -> None:
        self._split, self._batches, self._are_joined = split, batches, are_joined
        self._next: tuple[BatchSplit, int] | None = None
        self._stream: Iterator[Batch] = iter(())

    def example(self) -> Batch:
        """A batch like all others."""
        first = next(self._from(self._split, 0))
        self._stream = chain([first], self._stream)
        return first

    def of_step(self, step: int, team: jaxhetero.elastic.Team) -> Iterator[Batch]:
        """Those of this worker, in an elastic job as a member of the team. The caller takes all of them."""
        split = self._split
        if jaxhetero.elastic.is_elastic():
            split = replace(split, rank=team.index, worker_count=team.size)
        stream = self._from(split, step)
        self._next = (split, step + 1)
        return islice(stream, 1 if self._are_joined else split.accumulate_every)

    def _from(self, split: BatchSplit, step: int) -> Iterator[Batch]:
        if self._next != (split, step):
            stream = self._batches(split, step)
            self._stream = joined(stream, split.accumulate_every) if self._are_joined else stream
            self._next = (split, step)
        return self._stream


def joined(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """``count`` pieces at a time, one after the other along their first axis; numbers become arrays of ``count``."""
    while pieces := list(islice(batches, count)):
        yield jax.tree.map(lambda *leaves: np.concatenate([np.atleast_1d(leaf) for leaf in leaves]), *pieces)


def evaluation_batches(
    example_count: int, load: Callable[[int], Example], *, batch: int, rank: int, worker_count: int
) -> Iterator[tuple[Example, NDArray[np.bool_]]]:
    """This rank's share of a held-out set, in batches of one size, each with a mask: bool ``[batch]``.

    Copies of the share's first example fill up the last batch. The mask is True for real examples and False for these
    copies, so a count over it is exact.

    Raises:
      DataError: the held-out set is empty.
    """
    if example_count == 0:
        raise DataError("the held-out set is empty: there is nothing to evaluate on")
    mine = np.arange(rank, example_count, worker_count)
    if len(mine) == 0:
        return
    filled = np.concatenate([mine, np.full(-len(mine) % batch, mine[0])])
    batches = grain.MapDataset.source(filled).map(lambda number: load(int(number))).batch(batch)
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=PREFETCHED_PIECES)
    for number, stacked in enumerate(batches.to_iter_dataset(options)):
        yield stacked, np.arange(batch) < len(mine) - number * batch
