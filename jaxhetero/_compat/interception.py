"""Changing programs between JAX's tracing and lowering, for ``jaxhetero.offload``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax._src import core, pjit, shard_map


def is_tracing() -> bool:
    """Whether the caller runs inside a function that JAX traces."""
    return not core.trace_state_clean()


class Interceptor(Protocol):
    """What ``intercept`` asks; equal ones share what JAX has traced and compiled."""

    def trace(self, trace: Callable[[], Any]) -> Any:
        """Call ``trace``, which has JAX trace a jitted function."""

    def lower(self, program: Any) -> Any:
        """The jaxpr that JAX shall lower and compile in the place of ``program``."""

    def map(self, function: Callable[..., Any], *shards: Any) -> Any:
        """Call ``function``, which a ``jax.shard_map`` or ``jax.pmap`` maps; for its result see ``with_values``."""

    def call(self, compiled: Any) -> None:
        """A program that was compiled ahead of time, a ``jax.stages.Compiled``, is about to be called."""


_intercepted: Any = jax.make_user_context(None)
_everywhere: list[Interceptor] = []
_everywhere_lock = threading.Lock()


def interceptor() -> Any:
    """Who intercepts in this thread; None for nobody."""
    return _intercepted.value


@contextlib.contextmanager
def intercept(interceptor: Interceptor) -> Iterator[None]:
    """Have ``interceptor`` asked about all programs that this thread traces, lowers or maps in this block.

    To everybody else JAX looks as outside of the block: nothing is traced. What was jitted before the block is traced
    anew, because JAX's caches know the interceptor.

    Why: there is no public way to change a program between JAX's tracing and lowering. Since 0.10.
    """
    with _patches, _intercepted(interceptor):
        yield


@contextlib.contextmanager
def intercept_everywhere(interceptor: Interceptor) -> Iterator[None]:
    """As ``intercept``, and in all threads that are in no block of their own."""

    def use_last() -> None:
        _intercepted.set_global(_everywhere[-1] if _everywhere else None)

    with intercept(interceptor):
        with _everywhere_lock:
            _everywhere.append(interceptor)
            use_last()
        try:
            yield
        finally:
            with _everywhere_lock:
                _everywhere.remove(interceptor)
                use_last()


_otherwise: dict[str, Interceptor] = {}


def intercept_otherwise(interceptor: Interceptor) -> None:
    """Have ``interceptor`` asked from now on where nobody intercepts. JAX's caches do not know that it is there."""
    if _otherwise.setdefault("interceptor", interceptor) is interceptor:
        _patches.__enter__()


class _Patches:
    """Functions of JAX that are others while somebody intercepts."""

    def __init__(self, *patches: tuple[Any, str, Callable[..., Any]]) -> None:
        self._patches = patches  # owner, name, and what is called with the original and its arguments
        self._originals: list[Any] = []
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._originals = [vars(owner).get(name) for owner, name, _ in self._patches]
                patched = [_patched(getattr(owner, name), patch) for owner, name, patch in self._patches]
                for (owner, name, _), function in zip(self._patches, patched, strict=True):
                    setattr(owner, name, function)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for (owner, name, _patch), original in zip(self._patches, self._originals, strict=True):
                if original is None:  # it was an attribute of the owner's class
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def _patched(original: Callable[..., Any], patch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        active = interceptor() or _otherwise.get("interceptor")
        return original(*args, **kwargs) if active is None else patch(active, original, *args, **kwargs)

    return call


def _trace(active: Interceptor, original: Callable[..., Any], *args: Any) -> Any:
    return active.trace(functools.partial(original, *args))


def _lower(active: Interceptor, original: Callable[..., Any], *args: Any, jaxpr: Any, **kwargs: Any) -> Any:
    return original(*args, jaxpr=active.lower(jaxpr), **kwargs)


def _bind_shard_map(active: Interceptor, original: Callable[..., Any], *args: Any, **params: Any) -> Any:
    (function,) = params["subfuns"]
    if function.__qualname__.startswith("_shard_map."):  # the user's, and not a derivative that JAX has made of it
        params["subfuns"] = (functools.partial(active.map, function),)
    return original(*args, **params)


def _call_compiled(active: Interceptor, original: Callable[..., Any], compiled: Any, *args: Any, **kwargs: Any) -> Any:
    active.call(compiled)
    return original(compiled, *args, **kwargs)


# A call of a jitted function and ``lower`` of one go through the first two of these, whoever has jitted it.
_patches = _Patches(
    (pjit, "_infer_params", _trace),
    (pjit, "_resolve_and_lower", _lower),
    (shard_map.shard_map_p, "bind", _bind_shard_map),
    (jax.stages.Compiled, "__call__", _call_compiled),
)


def with_values(result: Any, values: Sequence[Any]) -> Any:
    """What a function that ``jax.shard_map`` maps gives to JAX, with other values; the old ones are its items.

    Why: it is a ``FlatTree``, which is not public. Since 0.10.
    """
    return result.update(values)
