"""Work that only rank 0 does, for longer than a round may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp

import jaxhetero
from models.common.errors import DataError

T = TypeVar("T")

# How often the workers meet. A round with a worker that is late would time out otherwise.
SHARE_S = 0.5


def run_on_rank_0(work: Callable[[], T]) -> T | None:
    """Call ``work`` on rank 0, and wait for its end on every worker, for as long as it takes. None on other ranks.

    Call it on every worker. ``work`` runs on a thread of its own, and must not use jaxhetero.

    Raises:
      TrainerError: on every worker, if ``work`` raises one; on rank 0, the one that it raised.
    """
    job = _Job(work) if jaxhetero.rank() == 0 else None
    while True:
        is_running = job is not None and not job.ended.wait(SHARE_S)
        has_failed = job is not None and job.error is not None
        some_running, some_failed = _over_workers(jnp.array([is_running, has_failed], jnp.int32)).tolist()
        if some_failed:
            raise job.error if job and job.error else DataError("rank 0 has failed, and its own message says why")
        if not some_running:
            return job.result if job else None


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="rank 0", daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
        self.ended.set()


@jax.jit
def _over_workers(flags: jax.Array) -> jax.Array:
    total: jax.Array = jaxhetero.psum(flags, name="rank 0")
    return total
