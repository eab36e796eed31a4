"""The engines in a worker process, each jit-compiled from JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bench.engines import echo

Arrays = list[jax.Array]
Program = Callable[..., Any]


class Engine(Protocol):
    """One way to all-reduce. The constructor waits until all workers have met. ``close`` leaves the job."""

    rank: int
    worker_count: int
    in_program_order: bool
    """The all-reduces of a program run one after the other, in the order of the program."""

    def put(self, contribution: np.ndarray) -> jax.Array:
        """This worker's contribution as an array that ``compile``'s function takes."""
        ...

    def psum(self, arrays: Arrays, name: str) -> Arrays:
        """The sum of each array over all workers, in this order. Call it only inside a compiled function."""
        ...

    def collect(self, collective: str, arrays: Arrays, name: str) -> Arrays:
        """Each array's ``psum_scatter`` or ``all_gather``, tiled; only of engines that have them."""
        ...

    def computed(self, array: jax.Array) -> jax.Array:
        """The array as a value that the program computes. Call it only inside a compiled function."""
        ...

    def compile(self, function: Program, donated: int | None = None) -> Program:
        """Jit-compile ``function`` of trees of arrays. It may reuse the memory of the argument ``donated``."""
        ...

    def close(self) -> None: ...


class _SumsOnly:
    def collect(self, collective: str, arrays: Any, name: str) -> Any:
        raise NotImplementedError(collective)


class _InXla:
    def computed(self, array: jax.Array) -> jax.Array:
        value: jax.Array = jax.lax.optimization_barrier(array)
        return value


class Jaxhetero(_InXla):
    """jaxhetero.psum. The settings come from the environment, as in any program that uses jaxhetero."""

    in_program_order = False

    def __init__(self) -> None:
        import jaxhetero

        jaxhetero.initialize()
        self.rank = jaxhetero.rank()
        self.worker_count = jaxhetero.size()
        wire_dtype = os.environ["BENCH_WIRE_DTYPE"]
        self._settings: dict[str, Any] = {"wire_dtype": wire_dtype} if wire_dtype else {}

    def put(self, contribution: np.ndarray) -> jax.Array:
        return jnp.asarray(contribution)

    def psum(self, arrays: Arrays, name: str) -> Arrays:
        import jaxhetero

        # Reversed, because psum starts with the last array.
        sums: Arrays = jaxhetero.psum(arrays[::-1], name=name, bucket_bytes=1, **self._settings)
        return sums[::-1]

    def collect(self, collective: str, arrays: Arrays, name: str) -> Arrays:
        import jaxhetero

        results: Arrays = getattr(jaxhetero, collective)(arrays[::-1], tiled=True, name=name, bucket_bytes=1)
        return results[::-1]

    def compile(self, function: Program, donated: int | None = None) -> Program:
        return jax.jit(function, donate_argnums=donated)

    def close(self) -> None:
        import jaxhetero

        jaxhetero.shutdown()


class Gloo(_InXla):
    """``jax.lax.psum`` over gloo, on a mesh with one device per process."""

    in_program_order = True

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

    def psum(self, arrays: Arrays, name: str) -> Arrays:
        return [jax.lax.psum(array, "workers") for array in arrays]

    def collect(self, collective: str, arrays: Arrays, name: str) -> Arrays:
        return [getattr(jax.lax, collective)(array, "workers", tiled=True) for array in arrays]

    def compile(self, function: Program, donated: int | None = None) -> Program:
        # The out_specs say that results differ between workers, so that a function may also return its arguments.
        everywhere = jax.P("workers")
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        return jax.jit(mapped, donate_argnums=donated)

    def close(self) -> None:
        jax.distributed.shutdown()


class Mpi(_InXla, _SumsOnly):
    """MPICH's Allreduce. XLA has no MPI on CPUs, so the compiled program calls back into Python."""

    in_program_order = True

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._all = MPI.COMM_WORLD
        self.rank = self._all.Get_rank()
        self.worker_count = self._all.Get_size()

    def put(self, contribution: np.ndarray) -> jax.Array:
        return jnp.asarray(contribution)

    def psum(self, arrays: Arrays, name: str) -> Arrays:
        def reduce(x: Any) -> np.ndarray:
            given = np.asarray(x)
            total = np.empty_like(given)
            self._all.Allreduce(given, total, op=self._mpi.SUM)
            return total

        return [jax.pure_callback(reduce, jax.ShapeDtypeStruct(one.shape, one.dtype), one) for one in arrays]

    def compile(self, function: Program, donated: int | None = None) -> Program:
        return jax.jit(function, donate_argnums=donated)

    def close(self) -> None:
        self._mpi.Finalize()


class Echo(_SumsOnly):
    """The traffic of an all-reduce, outside of XLA. Results have the size of a sum, and meaningless values."""

    in_program_order = True

    def __init__(self) -> None:
        self.rank = int(os.environ["BENCH_RANK"])
        self.worker_count = int(os.environ["BENCH_WORKER_COUNT"])
        addresses = os.environ["BENCH_REDUCERS"].split(",")
        self._reducers = echo.Reducers(os.environ["BENCH_ECHO"], addresses, int(os.environ["BENCH_WINDOW_BYTES"]))
        self._in_place = False

    def put(self, contribution: np.ndarray) -> Any:
        return contribution

    def psum(self, arrays: Any, name: str) -> Any:
        results = arrays if self._in_place else [np.empty_like(array) for array in arrays]
        for array, result in zip(arrays, results, strict=True):
            self._reducers.exchange(array, result)
        return results

    def computed(self, array: Any) -> Any:
        return array

    def compile(self, function: Program, donated: int | None = None) -> Program:
        def run(*arguments: Any) -> Any:
            self._in_place = donated is not None
            return function(*arguments)

        return run

    def close(self) -> None:
        self._reducers.close()


ENGINES: dict[str, Callable[[], Engine]] = {"jaxhetero": Jaxhetero, "gloo": Gloo, "mpi": Mpi, "echo": Echo}
