"""Makes the handlers of the native module known to XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxhetero import _native

ALL_REDUCE = "jaxhetero_all_reduce"
START = "jaxhetero_start"
DONE = "jaxhetero_done"


@functools.cache
def register() -> None:
    """Register the FFI targets; the first call in a process counts.

    XLA wants a handler's types before the handler. What is registered before the backend exists, JAX keeps and hands
    over when it makes the backend, handlers first; so the backends are made here.
    """
    jax.local_devices()
    _register(_native.host_targets(), "cpu")
    if _has_backend("cuda"):
        _register(_native.cuda_targets(), "CUDA")


@functools.cache
def register_stand_in() -> None:
    """Let arrays of this host go the way of a GPU's, through a stand-in for the driver."""
    _register(_native.stand_in_targets(), "cpu")


def _register(targets: dict[str, dict[str, Any]], platform: str) -> None:
    for target in targets.values():
        for name, type_ in target["types"].items():
            jax.ffi.register_ffi_type(name, type_, platform)
    for name, target in targets.items():
        jax.ffi.register_ffi_target(name, target["stages"], platform=platform)


def _has_backend(platform: str) -> bool:
    try:
        return bool(jax.local_devices(backend=platform))
    except RuntimeError:
        return False
