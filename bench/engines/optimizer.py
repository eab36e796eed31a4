"""Steps of an optimizer at the reducers or in a worker process, or sums alone, for bench.optimizer_steps."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
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
    """A step with an emulated accelerator, whose gradients' memory the sums or the weights from reducers take.

    Args:
      optimizer: one of ``OPTIMIZERS``; None: the gradients are summed, and nothing more.
      backups: as in ``on_reducers``; None: the worker applies the update, to float32 weights.
      counts: the elements of each array of gradients, in the order in which they are ready. Each is a bucket.
      ready_s: the seconds from the start of the step until each array is ready.
      dtype: of gradients and weights.
      library: the path of the compiled bench/accelerator/wait.cc.
    """

    def __init__(
        self,
        *,
        optimizer: str | None,
        backups: int | None,
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
        self._state: Any = None
        self._finish: Callable[[Any, Any], Any] = _sum
        if optimizer is not None:
            weights = [jnp.ones(count) for count in counts[::-1]]
            tx = OPTIMIZERS[optimizer]
            if backups is None:
                self._finish = partial(_update_here, tx)
                self._state = weights, jax.jit(tx.init)(weights)
            else:
                tx = on_reducers(tx, weights_dtype=dtype, backups=backups, bucket_bytes=1)
                self._finish, self._state = partial(_update_there, tx), jax.jit(tx.init)(weights)
        # Where reducers keep the state, there is nothing of it to donate.
        self._step = jax.jit(self._program, donate_argnums=(0,) if backups is not None else (0, 1))
        self.run()

    def _program(self, buffers: Any, state: Any, begin: jax.Array) -> Any:
        ones: list[jax.Array] = []
        if any(self._ready_s):
            wait = jax.ffi.ffi_call(_WAIT, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
            ones = [wait(begin, jnp.float32(0), ready_s=np.float64(seconds)) for seconds in self._ready_s]
            gradients = [buffer.at[0].set(one.astype(buffer.dtype)) for buffer, one in zip(buffers, ones, strict=True)]
        else:
            gradients = jax.lax.optimization_barrier(buffers)  # as if they were computed
        results, state = self._finish(gradients[::-1], state)  # because both begin with the last array
        # Waits are results: else XLA lets versions of a state take their memory, and wait for them.
        return results[::-1], state, ones

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


def _sum(gradients: Any, state: Any) -> Any:
    return jaxhetero.psum(gradients, bucket_bytes=1), state


def _update_there(optimizer: optax.GradientTransformation, gradients: Any, state: Any) -> Any:
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(gradients, updates), state


def _update_here(optimizer: optax.GradientTransformation, gradients: Any, state: Any) -> Any:
    weights, state = state
    sums = jaxhetero.psum(gradients, bucket_bytes=1)
    updates, state = optimizer.update([array.astype(jnp.float32) for array in sums], state, weights)
    return sums, (optax.apply_updates(weights, updates), state)


@cache
def _register(library: str) -> None:
    jax.ffi.register_ffi_target(_WAIT, jax.ffi.pycapsule(ctypes.CDLL(library).BenchWait), platform="cpu")
