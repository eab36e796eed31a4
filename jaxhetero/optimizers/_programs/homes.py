"""Where each value of an update is computed: by the workers, by reducers from their elements, or from sums.

Nothing is told by names or shapes. The gradient and the weights of a leaf are at the reducers. A state is there too if
its next value depends on them element by element, as a moment does; and a count, which depends on no gradient, stays
with the workers, with all that follows from it. A number that depends on sums over gradients, such as whether all were
finite, stays with the workers as well: they get those sums before the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from jaxhetero.optimizers._programs.graph import SUM, Call, Constant, Graph, Input, Result, Value

# The number of a leaf: each reducer computes the elements that it has. Or one of these:
Home: TypeAlias = int
WORKERS: Home = -1
TOTALS: Home = -2  # one number, which depends on sums over tensors
NOWHERE: Home = -3  # elements of several leaves meet


class Homes:
    """The home of every value of a graph."""

    def __init__(self, graph: Graph, leaf_count: int, next_states: Mapping[int, Value]) -> None:
        """Find them.

        Args:
          graph: its inputs are the gradients, the weights, and then the states.
          leaf_count: of gradients, and of weights.
          next_states: for each state, by the number of its input, what it becomes.
        """
        self._inputs: dict[int, Home] = {i: i % leaf_count for i in range(2 * leaf_count)}
        self._calls: dict[Call, Home] = {}
        while True:
            self._calls = {}
            for call in graph.calls:
                self._calls[call] = self._meet(call)
            moved = {i: self[value] for i, value in next_states.items() if self[value] not in self._known(i)}
            moved |= self._met_by_elements(graph)
            if not moved:
                break
            self._inputs |= moved

    def __getitem__(self, value: Value) -> Home:
        if isinstance(value, Constant):
            return WORKERS
        if isinstance(value, Input):
            return self._inputs.get(value.number, WORKERS)
        assert isinstance(value, Result)
        return self._calls[value.call]

    def is_total(self, call: Call) -> bool:
        """Whether a call adds up a tensor of the reducers."""
        return call.name == SUM and self[call.operands[0]] >= 0

    def _known(self, state: int) -> set[Home]:
        """What needs no change: a number made of totals goes back to the workers, and is theirs in the next step."""
        home = self._inputs.get(state, WORKERS)
        return {home, TOTALS} if home == WORKERS else {home}

    def _met_by_elements(self, graph: Graph) -> dict[int, Home]:
        """States of the workers that have a number for each element of a leaf, and are used with those elements."""
        return {
            operand.number: self._calls[call]
            for call in graph.calls
            for operand in call.operands
            if self._calls[call] >= 0 and isinstance(operand, Input) and self[operand] == WORKERS and operand.shape
        }

    def _meet(self, call: Call) -> Home:
        homes = {self[operand] for operand in call.operands}
        leaves = [home for home in homes if home >= 0]
        if NOWHERE in homes or len(leaves) > 1:
            return NOWHERE
        if leaves:
            return TOTALS if call.name == SUM else leaves[0]
        return TOTALS if TOTALS in homes else WORKERS


def needed_calls(homes: Homes, home: Home, values: Sequence[Value]) -> list[Call]:
    """The calls of one home that the values need, each behind those that it needs."""
    needed: set[Call] = set()
    waiting = [value for value in values if homes[value] == home]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, Result) or value.call in needed:
            continue
        call = value.call
        needed.add(call)
        if not homes.is_total(call):
            waiting += [operand for operand in call.operands if homes[operand] == home]
    return in_order(needed)


def in_order(calls: Iterable[Call]) -> list[Call]:
    """The calls, each behind those that it needs."""
    return sorted(calls, key=lambda call: call.number)
