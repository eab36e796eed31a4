"""Train steps with an emulated accelerator whose sums go on under the next step's forward pass: jaxhetero.psum_start.

Steps run one behind the other. The accelerator does one thing at a time: the forward work of a bucket's layers, once
that bucket's sum is there from the step before, and then the backward work. A bucket's sum is started when its backward
work is done. As in ``Emulation``, work is queued on the accelerator: between two instructions is no time of the host.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

_WORK, _STAMP = "bench_queued_work", "bench_stamp"
_WARM_UP_COUNT = 2  # steps before those that are measured: the first one waits for nothing


class AcrossEmulation:
    """Gradients in buckets, and the step.

    Args:
      counts, ready_s, library: as of ``Emulation``. The forward work of a bucket is half of its backward work.
      wire_dtype: of the sums, or "".
    """

    def __init__(self, counts: Sequence[int], ready_s: Sequence[float], library: str, wire_dtype: str) -> None:
        handlers = ctypes.CDLL(library)
        jax.ffi.register_ffi_target(_WORK, jax.ffi.pycapsule(handlers.BenchQueuedWork), platform="cpu")
        jax.ffi.register_ffi_target(_STAMP, jax.ffi.pycapsule(handlers.BenchStamp), platform="cpu")
        forward_s = ready_s[-1] / 3
        self._backward_s = np.diff([forward_s, *ready_s]).tolist()
        self._options: dict[str, Any] = {
            "bucket_bytes": 1,
            "priority": list(range(1, len(counts) + 1)),
            "wire_dtype": wire_dtype or None,
            "name": "across",
        }
        own = np.float32(jaxhetero.rank() + 1)
        # In the order of the forward pass: psum_start begins with the last one.
        self._buckets = [jnp.full(count, own, jnp.float32) for count in reversed(counts)]
        self._start = jax.jit(self._send, donate_argnums=0)
        self._step = jax.jit(self._run, donate_argnums=0)
        self._finish = jax.jit(jaxhetero.psum_done)

    def measure(self, count: int) -> tuple[int, int]:
        """When ``count`` steps begin and when they end, in nanoseconds; they are behind a few others."""
        pending, x = self._start(self._buckets), jnp.float32(0)
        begin = end = 0
        for number in range(_WARM_UP_COUNT + count):
            pending, x = self._step(pending, x)
            if number == _WARM_UP_COUNT - 1:
                x = jax.block_until_ready(x)
                begin = time.monotonic_ns()
        jax.block_until_ready(x)
        end = time.monotonic_ns()
        self._sum_count = 1 + _WARM_UP_COUNT + count
        self._buckets = self._finish(pending)
        return begin, end

    def wrong_count(self) -> int:
        """How many elements of the last sums are wrong. Then all workers begin anew."""
        n, own = jaxhetero.size(), np.float32(jaxhetero.rank() + 1)
        expected = np.float32(n * (n + 1) / 2) * np.float32(n) ** (self._sum_count - 1)
        wrong = sum(int(np.count_nonzero(~np.isclose(bucket, expected))) for bucket in self._buckets)
        self._buckets = [jnp.full(bucket.shape, own) for bucket in self._buckets]
        return wrong

    def _send(self, buckets: list[jax.Array]) -> Any:
        return jaxhetero.psum_start(buckets, **self._options)

    def _run(self, pending: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        buckets = jaxhetero.psum_done(pending)
        parts = len(buckets)
        there = jnp.zeros(2, jnp.uint32)
        for index, bucket in enumerate(buckets):
            there = _stamp(bucket[0], index)
            x = _work(x, there, self._backward_s[parts - 1 - index] / 2, index)
        gradients = []
        for index, bucket in enumerate(reversed(buckets)):
            x = _work(x, there, self._backward_s[index], parts + index)
            gradients.append(bucket.at[0].add(x))  # zero
        return self._send(gradients[::-1]), x


def _work(after: jax.Array, there: jax.Array, seconds: float, part: int) -> jax.Array:
    call = jax.ffi.ffi_call(_WORK, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
    zero: jax.Array = call(after, there, work_s=np.float64(seconds), part=np.int64(part))
    return zero


def _stamp(element: jax.Array, part: int) -> jax.Array:
    there: jax.Array = jax.ffi.ffi_call(_STAMP, jax.ShapeDtypeStruct((2,), jnp.uint32))(element, part=np.int64(part))
    return there
