"""``offload``: programs that are written for ``jax.lax`` reduce through reducers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from jaxhetero import _compat, world
from jaxhetero._collectives.wire_dtypes import check_wire_dtype
from jaxhetero._offload.calls import Options, warn_once
from jaxhetero._offload.modules import Modules
from jaxhetero._offload.rewrite import Rewriter, trace
from jaxhetero._offload.scope import Scope, check_axis_name, make_scope
from jaxhetero.buckets import DEFAULT_BUCKET_BYTES
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

    Every ``psum``, ``pmean``, ``pmax``, ``pmin``, ``all_gather`` and ``psum_scatter`` over an axis that spans workers
    is replaced: those that the function calls, those that libraries call for it, such as ``BatchNorm(axis_name=...)``,
    and those that JAX puts in for the gradients of replicated parameters. They may be inside ``jit``, ``scan``,
    ``while_loop``, ``cond``, ``checkpoint``, ``custom_jvp`` and ``custom_vjp``. Collectives that are ready together
    share buckets. Collectives over the devices of one worker stay JAX's.

    Args:
      function: what to rewrite. Without it, the result is a decorator. If no ``axis_name`` is given, the result is also
        a context manager, for functions that a library jits: what is jitted and called in its block is rewritten.
      axis_name: the axis that counts as over all workers, where JAX knows the devices of this process alone (no
        ``jax.distributed``). Under ``jax.pmap`` or ``jax.shard_map`` it is an axis of this worker's devices, and
        ``function`` is the function inside. Under plain ``jax.jit`` there is no such axis, and every worker has one
        device. The function sees an axis of all devices of all workers, this worker's after those of lower ranks. In a
        global mesh it is not needed.
      wire_dtype: as in ``psum``, for all sums.
      bucket_bytes: as in ``psum``, for all collectives.

    Returns:
      A function with the arguments and results of ``function``. Arguments that are arrays are traced. Others, Python
      numbers among them, are passed on as they are.

    Does not block.

    Raises:
      ConfigError: the function has a collective that goes over the workers by ``axis_name`` and cannot be replaced, for
        example ``ppermute``; or it is a ``jax.pmap`` over ``axis_name``, which belongs outside. When called: what
        ``psum`` raises. In a global mesh JAX keeps what cannot be replaced, and a warning of the logger "jaxhetero"
        names it.
      NotInitializedError: called before ``jaxhetero.initialize()``.

    Take gradients inside ``function``. If the result is itself differentiated, the sums that JAX then puts in for
    replicated parameters stay JAX's.

    Example:
      A train step for ``jax.pmap``, unchanged, in a job of workers with one device each:

      >>> def train_step(params, batch):
      ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
      ...     grads = jax.lax.pmean(grads, "batch")
      ...     return params - 0.1 * grads, jax.lax.pmean(loss, "batch")
      >>> step = jax.jit(jaxhetero.offload(train_step, axis_name="batch"))
      >>> step(jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]]))
      (Array([0.9, 0.6], dtype=float32), Array(2.5, dtype=float32))
    """
    check_axis_name(axis_name)
    check_wire_dtype(wire_dtype, "offload")
    if bucket_bytes < 1:
        raise ConfigError(f"offload: bucket_bytes is {bucket_bytes}; it must be at least 1")
    made = Offload(axis_name, Options(bucket_bytes, wire_dtype))
    return made if function is None else made(function)


class Offload:
    """What ``offload`` gives without a function: a decorator and a context manager."""

    def __init__(self, axis_name: str | None, options: Options) -> None:
        self._axis_name = axis_name
        self._options = options
        self._blocks: list[contextlib.ExitStack] = []
        self._make_rewriter = functools.cache(self._new_rewriter)

    def __call__(self, function: Function) -> Function:
        """``function`` with its collectives offloaded."""
        # Of a jitted function JAX makes a program by itself. In other functions a named axis is only there in a trace.
        makes_program = hasattr(function, "lower")

        @functools.wraps(function)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if _compat.is_tracing() or (self._axis_name is not None and not makes_program):
                return self._trace_and_run(function, args, kwargs)
            with self._intercepted():
                return function(*args, **kwargs)

        return offloaded  # type: ignore[return-value]

    def __enter__(self) -> None:
        if self._axis_name is not None:
            raise ConfigError(
                f"offload: a block has no axis {self._axis_name!r} for what runs in it without jax.jit; use "
                f"jaxhetero.offload(step, axis_name={self._axis_name!r})"
            )
        if _compat.is_tracing():
            raise ConfigError(
                "offload: a block in a function that JAX traces sees only what is jitted in it; use "
                "jaxhetero.offload(function), or put the block around the call of the jitted function"
            )
        with contextlib.ExitStack() as block:
            block.enter_context(self._intercepted())
            self._blocks.append(block.pop_all())

    def __exit__(self, *_: object) -> None:
        self._blocks.pop().close()

    def _intercepted(self) -> contextlib.AbstractContextManager[None]:
        rewriter = self._rewriter()
        return _compat.intercept(rewriter.run_primitive, rewriter.scope.axis_env)

    def _rewriter(self) -> Rewriter:
        return self._make_rewriter(make_scope(self._axis_name), world.rank(), world.size())

    def _new_rewriter(self, scope: Scope, _rank: int, _size: int) -> Rewriter:
        return Rewriter(scope, self._options)

    def _trace_and_run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a program of ``function`` and run it, rewritten, in the trace of the caller."""
        rewriter = self._rewriter()
        modules = Modules((args, kwargs))

        def of_values(rest: list[Any], values: Any) -> Any:
            own = modules.rebuilt(rest, values)
            own_args, own_kwargs = own.tree
            return function(*own_args, **own_kwargs), own.changes()

        program, operands, as_results = trace(of_values, (modules.rest, modules.values), rewriter.scope)
        if self._axis_name is not None and not rewriter.has_collectives(program):
            name = getattr(function, "__name__", repr(function))
            warn_once(f"offload: there is no collective in {name}, so each worker runs it by itself")
        results, changes = as_results(rewriter.evaluate(program, program.consts, operands))
        modules.change(changes)
        return results
