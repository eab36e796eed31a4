"""A train step with an emulated accelerator: its waits are timed, its gradients and its all-reduces are real.

The programs are jit-compiled. An instruction of theirs, of wait.cc, is over when the emulated accelerator would have
the next bucket's gradients; then the program writes an element of them, in place, and all-reduces them. Like the
gradients of a real step they are there for the sum only, which may take their memory. The accelerator is never late
because of the network: like kernels queued on a stream, its times count from the beginning of the step. Waiting takes
no CPU and no thread of XLA's, and jaxhetero's call is asynchronous, so waits and rounds go on at the same time.

XLA's CPU client runs the collectives of ``jax.lax.psum`` one after the other, each holding up what follows it in the
program. The program is written so that this costs such an engine nothing: the wait for a bucket comes after the
all-reduce of the one before, which would have to be over anyway. As written for jaxhetero, XLA would make one
all-reduce of all of them, after the last wait, and nothing would overlap; ``combined`` lets it.
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
_WRITTEN = 1.0  # by wait.cc


class Emulation:
    """Gradients in buckets, and three programs.

    ``compute`` only waits for the buckets, ``communicate`` only reduces them, ``step`` does both.

    Args:
      engine: all-reduces.
      counts: how many elements each bucket has, the bucket that is ready first first. A bucket is one array, as if its
        gradients had been fused for free: handing hundreds of arrays to a program takes time that an accelerator of its
        own would hide.
      ready_s: when each bucket is ready, from the beginning of the step; with the last one the accelerator is done.
      combined: for an engine that reduces in program order, leave the order to XLA.
      library: wait.cc, compiled.

    ``buckets`` are the gradients, or what the last program has made of them, in the same memory all the time: new
    memory costs time that is neither the accelerator's nor the all-reduce's.
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
        """For a run: every worker's own gradients in the buckets, and all workers together."""
        self.buckets = jax.block_until_ready(self._fill(self.buckets, self._own))
        jax.block_until_ready(self._meet(self._own))

    def run(self, program: str) -> None:
        begin = np.array([time.monotonic_ns()], "<u8").view(np.uint32)
        self.buckets = jax.block_until_ready(self._programs[program](self.buckets, self._engine.put(begin)))

    def wrong_count(self) -> int:
        """Of the sums of the last run, a ``step``: what was written is 1 everywhere, the rest is 1 + rank."""
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
        """A 1, when the emulated accelerator has the gradients of a bucket, and there is ``after``."""
        call = jax.ffi.ffi_call(_WAIT, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
        one: jax.Array = call(begin, after, ready_s=np.float64(self._ready_s[index]))
        return one


def _fill(buckets: Arrays, own: jax.Array) -> Arrays:
    """Every element ``own``, by a computation that takes the memory of ``buckets``."""
    return [jax.lax.clamp(own[0], bucket, own[0]) for bucket in buckets]
