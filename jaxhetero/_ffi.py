"""Makes the handlers of the native module known to XLA."""

from __future__ import annotations

import functools

import jax

from jaxhetero import _native

ALL_REDUCE = "jaxhetero_all_reduce"


@functools.cache
def register() -> None:
    """Register the FFI targets; the first call in a process counts.

    XLA wants a handler's types before the handler. What is registered before the backend exists, JAX keeps and hands
    over when it makes the backend, handlers first; so the backend is made here.
    """
    jax.local_devices()
    for name, capsules in _native.ffi_types().items():
        jax.ffi.register_ffi_type(name, {"type_id": capsules["type_id"], "type_info": capsules["type_info"]}, "cpu")
    for name, stages in _native.ffi_targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")
