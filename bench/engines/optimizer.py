"""Steps of an optimizer at the reducers in a worker process, or sums without one, for bench.optimizer_steps."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import lamb, on_reducers


def _everything(params: Any) -> Any:
    """The mask of LAMB, which would leave out vectors."""
    return jax.tree.map(lambda _: True, params)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "lamb": lamb(1e-3, max_grad_norm=None, mask=_everything),
    "lamb-clipped": lamb(1e-3, mask=_everything),
}
_WAIT = "bench_wait_for_gradients"


class OptimizerStep:
    """A step with an emulated accelerator, whose gradients' memory the results take.

    Args:
      optimizer: one of ``OPTIMIZERS``; None: the gradients are summed, and nothing more.
      backups: as in ``on_reducers``.
      counts: the elements of each array of gradients, in the order in which they are ready. Each is a bucket.
      ready_s: the seconds from the start of the step until each array is ready.
      dtype: of gradients and weights.
      library: the path of the compiled bench/accelerator/wait.cc.
    """

    def __init__(
        self,
        *,
        optimizer: str | None,
        backups: int,
        counts: Sequence[int],
        ready_s: Sequence[float],
        dtype: str,
        library: str,
    ) -> None:
        _register(library)
        self._ready_s = ready_s
        self._bytes = 4 * sum(counts)
        value = 1e-3 * (1 + jaxhetero.rank())
        self._gradients: Any = [jnp.full(count, value, dtype) for count in counts]
        self._optimizer, self._state = None, None
        if optimizer is not None:
            tx = OPTIMIZERS[optimizer]
            self._optimizer = on_reducers(tx, weights_dtype=dtype, backups=backups, bucket_bytes=1)
            self._state = jax.jit(self._optimizer.init)([jnp.ones(count) for count in counts[::-1]])
        self._step = jax.jit(self._program, donate_argnums=0)
        self.run()

    def _program(self, buffers: Any, state: Any, begin: jax.Array) -> Any:
        ones: list[jax.Array] = []
        if any(self._ready_s):
            wait = jax.ffi.ffi_call(_WAIT, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
            ones = [wait(begin, jnp.float32(0), ready_s=np.float64(seconds)) for seconds in self._ready_s]
            gradients = [buffer.at[0].set(one.astype(buffer.dtype)) for buffer, one in zip(buffers, ones, strict=True)]
        else:
            gradients = jax.lax.optimization_barrier(buffers)  # as if they were computed
        given = gradients[::-1]  # because both begin with the last array
        if self._optimizer is None:
            return jaxhetero.psum(given, bucket_bytes=1)[::-1], None, ones
        updates, state = self._optimizer.update(given, state)
        # Waits are results: else XLA lets versions of a state take their memory, and wait for them.
        return optax.apply_updates(given, updates)[::-1], state, ones

    def run(self) -> None:
        """One step, to its end."""
        begin = np.array([time.monotonic_ns()], "<u8").view(np.uint32)
        results, self._state, _ = self._step(self._gradients, self._state, begin)
        self._gradients = jax.block_until_ready(results)

    def measure(self, count: int) -> dict[str, Any]:
        """So many steps: begins and ends in ns, and bytes sent and received for each of S.

        They begin together; but where all gradients are ready at once, one behind the other.
        """
        begins_ns, ends_ns = [], []
        gc.disable()
        jaxhetero.barrier(name="bench")
        before = jaxhetero.metrics()
        for _ in range(count):
            if any(self._ready_s):
                jaxhetero.barrier(name="bench")
            begins_ns.append(time.monotonic_ns())
            self.run()
            ends_ns.append(time.monotonic_ns())
        after = jaxhetero.metrics()
        gc.enable()
        return {
            "begins_ns": begins_ns,
            "ends_ns": ends_ns,
            "sent": (after.sent_bytes - before.sent_bytes) / count / self._bytes,
            "received": (after.received_bytes - before.received_bytes) / count / self._bytes,
        }


@cache
def _register(library: str) -> None:
    jax.ffi.register_ffi_target(_WAIT, jax.ffi.pycapsule(ctypes.CDLL(library).BenchWait), platform="cpu")
