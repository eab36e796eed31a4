"""The reducers of one attempt at a run: actors, each in its own bundle of a placement group."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxhetero.cluster.ray.placement import place
from jaxhetero.config import ReducerConfig, read_environment, write_environment
from jaxhetero.errors import JaxheteroError
from jaxhetero.launch.reducer import run_reducer

if TYPE_CHECKING:
    from jaxhetero.cluster.ray.config import JaxheteroConfig

logger = logging.getLogger("jaxhetero")


class Reducer:
    """A process that reduces. If it dies, Ray starts it anew and calls ``run`` again, with the same arguments.

    The arguments hold the job token. They are those of the method and not of the class, because Ray keeps the latter in
    the cluster's database.
    """

    def run(self, number: int, settings: dict[str, str | int]) -> int:
        """Reduce until every worker has left. Returns the exit code of ``jaxhetero reducer``."""
        found: dict[str, Any] = dict(read_environment(write_environment(settings)))
        mine = {name: value for name, value in found.items() if name in ReducerConfig.__dataclass_fields__}
        try:
            code = run_reducer(ReducerConfig(**mine, number=number))
        except JaxheteroError as error:
            logger.error("reducer %d: %s: %s", number, type(error).__name__, error)
            return 1
        if code > 128:
            os._exit(code)  # Ended by a signal: for Ray this is a death, too.
        return code


@dataclass(frozen=True)
class Reducers:
    """The actors and their placement group."""

    group: PlacementGroup | None
    actors: tuple[Any, ...]

    @classmethod
    def start(cls, config: JaxheteroConfig, settings: dict[str, str | int]) -> Reducers:
        """Find room for all reducers and start them.

        Raises:
          StartTimeout: the cluster has had no room for all of them within ``config.start_timeout_s``.
        """
        if not config.reducers:
            return cls(None, ())
        group = place(
            dict(config.resources_per_reducer), config.reducers, config.placement_strategy, config.start_timeout_s
        )
        restarts = config.max_reducer_restarts
        actors = tuple(
            ray.remote(Reducer)
            .options(
                num_cpus=0,  # The bundle has the resources.
                max_restarts=restarts,
                max_task_retries=restarts,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            .remote()
            for number in range(config.reducers)
        )
        for number, actor in enumerate(actors):
            actor.run.remote(number, settings | config.own_settings(int(settings["worker_count"]) + number))
        return cls(group, actors)

    def stop(self) -> None:
        """End all reducers and give their resources back. Does not block."""
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)
