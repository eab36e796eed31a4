"""What a worker holds of the parameters: whole leaves, and rows of leaves that are stacked over a scan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.graph import Value
from jaxhetero.pipeline.stacked import Span

Ranges = tuple[tuple[int, int], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that a worker holds of a leaf that is stacked over the steps of a ``jax.lax.scan``.

    It is a pytree with one leaf, so that ``jax.tree.map`` and optimizers pass through it.

    Attributes:
      array: the rows, in their order, along the first axis.
      ranges: which rows: pairs of the first one and the one after the last, ascending.
      length: how many rows the whole leaf has.

    Example:
      >>> rows = jaxhetero.pipeline.Rows(jnp.ones((3, 2)), ((0, 1), (4, 6)), 8)
      >>> jax.tree.map(jnp.shape, rows).array
      (3, 2)
    """

    array: Any
    ranges: Ranges = field(metadata={"static": True})
    length: int = field(metadata={"static": True})


def is_leaf(node: Any) -> bool:
    """Whether a node of a worker's tree takes the place of a leaf of the whole tree: some rows of it, or nothing."""
    return node is None or isinstance(node, Rows)


def take_rows(array: Any, ranges: Ranges) -> Any:
    """These rows of an array, of NumPy or JAX."""
    parts = [array[begin:end] for begin, end in ranges]
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def _concatenate(arrays: Sequence[Any]) -> Any:
    on_host = all(isinstance(array, np.ndarray) for array in arrays)
    return np.concatenate(arrays) if on_host else jnp.concatenate(arrays)


class Holding:
    """What a worker holds of each leaf of the parameters.

    A *parameter* is what the cut knows: a leaf, or the rows of a leaf that one part of a scan uses.
    """

    def __init__(self, inputs: Sequence[Value], spans: Mapping[int, Span], params: Iterable[int]) -> None:
        """Of the parameters with these numbers among the inputs; those in ``spans`` are rows."""
        self._inputs = inputs
        self._whole: set[int] = set()
        self._pieces: dict[int, list[tuple[int, Span]]] = defaultdict(list)
        for number in params:
            if number in spans:
                self._pieces[spans[number].leaf].append((number, spans[number]))
            else:
                self._whole.add(number)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[1])

    @property
    def leaves(self) -> list[int]:
        """The numbers of the leaves of which the worker holds something, ascending."""
        return sorted(self._whole.union(self._pieces))

    def leaves_of(self, params: Iterable[int]) -> list[int]:
        """The numbers of the leaves that these parameters belong to, ascending."""
        wanted = set(params)
        stacked = (leaf for leaf, pieces in self._pieces.items() if any(number in wanted for number, _ in pieces))
        return sorted((wanted & self._whole).union(stacked))

    def shape(self, leaf: int) -> jax.ShapeDtypeStruct:
        """Of the array that the worker holds of a leaf."""
        whole = self._inputs[leaf].shape
        if leaf in self._whole:
            return whole
        count = sum(span.count for _, span in self._pieces[leaf])
        return jax.ShapeDtypeStruct((count, *whole.shape[1:]), whole.dtype, weak_type=whole.weak_type)

    def take(self, leaf: int, given: Any) -> Any:
        """What the worker holds of a leaf: an array, or ``Rows``.

        Args:
          given: the whole leaf; or what was taken of it before, or None, which are returned.

        Raises:
          ConfigError: these are rows of another worker.
        """
        ranges = self._ranges(leaf)
        if given is None or isinstance(given, Rows) or not ranges:
            self.array(leaf, given)
            return given
        return Rows(take_rows(given, ranges), ranges, self._length(leaf))

    def array(self, leaf: int, held: Any) -> Any:
        """The array of what ``take`` returned.

        Raises:
          ConfigError: these are rows of another worker, or a whole leaf of which this one holds rows.
        """
        ranges = self._ranges(leaf)
        found = held.ranges if isinstance(held, Rows) else ()
        if held is not None and found != ranges:
            raise ConfigError(
                f"pipeline: of leaf {leaf} of the parameters, {_text(found)} were given to a worker that holds "
                f"{_text(ranges)}; give what Pipeline.init or Pipeline.own made on this worker"
            )
        return held.array if isinstance(held, Rows) else held

    def parts(self, leaf: int, array: Any) -> list[tuple[int, Any]]:
        """The numbers of the parameters that a leaf consists of, each with its part of the array that is held."""
        pieces = self._pieces.get(leaf)
        if pieces is None:
            return [(leaf, array)]
        if len(pieces) == 1:
            return [(pieces[0][0], array)]
        ends = accumulate(span.count for _, span in pieces)
        return [(number, array[end - span.count : end]) for (number, span), end in zip(pieces, ends, strict=True)]

    def join(self, leaf: int, arrays: Mapping[int, Any]) -> Any:
        """As ``take``, of arrays by the numbers of the parameters; None without them."""
        numbers = [number for number, _ in self._pieces[leaf]] if leaf in self._pieces else [leaf]
        if not arrays.keys() >= set(numbers):
            return None
        if leaf in self._whole:
            return arrays[leaf]
        array = arrays[numbers[0]] if len(numbers) == 1 else _concatenate([arrays[number] for number in numbers])
        ranges = self._ranges(leaf)
        return Rows(array, ranges, self._length(leaf)) if ranges else array

    def _length(self, leaf: int) -> int:
        return int(self._inputs[leaf].aval.shape[0])

    def _ranges(self, leaf: int) -> Ranges:
        """The rows that are held of a leaf; empty if all are."""
        merged: list[tuple[int, int]] = []
        for _, span in self._pieces.get(leaf, ()):
            begin = merged.pop()[0] if merged and merged[-1][1] == span.begin else span.begin
            merged.append((begin, span.end))
        return () if merged and merged == [(0, self._length(leaf))] else tuple(merged)


def _text(ranges: Ranges) -> str:
    return "rows " + ", ".join(f"{begin} to {end - 1}" for begin, end in ranges) if ranges else "all rows"
