"""``offload``: programs that are written for ``jax.lax`` reduce through reducers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

from jaxhetero import _compat
from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES
from jaxhetero._collectives.quanta import QUANTA
from jaxhetero._collectives.wire_dtypes import check_wire_dtype
from jaxhetero._job import world
from jaxhetero._offload.calls import Options
from jaxhetero._offload.interceptor import Interceptor, interceptor, telling_of_unbound_axes
from jaxhetero._offload.modules import Modules
from jaxhetero._offload.scope import check_axis_name
from jaxhetero.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def offload(
    function: Function, *, axis_name: str | None = None, wire_dtype: Any = None, bucket_bytes: int = ...
) -> Function: ...
@overload
def offload(
    function: None = None, *, axis_name: str | None = None, wire_dtype: Any = None, bucket_bytes: int = ...
) -> Offload: ...
def offload(
    function: Function | None = None,
    *,
    axis_name: str | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Function | Offload:
    """Make the collectives of ``jax.lax`` in a function go through reducers, wherever in the function they are.

    Every ``psum``, ``pmean``, ``pmax``, ``pmin``, ``all_gather``, ``psum_scatter``, ``ppermute`` and ``all_to_all``
    over an axis that spans workers is replaced: those that the function calls, those that libraries call for it, such
    as ``BatchNorm(axis_name=...)``, and those that JAX puts in for the gradients of replicated parameters. They may be
    inside ``jit``, ``pmap``, ``shard_map``, ``scan``, ``while_loop``, ``cond``, ``checkpoint``, ``custom_jvp`` and
    ``custom_vjp``. Collectives that are ready together share buckets. Collectives over other axes, of the devices of
    one worker, stay JAX's.

    Where JAX knows the devices of this process alone (no ``jax.distributed``), the function sees an axis of all devices
    of all workers, this worker's after those of lower ranks: the axis of the ``jax.pmap`` or ``jax.shard_map`` inside
    or around it. Under plain ``jax.jit`` there is no such axis. There it is the one that the function names, and every
    worker has one device. In a global mesh it is the axis that ``psum`` takes for that of the workers.

    Args:
      function: what to rewrite. Without it, the result is a decorator, and a context manager for libraries that call
        ``jax.pmap``, ``jax.jit`` or ``jax.shard_map`` themselves: what is called in its block is rewritten, in all
        threads. JAX does all else in the block as outside.
      axis_name: the axis that goes over all workers, where there are several.
      wire_dtype: as in ``psum``, for all sums.
      bucket_bytes: as in ``psum``, for all collectives.

    Returns:
      A function with the arguments and results of ``function``. Arguments that are arrays are traced. Others, Python
      numbers among them, are passed on as they are.

    Does not block.

    Raises:
      ConfigError: when the function is traced. Which axis goes over the workers is not clear, or nothing goes over the
        one that was named; or without ``jax.distributed`` a collective goes over the workers and cannot be replaced.
        When called: what ``psum`` raises. In a global mesh JAX keeps what cannot be replaced, and a warning of the
        logger "jaxhetero" names it.
      NotInitializedError: called before ``jaxhetero.initialize()``.

    Take gradients inside ``function``. If the result is itself differentiated, the sums that JAX then puts in for
    replicated parameters stay JAX's. Without ``jax.distributed`` that is a ``ConfigError``.

    Example:
      A train step for ``jax.pmap``, unchanged, in a job of workers with one device each:

      >>> def train_step(params, batch):
      ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
      ...     grads = jax.lax.pmean(grads, "batch")
      ...     return params - 0.1 * grads, jax.lax.pmean(loss, "batch")
      >>> step = jax.jit(jaxhetero.offload(train_step))
      >>> step(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]]))
      (Array([0.9, 0.6], dtype=float32), Array(2.5, dtype=float32))
    """
    check_axis_name(axis_name)
    check_wire_dtype(wire_dtype, "offload", tuple(QUANTA))
    if bucket_bytes < 1:
        raise ConfigError(f"offload: bucket_bytes is {bucket_bytes}; it must be at least 1")
    made = Offload(axis_name, Options(bucket_bytes, wire_dtype))
    return made if function is None else made(function)


class Offload:
    """What ``offload`` gives without a function: a decorator and a context manager."""

    def __init__(self, axis_name: str | None, options: Options) -> None:
        self._axis_name = axis_name
        self._options = options
        self._blocks = _Blocks()

    def __call__(self, function: Function) -> Function:
        """``function`` with its collectives offloaded."""
        # Of a jitted function JAX makes a program by itself. In other functions a named axis is only there in a trace.
        makes_program = hasattr(function, "lower")

        @functools.wraps(function)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            here = self._interceptor()
            outer = _compat.interceptor()
            if outer is not None and outer.is_inside:
                return function(*args, **kwargs)  # of a program that is rewritten as a whole
            if _compat.is_tracing() or (self._axis_name is not None and not makes_program):
                return _trace_and_run(here, function, args, kwargs)
            with _compat.intercept(here), telling_of_unbound_axes():
                return function(*args, **kwargs)

        return offloaded  # type: ignore[return-value]

    def __enter__(self) -> None:
        if _compat.is_tracing():
            raise ConfigError(
                "offload: a block in a function that JAX traces sees only what is jitted in it; use "
                "jaxhetero.offload(function), or put the block around the call of the jitted function"
            )
        with contextlib.ExitStack() as block:
            block.enter_context(_compat.intercept_everywhere(self._interceptor()))
            self._blocks.opened.append(block.pop_all())

    def __exit__(self, *_: object) -> None:
        self._blocks.opened.pop().close()

    def _interceptor(self) -> Interceptor:
        world.refuse_elastic("jaxhetero.offload")
        return interceptor(self._axis_name, self._options, world.rank(), world.size())


class _Blocks(threading.local):
    """The blocks that a thread has opened with one ``Offload``; each thread closes its own."""

    def __init__(self) -> None:
        self.opened: list[contextlib.ExitStack] = []


def _trace_and_run(interceptor: Interceptor, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a program of ``function`` and run it, rewritten, in the trace of the caller."""
    modules = Modules((args, kwargs))

    def of_values(rest: list[Any], values: Any) -> Any:
        own = modules.rebuilt(rest, values)
        own_args, own_kwargs = own.tree
        return function(*own_args, **own_kwargs), own.changes()

    given = modules.rest, modules.values
    results, changes = interceptor.run(of_values, given, getattr(function, "__name__", repr(function)))
    modules.change(changes)
    return results
