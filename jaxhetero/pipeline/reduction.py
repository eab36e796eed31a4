"""The gradients of this worker's stages, reduced with the workers that have the same parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jaxhetero._collectives.api import psum
from jaxhetero._collectives.wire_dtypes import sum_dtype
from jaxhetero.pipeline.graph import Graph
from jaxhetero.pipeline.places import Places
from jaxhetero.pipeline.programs import compiled
from jaxhetero.pipeline.schedules import Schedule
from jaxhetero.pipeline.stages import Stage


@dataclass(frozen=True)
class Unit:
    """Parameters whose gradients are reduced together.

    Attributes:
      params: their numbers, ascending.
      stages: those of this worker that must be final before.
      workers: the ranks that have them.
      text: what they are, for people.
    """

    params: tuple[int, ...]
    stages: frozenset[int]
    workers: tuple[int, ...]
    text: str


def make_units(graph: Graph, stages: Sequence[Stage], schedule: Schedule, places: Places) -> list[Unit]:
    """The units of this worker, in an order that the workers of each unit have in common.

    A parameter that only this place has is reduced with others of its stage, as soon as these are final. Those that
    several places have, such as tied weights, come last: the places have them at different times, and units are reduced
    one after the other.
    """
    users: dict[int, list[int]] = defaultdict(list)
    for stage in stages:
        for number in stage.params:
            if graph.inputs[number].is_float:
                users[number].append(stage.number)
    all_own = frozenset(stage.number for stage in stages if schedule.place_of(stage.number) == places.place)
    units: dict[tuple[bool, tuple[int, ...], frozenset[int]], list[int]] = defaultdict(list)
    for number, using in sorted(users.items()):
        own = frozenset(stage for stage in using if schedule.place_of(stage) == places.place)
        if not own:
            continue
        sharing = sorted({schedule.place_of(stage) for stage in using})
        is_shared = len(sharing) > 1
        units[is_shared, places.ranks_at(sharing), all_own if is_shared else own].append(number)
    made = []
    for (_, workers, own), params in sorted(units.items(), key=lambda item: (*item[0][:2], sorted(item[0][2]))):
        using = sorted({stage for number in params for stage in users[number]})
        text = f"gradients of stage {' and '.join(map(str, using))}"
        made.append(Unit(tuple(params), own, workers, text))
    return made


class Reduction:
    """Reduces units on a thread of its own, as soon as their stages are final."""

    def __init__(self, graph: Graph, stages: Sequence[Stage], schedule: Schedule, places: Places) -> None:
        """Blocks while the programs that reduce are compiled."""
        self._stages = {stage.number: stage for stage in stages}
        self._graph = graph
        self._units = make_units(graph, stages, schedule, places)
        count = places.replica_count * schedule.microbatches
        self._programs = [self._compile(unit, count) for unit in self._units]
        self._thread = ThreadPoolExecutor(1, "jaxhetero-reduction")
        self._final: dict[int, Mapping[int, Any]] = {}
        self._running: list[tuple[Unit, Future[list[Any]]]] = []

    def submit(self, stage: int, sums: Sequence[Any]) -> None:
        """The gradients of a stage are final. Does not block."""
        self._final[stage] = dict(zip(self._floats(self._stages[stage]), sums, strict=True))
        for unit, program in zip(self._units, self._programs, strict=True):
            if stage in unit.stages and unit.stages <= self._final.keys():
                parts = self._parts(unit)
                self._running.append((unit, self._thread.submit(program, parts)))

    def finish(self) -> dict[int, Any]:
        """All gradients, by the numbers of the parameters. Blocks until they are dispatched."""
        running, self._running, self._final = self._running, [], {}
        return {
            number: gradient
            for unit, future in running
            for number, gradient in zip(unit.params, future.result(), strict=True)
        }

    def _parts(self, unit: Unit) -> list[list[Any]]:
        """For each parameter, its gradients from the stages that use it."""
        stages = sorted(unit.stages)
        return [[self._final[s][number] for s in stages if number in self._final[s]] for number in unit.params]

    def _floats(self, stage: Stage) -> list[int]:
        return [number for number in stage.params if self._graph.inputs[number].is_float]

    def _compile(self, unit: Unit, count: int) -> Any:
        values = [self._graph.inputs[number] for number in unit.params]
        counts = [sum(number in self._stages[stage].params for stage in unit.stages) for number in unit.params]
        shapes = [
            [jax.ShapeDtypeStruct(value.aval.shape, sum_dtype(value.aval.dtype))] * count
            for value, count in zip(values, counts, strict=True)
        ]

        def reduce(parts: list[list[Any]]) -> list[Any]:
            sums: list[Any] = [sum(arrays[1:], start=arrays[0]) for arrays in parts]
            if len(unit.workers) > 1:
                sums = psum(sums, workers=unit.workers, name=unit.text)
            return [(total / count).astype(value.aval.dtype) for total, value in zip(sums, values, strict=True)]

        return compiled(reduce, shapes)
