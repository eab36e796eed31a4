"""The loss and what comes with it, of all microbatches, on every worker of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxhetero.pipeline.exchange import Inbox, Message, Outbox, Route
from jaxhetero.pipeline.graph import Graph
from jaxhetero.pipeline.places import Places
from jaxhetero.pipeline.schedules import Schedule
from jaxhetero.pipeline.stages import Stage

if TYPE_CHECKING:
    from jaxhetero._job.channels import Channels

# Above the numbers of the routes between stages.
_FIRST_ROUTE = 1 << 24
_MESSAGE = Message(0, "of the step")


class Results:
    """Puts the outputs of all microbatches together, and tells them to the other workers of the pipeline."""

    def __init__(
        self, graph: Graph, stages: Sequence[Stage], schedule: Schedule, places: Places, channels: Channels | None
    ) -> None:
        self._combine = jax.jit(lambda outputs: {number: _combined(arrays) for number, arrays in outputs.items()})
        owned = {
            place: [n for stage in stages if schedule.place_of(stage.number) == place for n in stage.outputs]
            for place in range(places.count)
        }
        self._own = sorted(owned[places.place])
        self._inboxes: dict[int, Inbox] = {}
        self._routes: list[Route] = []
        self._numbers = {place: sorted(numbers) for place, numbers in owned.items()}
        if channels is None:
            return
        self._outbox = Outbox(channels)
        for place, numbers in self._numbers.items():
            if not numbers:
                continue
            shapes = tuple(graph.outputs[number].shape for number in numbers)
            for other in set(range(places.count)) - {place}:
                number = _FIRST_ROUTE + place * places.count + other
                if place == places.place:
                    self._routes.append(Route(number, places.rank_at(other), shapes, "the results"))
                elif other == places.place:
                    route = Route(number, places.rank_at(place), shapes, "the results")
                    self._inboxes[place] = Inbox(channels, route, [_MESSAGE])

    def begin_step(self) -> None:
        """Let the results of others come."""
        for inbox in self._inboxes.values():
            inbox.begin_step()

    def share(self, outputs: Mapping[int, list[Any]]) -> dict[int, Any]:
        """All outputs of the step, by their numbers. Blocks until those of the others have come."""
        combined: dict[int, Any] = dict(self._combine(dict(outputs)))
        for route in self._routes:
            self._outbox.send(route, _MESSAGE, [combined[number] for number in self._own])
        for place, inbox in self._inboxes.items():
            combined.update(zip(self._numbers[place], inbox.take(), strict=True))
        if self._routes:
            self._outbox.finish_step()
        return combined


def _combined(arrays: list[Any]) -> Any:
    """The mean of floating-point numbers, the sum of others."""
    total = sum(arrays[1:], start=arrays[0])
    return total / len(arrays) if jnp.issubdtype(total.dtype, jnp.inexact) else total
