"""The engines as a worker process runs them, each jit-compiled from JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Step = Callable[[jax.Array], jax.Array]


class Engine(Protocol):
    """One way to all-reduce. Made when all workers have met; ``close`` parts from them."""

    rank: int
    worker_count: int

    def put(self, contribution: np.ndarray) -> jax.Array:
        """This worker's contribution as the array that ``make_step``'s function takes."""
        ...

    def make_step(self) -> Step: ...

    def close(self) -> None: ...


class Jaxhetero:
    """Settings come from the environment, as in any program that uses jaxhetero."""

    def __init__(self) -> None:
        import jaxhetero

        jaxhetero.initialize()
        self.rank = jaxhetero.rank()
        self.worker_count = jaxhetero.size()

    def put(self, contribution: np.ndarray) -> jax.Array:
        return jnp.asarray(contribution)

    def make_step(self) -> Step:
        import jaxhetero

        return jax.jit(lambda x: jaxhetero.psum(x, name="bench"))

    def close(self) -> None:
        import jaxhetero

        jaxhetero.shutdown()


class Gloo:
    """``jax.lax.psum`` on a mesh of one device of every process."""

    def __init__(self) -> None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        self.rank = int(os.environ["BENCH_RANK"])
        self.worker_count = int(os.environ["BENCH_WORKER_COUNT"])
        jax.distributed.initialize(os.environ["BENCH_COORDINATOR"], self.worker_count, self.rank)
        mesh = jax.make_mesh((self.worker_count,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
        self._mesh = mesh
        self._sharding = jax.sharding.NamedSharding(mesh, jax.P("workers"))

    def put(self, contribution: np.ndarray) -> jax.Array:
        array: jax.Array = jax.make_array_from_process_local_data(self._sharding, contribution)
        return array

    def make_step(self) -> Step:
        def reduce(x: jax.Array) -> jax.Array:
            total: jax.Array = jax.lax.psum(x, "workers")
            return total

        return jax.jit(jax.shard_map(reduce, mesh=self._mesh, in_specs=jax.P("workers"), out_specs=jax.P()))

    def close(self) -> None:
        jax.distributed.shutdown()


class Mpi:
    """MPI has no part in XLA, so it is called back from the compiled program."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._all = MPI.COMM_WORLD
        self.rank = self._all.Get_rank()
        self.worker_count = self._all.Get_size()

    def put(self, contribution: np.ndarray) -> jax.Array:
        return jnp.asarray(contribution)

    def make_step(self) -> Step:
        def reduce(x: Any) -> np.ndarray:
            given = np.asarray(x)
            total = np.empty_like(given)
            self._all.Allreduce(given, total, op=self._mpi.SUM)
            return total

        def step(x: jax.Array) -> jax.Array:
            total: jax.Array = jax.pure_callback(reduce, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return total

        return jax.jit(step)

    def close(self) -> None:
        self._mpi.Finalize()


ENGINES: dict[str, Callable[[], Engine]] = {"jaxhetero": Jaxhetero, "gloo": Gloo, "mpi": Mpi}
