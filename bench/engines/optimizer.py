"""Steps of AdamW at the reducers in a worker process, or sums without it, for bench.optimizer_steps."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxhetero
from jaxhetero.optimizers import on_reducers

PLACES = ("psum", "reducers", "reducers,backup")


class OptimizerStep:
    """A step with ready gradients, whose memory the results take, as after a backward pass."""

    def __init__(self, place: str, count: int, dtype: str) -> None:
        self._bytes = 4 * count
        backups = int(place.endswith("backup"))
        optimizer = on_reducers(optax.adamw(1e-3), weights_dtype=dtype, backups=backups)
        self._gradients: Any = [jnp.full(count, 1e-3 * (1 + jaxhetero.rank()), dtype)]
        self._state: Any = None if place == "psum" else optimizer.init([jnp.ones(count)])

        def step(gradients: Any, state: Any) -> Any:
            gradients = jax.lax.optimization_barrier(gradients)
            if state is None:
                return jaxhetero.psum(gradients), None
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(gradients, updates), state

        self._step = jax.jit(step, donate_argnums=0)
        self.run()

    def run(self) -> None:
        """One step, to its end."""
        results, self._state = self._step(self._gradients, self._state)
        self._gradients = jax.block_until_ready(results)

    def measure(self, count: int) -> dict[str, Any]:
        """So many steps, all workers together: begins and ends in ns, and bytes sent and received for each of S."""
        begins_ns, ends_ns = [], []
        jaxhetero.barrier(name="bench")
        before = jaxhetero.metrics()
        for _ in range(count):
            begins_ns.append(time.monotonic_ns())
            self.run()
            ends_ns.append(time.monotonic_ns())
        after = jaxhetero.metrics()
        return {
            "begins_ns": begins_ns,
            "ends_ns": ends_ns,
            "sent": (after.sent_bytes - before.sent_bytes) / count / self._bytes,
            "received": (after.received_bytes - before.received_bytes) / count / self._bytes,
        }
