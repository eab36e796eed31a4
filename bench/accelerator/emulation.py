"""A train step with an emulated accelerator: timed waits, real gradients, real all-reduces.

The programs are jit-compiled. For each bucket there is an instruction of wait.cc, which ends when the accelerator would
have the bucket's gradients. The program then writes one element of the bucket, in place, and all-reduces the bucket. As
in a real step, nothing else uses the gradients, so the sum may take their memory. The network never delays the
accelerator: its times count from the start of the step, as with kernels that are queued on a stream. A wait takes no
CPU and no thread of XLA, and jaxhetero's call is asynchronous, so waits and rounds overlap.

XLA's CPU client runs the collectives of ``jax.lax.psum`` one after the other, and each delays the rest of the program.
For such an engine the wait for a bucket comes after the all-reduce of the bucket before, which must end first anyway,
so this order costs the engine nothing. Without it, as in the program for jaxhetero, XLA combines the all-reduces into
one after the last wait, and nothing overlaps. ``combined`` allows that.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench.engines.in_process import Arrays, Engine, Program

WAIT_SOURCE = Path(__file__).with_name("wait.cc")
_WAIT = "bench_wait"
_WRITTEN = 1.0  # the result of wait.cc


class Emulation:
    """Gradients in buckets, and three programs.

    ``compute`` only waits for the buckets, ``communicate`` only all-reduces them, ``step`` does both.

    Args:
      engine: the engine of the all-reduces.
      counts: the elements of each bucket, in the order in which the buckets are ready. A bucket is one array, as if its
        gradients were fused at no cost: passing hundreds of arrays to a program takes time, which a real accelerator
        would hide.
      ready_s: the seconds from the start of the step until each bucket is ready. The accelerator ends with the last.
      combined: leave the order to XLA, for an engine that reduces in program order.
      library: the path of the compiled wait.cc.

    ``buckets`` are the gradients, or the results of the last program. They stay in the same memory, because new memory
    would cost time that belongs neither to the accelerator nor to the all-reduce.
    """

    def __init__(
        self, engine: Engine, counts: Sequence[int], ready_s: Sequence[float], combined: bool, library: str
    ) -> None:
        jax.ffi.register_ffi_target(_WAIT, jax.ffi.pycapsule(ctypes.CDLL(library).BenchWait), platform="cpu")
        self._engine = engine
        self._ready_s = ready_s
        self._in_order = engine.in_program_order and not combined
        self.buckets: Arrays = [engine.put(np.zeros(count, np.float32)) for count in counts]
        self._own = engine.put(np.full(1, engine.rank + 1, np.float32))
        self._fill = engine.compile(_fill, donated=0)
        self._meet = engine.compile(lambda one: engine.psum([one], "meet"))
        self._programs: dict[str, Program] = {
            name: engine.compile(program, donated=0)
            for name, program in (("compute", self._compute), ("communicate", self._communicate), ("step", self._step))
        }

    def prepare(self) -> None:
        """Prepare a run: fill the buckets with this worker's gradients, and wait for all workers."""
        self.buckets = jax.block_until_ready(self._fill(self.buckets, self._own))
        jax.block_until_ready(self._meet(self._own))

    def run(self, program: str) -> None:
        begin = np.array([time.monotonic_ns()], "<u8").view(np.uint32)
        self.buckets = jax.block_until_ready(self._programs[program](self.buckets, self._engine.put(begin)))

    def wrong_count(self) -> int:
        """How many sums of the last ``step`` are wrong. A worker gives 1 in the written element, else 1 + rank."""
        n = self._engine.worker_count
        total = 0
        for bucket in self.buckets:
            found = np.asarray(bucket.addressable_data(0))
            expected = np.full(found.shape, n * (n + 1) / 2, np.float32)
            expected[0] = n * _WRITTEN
            total += int(np.count_nonzero(found != expected))
        return total

    def _compute(self, buckets: Arrays, begin: jax.Array) -> Arrays:
        after = jnp.float32(0)
        return [bucket.at[0].set(self._wait(index, begin, after)) for index, bucket in enumerate(buckets)]

    def _communicate(self, buckets: Arrays, begin: jax.Array) -> Arrays:
        return self._engine.psum([bucket.at[0].set(_WRITTEN) for bucket in buckets], "gradients")

    def _step(self, buckets: Arrays, begin: jax.Array) -> Arrays:
        if not self._in_order:
            return self._engine.psum(self._compute(buckets, begin), "gradients")
        sums: Arrays = []
        after = jnp.float32(0)
        for index, bucket in enumerate(buckets):
            sums += self._engine.psum([bucket.at[0].set(self._wait(index, begin, after))], f"bucket {index}")
            after = sums[-1][0]
        return sums

    def _wait(self, index: int, begin: jax.Array, after: jax.Array) -> jax.Array:
        """A 1, once the emulated accelerator has the bucket's gradients and ``after`` is computed."""
        call = jax.ffi.ffi_call(_WAIT, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
        one: jax.Array = call(begin, after, ready_s=np.float64(self._ready_s[index]))
        return one


def _fill(buckets: Arrays, own: jax.Array) -> Arrays:
    """Set every element to ``own``, by a computation that takes the memory of ``buckets``."""
    return [jax.lax.clamp(own[0], bucket, own[0]) for bucket in buckets]
