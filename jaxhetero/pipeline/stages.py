"""The stages that a loss is cut into: what each computes, receives, sends and holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from jaxhetero.pipeline.graph import Equation, Value
from jaxhetero.pipeline.operations import Operations


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of the loss. Its inputs and outputs are numbers of those of the traced function, and values."""

    number: int
    equations: tuple[Equation, ...]
    constants: tuple[Value, ...]
    params: tuple[int, ...]
    whole: tuple[int, ...]
    batch: tuple[int, ...]
    state: tuple[int, ...]
    received: tuple[Value, ...]
    """What other stages make, in the order of ``senders``."""
    senders: tuple[int, ...]
    """For each received value, the number of the stage that sends it."""
    sent: tuple[Value, ...]
    """What this stage makes and others use, once each."""
    targets: tuple[tuple[int, ...], ...]
    """For each sent value, the numbers of the stages that use it, ascending."""
    outputs: tuple[int, ...]
    """The outputs of the function that this stage makes, but for its state."""
    state_outputs: tuple[int, ...]
    """The outputs that are the new ``state``, in that order."""

    @cached_property
    def received_from(self) -> dict[int, tuple[Value, ...]]:
        """By the numbers of other stages, ascending: the values that they send to this one."""
        return {
            sender: tuple(value for value, number in zip(self.received, self.senders, strict=True) if number == sender)
            for sender in sorted(set(self.senders))
        }

    @cached_property
    def sent_to(self) -> tuple[int, ...]:
        """The numbers of the stages that use what this one makes, ascending."""
        return tuple(sorted({target for targets in self.targets for target in targets}))


def make_stages(operations: Operations, edges: Sequence[int]) -> list[Stage]:
    """Stage ``k`` has the operations from ``edges[k]`` to ``edges[k + 1]``, and what they need for themselves."""
    return _Cutter(operations, edges).stages()


class _Cutter:
    def __init__(self, operations: Operations, edges: Sequence[int]) -> None:
        self.operations = operations
        self.graph = operations.graph
        self.roles = operations.roles
        self.edges = edges
        self.count = len(edges) - 1
        self.home = {
            value: stage
            for stage, (begin, end) in enumerate(pairwise(edges))
            for equation in operations.equations[begin:end]
            for value in equation.outputs
        }
        # A message has its values in the order in which they are made, which is the same on every worker.
        self.made_order = {value: number for number, value in enumerate(self.home)}
        self.order = {equation: number for number, equation in enumerate(self.graph.equations)}
        self.state_homes = self._find_state_homes()
        self.outputs = [self._outputs_of(stage) for stage in range(self.count)]
        self.bodies = [
            self._body(stage, operations.equations[begin:end]) for stage, (begin, end) in enumerate(pairwise(edges))
        ]

    def stages(self) -> list[Stage]:
        return [self._stage(number) for number in range(self.count)]

    def _find_state_homes(self) -> list[int]:
        """For each state, the stage that uses and changes it; the first one for a state that nobody uses."""
        homes = []
        for before, after in zip(self.roles.state, self.roles.state_outputs, strict=True):
            users = [self._stage_of(number) for number in self.operations.uses.get(self.graph.inputs[before], [])]
            made_in = self.home.get(self.graph.outputs[after])
            homes.append(users[0] if users else made_in or 0)
        return homes

    def _stage_of(self, operation: int) -> int:
        return bisect_right(self.edges, operation) - 1

    def _outputs_of(self, stage: int) -> list[int]:
        """The loss and what comes with it; what no operation makes comes from the last stage."""
        last = self.count - 1
        outputs = [0, *self.roles.aux_outputs]
        return [number for number in outputs if self.home.get(self.graph.outputs[number], last) == stage]

    def _states_of(self, stage: int) -> list[int]:
        return [index for index, home in enumerate(self.state_homes) if home == stage]

    def _body(self, stage: int, equations: Sequence[Equation]) -> tuple[list[Equation], set[Value]]:
        """The equations of a stage with those that it computes for itself, and what it has to be given."""
        body, given = set(equations), set()
        wanted = [self.graph.outputs[number] for number in self.outputs[stage]]
        wanted += [self.graph.outputs[self.roles.state_outputs[index]] for index in self._states_of(stage)]
        todo = [value for equation in equations for value in equation.values] + wanted
        while todo:
            value = todo.pop()
            local = self.operations.local.get(value)
            if local is None:
                if self.home.get(value) != stage:
                    given.add(value)
            elif local not in body:
                body.add(local)
                todo += local.values
        return sorted(body, key=self.order.__getitem__), given

    def _stage(self, number: int) -> Stage:
        equations, given = self.bodies[number]
        received = sorted((value for value in given if value in self.home), key=self.made_order.__getitem__)
        sent = {
            value: tuple(other for other in range(self.count) if value in self.bodies[other][1])
            for equation in equations
            for value in equation.outputs
            if self.home.get(value) == number
        }
        sent = {value: targets for value, targets in sent.items() if targets}
        states = self._states_of(number)
        return Stage(
            number,
            tuple(equations),
            tuple(value for value in self.graph.constants if value in given),
            self._given(self.roles.params, given),
            self._given(self.roles.whole, given),
            self._given(self.roles.batch, given),
            tuple(self.roles.state[index] for index in states),
            tuple(received),
            tuple(self.home[value] for value in received),
            tuple(sent),
            tuple(sent.values()),
            tuple(self.outputs[number]),
            tuple(self.roles.state_outputs[index] for index in states),
        )

    def _given(self, numbers: Sequence[int], given: set[Value]) -> tuple[int, ...]:
        return tuple(number for number in numbers if self.graph.inputs[number] in given)
