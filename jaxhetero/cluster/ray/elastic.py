"""Elastic jobs on a Ray cluster: actors that Ray starts again, each on any host that has room.

Ray Train ends all workers when one of them fails. So such a job is none of its runs.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import state as ray_state
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxhetero._job.ports import reserve_port
from jaxhetero.cluster.ray.config import JaxheteroConfig
from jaxhetero.cluster.ray.reducers import Reducers
from jaxhetero.config import Config, CoordinatorConfig, format_address, read_environment, write_environment
from jaxhetero.errors import ConfigError, JaxheteroError, from_status
from jaxhetero.launch.coordinator import run_coordinator

logger = logging.getLogger("jaxhetero")

# Ray Train looks for nodes that are to go every five seconds.
_WATCH_S = 2.0
# More than that, so that a worker knows by then whether it has been in the job.
_LATE_S = 5.0
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}  # Ray has names of its own for these resources.


def run_elastic(
    train: Callable[[], Any],
    *,
    workers: int,
    elastic: str,
    config: JaxheteroConfig | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    max_worker_restarts: int = 1000,
) -> dict[int, Any]:
    """Run an elastic job on the cluster that this process is connected to, and block until it has ended.

    Each worker is an actor that calls ``train``, which calls ``initialize()``, ``jaxhetero.elastic.gate`` before each
    step, and ``shutdown()``. When an actor dies, or its host, or ``train`` raises, Ray starts it again, where there is
    room, and the others go on. Where Ray is about to take a host away, the workers there leave at the next gate, as
    after ``jaxhetero.elastic.leave()``, and others take their places. This is the notice that Ray Train gives as
    ``ray.train.get_preemption_info()``.

    The coordinator is an actor on the host of this process. When that host or this process is gone, the job ends.

    Args:
      train: what each worker runs. Ray pickles it, and what it returns.
      workers: how many there are at the start.
      elastic: ``"MIN:MAX"``, as in ``initialize()``.
      config: reducers and settings, as for Ray Train. Default: ``JaxheteroConfig()``.
      resources_per_worker: what Ray sets aside for each worker. Default: ``{"CPU": 1}``.
      max_worker_restarts: how often Ray starts one worker again. There is no limit with -1.

    Returns:
      What ``train`` has returned in each worker that has come to its end, by rank.

    Raises:
      ConfigError: a setting is wrong, or ``train`` has raised it.
      StartTimeout: the cluster has no room for the reducers.
      JaxheteroError: the job has failed, as with too few workers left.

    Example:
      After ``ray.init()``:

      >>> from jaxhetero.cluster.ray import JaxheteroConfig, run_elastic
      >>> run_elastic(train, workers=4, elastic="2:4", config=JaxheteroConfig(reducers=2))  # doctest: +SKIP
      {0: None, 1: None, 2: None, 3: None}
    """
    job = _Job(config or JaxheteroConfig(), train, dict(resources_per_worker or {"CPU": 1}), max_worker_restarts)
    job.check(workers, elastic)
    try:
        job.start(workers, elastic)
        return job.wait()
    finally:
        job.stop()


class ElasticCoordinator:
    """The process of the coordinator. If it dies, Ray starts it anew on its host and calls ``run`` again."""

    def __init__(self) -> None:
        self._port: Any = None

    def reserve(self) -> str:
        """An address at which the other processes can reach it."""
        host = ray.util.get_node_ip_address()
        self._port = reserve_port(0, host)
        return format_address(host, self._port.getsockname()[1])

    def run(self, settings: dict[str, str | int]) -> tuple[str, str]:
        """Coordinate until every worker has left. Returns the name of an error and its text; empty if there is none."""
        found: dict[str, Any] = dict(read_environment(write_environment(settings)))
        mine = {name: value for name, value in found.items() if name in CoordinatorConfig.__dataclass_fields__}
        try:
            code = run_coordinator(CoordinatorConfig(**mine))
        except JaxheteroError as error:
            return type(error).__name__, str(error)
        if code:
            os._exit(code)  # Ended by a signal: for Ray this is a death, too.
        return "", ""


class ElasticWorker:
    """The process of a worker. If it dies, Ray starts it anew and calls ``run`` again, with the same arguments."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns of something that it uses there itself.
            self._is_first = not ray.get_runtime_context().was_current_actor_reconstructed
        self._has_been_in = False
        self._is_drained = False

    def run(self, train: Callable[[], Any], settings: dict[str, str | int]) -> tuple[str, Any]:
        """Train. Returns "done" and what ``train`` has returned; or "left" or "moves" if the worker has left."""
        os.environ.update(write_environment(settings, {}))
        threading.Thread(target=self._watch, daemon=True, name="notices of Ray").start()
        try:
            return "done", train()
        except SystemExit as end:
            if end.code:
                self._die(int(settings["rank"]), f"exit code {end.code}")
            return ("moves" if self._is_drained else "left"), None
        except ConfigError:
            raise  # It would be the same in the next process.
        except BaseException:
            self._die(int(settings["rank"]), traceback.format_exc())
            raise

    def is_in(self, starts_anew: bool) -> bool:
        """Whether it takes part, or has; those that were there at the start do. ``starts_anew``: it was not."""
        return self._has_been_in or (self._is_first and not starts_anew)

    def _die(self, rank: int, why: str) -> None:
        """A new process takes the place of this one, of which JAX and the job have seen too much."""
        logger.error("worker %d ends, and Ray starts it again: %s", rank, why)
        sys.stderr.flush()
        os._exit(1)

    def _watch(self) -> None:
        """Leave when Ray is about to take this host away."""
        import jaxhetero  # JAX comes with it, which the driver need not have

        node = ray.get_runtime_context().get_node_id()
        while True:
            time.sleep(_WATCH_S)
            try:
                self._has_been_in |= jaxhetero.elastic.team().view > 0
                if not self._is_drained and node in ray_state.get_draining_nodes():
                    jaxhetero.elastic.leave()
                    self._is_drained = True
                    logger.warning("Ray is about to take this host away: this worker leaves at the next gate")
            except (JaxheteroError, RayError):
                continue  # not yet, or no longer, in the job


@dataclass
class _Job:
    """The actors of a job."""

    config: JaxheteroConfig
    train: Callable[[], Any]
    resources: dict[str, float]
    max_restarts: int
    settings: dict[str, str | int] = field(default_factory=dict)
    reducers: Reducers | None = None
    coordinator: Any = None
    actors: dict[int, Any] = field(default_factory=dict)
    runs: dict[Any, int] = field(default_factory=dict)
    """The rank of each worker that runs, or waits for room."""
    later_ranks: set[int] = field(default_factory=set)
    results: dict[int, Any] = field(default_factory=dict)

    def check(self, workers: int, elastic: str) -> None:
        """``ConfigError`` for what no process could start with."""
        if not elastic:
            raise ConfigError("elastic is empty; it must be MIN:MAX, as in 2:8")
        if self.max_restarts < -1:
            raise ConfigError(f"max_worker_restarts is {self.max_restarts}; it must be at least -1")
        given: dict[str, Any] = {
            name: self.config.settings[name] for name in self.config.settings if name != "interface"
        }
        Config(
            **given,
            worker_count=workers,
            elastic=elastic,
            reducer_count=self.config.reducers,
            colocated_count=self.config.colocated,
            coordinator="first:1",
            token="any",
        )

    def start(self, workers: int, elastic: str) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
        self.coordinator = ray.remote(ElasticCoordinator).options(**options).remote()
        address = ray.get(self.coordinator.reserve.remote())
        self.settings = self.config.job_settings(
            worker_count=workers, coordinator=address, token=secrets.token_hex(32), restart_count=0
        ) | {"elastic": elastic}
        self.reducers = Reducers.start(self.config, self.settings)
        for rank in range(workers):
            self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        named = {_OPTIONS[name]: amount for name, amount in self.resources.items() if name in _OPTIONS}
        others = {name: amount for name, amount in self.resources.items() if name not in _OPTIONS}
        options = {"num_cpus": 0, **named, "resources": others, "scheduling_strategy": "SPREAD"}
        restarts = {"max_restarts": self.max_restarts, "max_task_retries": self.max_restarts}
        # Two threads: one trains, the other one answers.
        actor = ray.remote(ElasticWorker).options(**options, **restarts, max_concurrency=2).remote()
        self.actors[rank] = actor
        own = self.settings | {"rank": rank} | self.config.own_settings(rank)
        self.runs[actor.run.remote(self.train, own)] = rank

    def wait(self) -> dict[int, Any]:
        """Until the job has ended."""
        end = self.coordinator.run.remote(self.settings)
        is_over = False
        while self.runs:
            (ready,), _ = ray.wait([*self.runs, *([] if is_over else [end])], num_returns=1)
            if ready == end:
                is_over = True
                name, text = ray.get(end)
                if name:
                    raise from_status(name, text)
                self._forget_the_late()
            else:
                self._take(ready, is_over)
        return dict(sorted(self.results.items()))

    def _take(self, run: Any, is_over: bool) -> None:
        rank = self.runs.pop(run)
        try:
            how, result = ray.get(run)
        except RayActorError as error:
            logger.warning("worker %d is not started again: %s", rank, error)
            return
        if how == "done":
            self.results[rank] = result
        elif how == "moves" and not is_over:
            logger.warning("worker %d has left its host, and starts on another one", rank)
            ray.kill(self.actors[rank])
            self.later_ranks.add(rank)
            self._start_worker(rank)

    def _forget_the_late(self) -> None:
        """All workers have left the job. Those that were on their way into it would find nobody."""
        ended, _ = ray.wait(list(self.runs), num_returns=len(self.runs), timeout=_LATE_S)
        for run in ended:
            self._take(run, is_over=True)
        asked = {run: self.actors[rank].is_in.remote(rank in self.later_ranks) for run, rank in self.runs.items()}
        deadline = time.monotonic() + _LATE_S
        for run, answer in asked.items():
            try:
                # One that waits for room does not answer.
                if ray.get(answer, timeout=max(0, deadline - time.monotonic())):
                    continue
            except RayError:
                pass
            ray.kill(self.actors[self.runs.pop(run)])

    def stop(self) -> None:
        """End all actors and give their resources back. Does not block."""
        for actor in [*self.actors.values(), *([self.coordinator] if self.coordinator else [])]:
            ray.kill(actor)
        if self.reducers is not None:
            self.reducers.stop()
