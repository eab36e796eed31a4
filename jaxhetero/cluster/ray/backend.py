"""What happens in Ray Train's controller when a group of workers starts and when it ends.

Ray starts a group for each attempt at a run: at first, after a failure that its failure policy retries, and with
another number of workers in elastic training. Each attempt is a job of its own, with a new token.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

import ray
from ray.train.v2.jax import JaxConfig

from jaxhetero._job.ports import reserve_port
from jaxhetero.cluster.ray.reducers import Reducers
from jaxhetero.config import format_address, write_environment

if TYPE_CHECKING:
    from jaxhetero.cluster.ray.config import JaxheteroConfig

# JAX's own backend starts jax.distributed where the configuration asks for TPUs or GPUs. Its name is private.
_JaxBackend: Any = JaxConfig().backend_cls

_held_ports: list[socket.socket] = []
"""In a worker of rank 0: the coordinator's port, held until ``initialize`` listens on it."""


class JaxheteroBackend(_JaxBackend):  # type: ignore[misc]
    """Starts and ends the reducers of a run, and tells the workers where they meet."""

    def __init__(self) -> None:
        self._reducers: Reducers | None = None
        self._started_count = 0

    def on_start(self, worker_group: Any, backend_config: JaxheteroConfig) -> None:
        """Called when all workers of an attempt run, before they train. Blocks until the reducers have a place."""
        super().on_start(worker_group, backend_config)
        settings = backend_config.job_settings(
            worker_count=len(worker_group),
            coordinator=worker_group.execute_single(0, _reserve_coordinator),
            token=secrets.token_hex(32),
            restart_count=self._started_count,
        )
        self._reducers = Reducers.start(backend_config, settings)
        own = [settings | {"rank": rank} | backend_config.own_settings(rank) for rank in range(len(worker_group))]
        ray.get([worker_group.execute_single_async(rank, _take_settings, each) for rank, each in enumerate(own)])
        # Attempts in which nothing has trained do not count: they can have left no checkpoint.
        self._started_count += 1

    def on_shutdown(self, worker_group: Any, backend_config: JaxheteroConfig) -> None:
        """Called when an attempt ends, in whatever way."""
        if self._reducers is not None:
            self._reducers.stop()
            self._reducers = None
        super().on_shutdown(worker_group, backend_config)


def _reserve_coordinator() -> str:
    """In the worker of rank 0: an address at which the other processes can reach it."""
    host = ray.util.get_node_ip_address()
    _held_ports.append(reserve_port(0, host))
    port = _held_ports[-1].getsockname()[1]
    return format_address(host, port)


# A function of ours, not a method of os.environ: Ray would send the controller's whole environment with that.
def _take_settings(settings: dict[str, str | int]) -> None:
    """In a worker: put its settings where ``initialize`` looks."""
    os.environ.update(write_environment(settings, {}))
