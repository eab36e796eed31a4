"""The operations of a loss function, between which it can be cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.graph import Equation, Graph, Value
from jaxhetero.pipeline.partition import FORBIDDEN, Chain, Floats

# What takes at most this share of the whole time, and depends on the batch alone, is computed where it is used.
_CHEAP = 1e-3


@dataclass(frozen=True)
class Roles:
    """What the inputs and outputs of the traced loss are, by their numbers."""

    params: tuple[int, ...]
    """What is differentiated."""
    whole: tuple[int, ...]
    """Arguments that all microbatches get."""
    batch: tuple[int, ...]
    """Arguments of which each microbatch gets its part."""
    state: tuple[int, ...]
    """Arguments that one microbatch hands to the next one."""
    aux_outputs: tuple[int, ...]
    state_outputs: tuple[int, ...]
    """The outputs that are the state afterwards, in the order of ``state``."""


@dataclass(eq=False)
class Operations:
    """The equations that belong to one stage each, in their order, and those that any stage may compute for itself.

    An equation of parameters alone, such as a cast, is computed by every stage that uses it. So is a cheap equation of
    the batch alone, such as a mask. All others are *operations*.
    """

    graph: Graph
    roles: Roles
    seconds: Sequence[float]
    """What the forward pass of each equation of the graph takes."""
    equations: list[Equation] = field(init=False)
    local: dict[Value, Equation] = field(init=False)
    """By their outputs, the equations that any stage may compute."""
    costs: Floats = field(init=False)

    def __post_init__(self) -> None:
        seconds = dict(zip(self.graph.equations, self.seconds, strict=True))
        cheap = _CHEAP * sum(seconds.values())
        common = self._values(self.roles.whole) | set(self.graph.constants)
        of_params = common | self._values(self.roles.params)
        of_data = common | self._values(self.roles.batch)
        self.equations, self.local = [], {}
        for equation in self.graph.equations:
            inputs = set(equation.values)
            is_static, is_data = inputs <= of_params, inputs <= of_data
            if equation.source.effects or not (is_static or (is_data and seconds[equation] <= cheap)):
                self.equations.append(equation)
                continue
            self.local.update(dict.fromkeys(equation.outputs, equation))
            if is_static:
                of_params.update(equation.outputs)
            if is_data:
                of_data.update(equation.outputs)
        if not self.equations:
            raise ConfigError("pipeline: the loss does not compute anything from the parameters and the batch")
        self.costs = np.array([seconds[equation] for equation in self.equations])

    def _values(self, numbers: Sequence[int]) -> set[Value]:
        return {self.graph.inputs[number] for number in numbers}

    @cached_property
    def position(self) -> dict[Value, int]:
        """By what operations make: the number of the operation."""
        return {value: i for i, equation in enumerate(self.equations) for value in equation.outputs}

    def needs(self, equation: Equation) -> set[Value]:
        """What an operation needs of inputs of the function, of constants, and of other operations."""
        found: set[Value] = set()
        for value in equation.values:
            found |= self._origins(value)
        return found

    def _origins(self, value: Value) -> set[Value]:
        if value not in self.local:
            return {value}
        if value not in self._known_origins:
            origins = [self._origins(operand) for operand in self.local[value].values]
            self._known_origins[value] = set().union(*origins)
        return self._known_origins[value]

    @cached_property
    def _known_origins(self) -> dict[Value, set[Value]]:
        return {}

    @cached_property
    def uses(self) -> dict[Value, list[int]]:
        """By inputs, constants and what operations make: the numbers of the operations that use it, ascending."""
        found: dict[Value, list[int]] = defaultdict(list)
        for number, equation in enumerate(self.equations):
            for value in self.needs(equation):
                found[value].append(number)
        return dict(found)

    def chain(self) -> Chain:
        """The operations as a chain to be cut."""
        made, used, sizes = [], [], []
        for value, position in self.position.items():
            if value in self.uses:
                made.append(position)
                used.append(self.uses[value])
                sizes.append(float(value.bytes))
        for first, last in self._state_spans():
            made.append(first)
            used.append([last])
            sizes.append(FORBIDDEN)
        return Chain(self.costs, made, used, sizes)

    def _state_spans(self) -> list[tuple[int, int]]:
        """The first and the last operation that a state depends on, for those that have several: no cut between."""
        spans = []
        for before, after in zip(self.roles.state, self.roles.state_outputs, strict=True):
            users = list(self.uses.get(self.graph.inputs[before], []))
            origins = self._origins(self.graph.outputs[after])
            users += [self.position[origin] for origin in origins if origin in self.position]
            if users and min(users) < max(users):
                spans.append((min(users), max(users)))
        return spans
