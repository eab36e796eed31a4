"""Parameters that are stacked over a scan: the rows of each part of the scan become parameters of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxhetero.pipeline.graph import Atom, Equation, Graph, Value

# Of one array, element by element, with settings that say nothing of its shape.
_ELEMENTWISE = frozenset({"convert_element_type"})


@dataclass(frozen=True, order=True)
class Span:
    """Neighbouring rows of a leaf, which are an input of the graph.

    Attributes:
      leaf: its number among the inputs.
      begin: the first row.
      end: the one after the last.
    """

    leaf: int
    begin: int
    end: int

    @property
    def count(self) -> int:
        """How many rows."""
        return self.end - self.begin


def split_leaves(graph: Graph, leaves: Sequence[int]) -> tuple[Graph, dict[int, Span]]:
    """The same function with more inputs: rows of those leaves that nothing but parts of scans uses, row by row.

    Args:
      leaves: the numbers of the inputs that may be split. They all keep their places, but nothing uses those that are.

    Returns:
      The graph, and what each new input is, by its number.
    """
    splitter = _Splitter(graph)
    for leaf in leaves:
        splitter.split(leaf)
    return splitter.graph(), splitter.spans


@dataclass(frozen=True)
class _Way:
    """From a leaf to rows of it: operations on each element, then a slice."""

    operations: tuple[Equation, ...]
    slice: Equation

    def span(self, leaf: int) -> Span:
        params = self.slice.source.params
        return Span(leaf, params["start_indices"][0], params["limit_indices"][0])


class _Splitter:
    def __init__(self, graph: Graph) -> None:
        self.spans: dict[int, Span] = {}
        self._graph = graph
        self._inputs = list(graph.inputs)
        self._users: dict[Value, list[Equation]] = defaultdict(list)
        for equation in graph.equations:
            for value in set(equation.values):
                self._users[value].append(equation)
        self._added: list[Equation] = []
        self._removed: set[Equation] = set()
        self._replaced: dict[Value, Value] = {}

    def split(self, leaf: int) -> None:
        """Split an input, if it can be."""
        ways = self._ways(self._graph.inputs[leaf])
        spans = sorted({way.span(leaf) for way in ways})
        if not spans or not _cover(spans, self._graph.inputs[leaf].aval.shape[0]):
            return
        rows: dict[Span, Value] = {}
        for span in spans:
            rows[span] = _with_rows(self._graph.inputs[leaf], span.count)
            self.spans[len(self._inputs)] = span
            self._inputs.append(rows[span])
        computed: dict[tuple[Equation, Span], Value] = {}
        for way in ways:
            span = way.span(leaf)
            value = rows[span]
            for operation in way.operations:
                value = self._apply(operation, value, computed, span)
            self._removed.update((*way.operations, way.slice))
            self._replaced[way.slice.outputs[0]] = value

    def _apply(
        self, operation: Equation, value: Value, computed: dict[tuple[Equation, Span], Value], span: Span
    ) -> Value:
        if (operation, span) not in computed:
            result = computed[operation, span] = _with_rows(operation.outputs[0], span.count)
            self._added.append(Equation(operation.source, (value,), (result,)))
        return computed[operation, span]

    def _ways(self, value: Value) -> list[_Way]:
        """All ways from a value to rows of it; none if it is used in another way as well."""
        if value in self._graph.outputs:
            return []
        found: list[_Way] = []
        for user in self._users[value]:
            if user.name == "slice" and _is_of_rows(user):
                found.append(_Way((), user))
            elif user.name in _ELEMENTWISE and (further := self._ways(user.outputs[0])):
                found += [_Way((user, *way.operations), way.slice) for way in further]
            else:
                return []
        return found

    def graph(self) -> Graph:
        """The function, after all splits."""
        kept = [
            Equation(equation.source, tuple(map(self._now, equation.inputs)), equation.outputs)
            for equation in self._graph.equations
            if equation not in self._removed
        ]
        outputs = [self._now(value) for value in self._graph.outputs]
        return Graph(self._inputs, [*self._added, *kept], outputs, self._graph.constants)

    def _now(self, atom: Atom) -> Atom:
        return self._replaced.get(atom, atom) if isinstance(atom, Value) else atom


def _cover(spans: Sequence[Span], count: int) -> bool:
    """Whether each of so many rows is in exactly one span; these are sorted."""
    edges = [0, *(span.end for span in spans)]
    return edges[-1] == count and edges[:-1] == [span.begin for span in spans]


def _with_rows(value: Value, count: int) -> Value:
    """A value like this one, with so many rows."""
    return Value(value.aval.update(shape=(count, *value.aval.shape[1:])))


def _is_of_rows(equation: Equation) -> bool:
    """Whether a slice takes neighbouring rows, and all of each."""
    params = equation.source.params
    others = equation.inputs[0].aval.shape[1:]
    is_whole = params["start_indices"][1:] == (0,) * len(others) and params["limit_indices"][1:] == others
    return is_whole and all(stride == 1 for stride in params["strides"] or ())
