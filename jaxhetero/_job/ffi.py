"""Makes the handlers of the native module known to XLA."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import jax

from jaxhetero import _native

ALL_REDUCE = "jaxhetero_all_reduce"
EXCHANGE = "jaxhetero_exchange"  # for arrays of this host alone
START = "jaxhetero_start"
DONE = "jaxhetero_done"


@functools.cache
def register(with_stand_in: bool = False) -> None:
    """Register the FFI targets; the first call in a process counts.

    XLA wants a handler's types before the handler. What is registered before the backend exists, JAX keeps and hands
    over when it makes the backend, handlers first; so the backends are made here.

    Args:
      with_stand_in: let arrays of this host go the way of a GPU's, through a stand-in for the driver.
    """
    _clients()
    if with_stand_in:
        _register(_native.stand_in_target(), "jaxhetero_cuda_call_site", "cpu")
        _register(_native.stand_in_start_target(), "jaxhetero_cuda_start_site", "cpu", START)
        _register(_native.stand_in_done_target(), "jaxhetero_cuda_done_site", "cpu", DONE)
        return
    _register(_native.host_target(), "jaxhetero_call_site", "cpu")
    _register(_native.exchange_target(), "jaxhetero_exchange_site", "cpu", EXCHANGE)
    _register(_native.start_target(), "jaxhetero_start_site", "cpu", START)
    _register(_native.done_target(), "jaxhetero_done_site", "cpu", DONE)
    if _gpus():
        register_for_gpus()


def leave_clients() -> None:
    """In a forked child: never destroy XLA's clients, not even at the end of the process.

    A client waits for its threads then. The child has none of them, and dies of a segmentation fault (JAX 0.10.2).
    """
    for client in _clients():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


@functools.cache
def _clients() -> list[Any]:
    devices = [*jax.local_devices(), *jax.local_devices(backend="cpu"), *_gpus()]
    return list({id(device.client): device.client for device in devices}.values())


def register_for_gpus() -> None:
    """Register the targets for arrays of a GPU. Compiling a program for a GPU that is not there needs this as well."""
    _register(_native.cuda_target(), "jaxhetero_cuda_call_site", "CUDA")
    _register(_native.cuda_start_target(), "jaxhetero_cuda_start_site", "CUDA", START)
    _register(_native.cuda_done_target(), "jaxhetero_cuda_done_site", "CUDA", DONE)


def _register(target: dict[str, dict[str, Any]], type_name: str, platform: str, name: str = ALL_REDUCE) -> None:
    type_ = target["type"]
    jax.ffi.register_ffi_type(type_name, {"type_id": type_["type_id"], "type_info": type_["type_info"]}, platform)
    jax.ffi.register_ffi_target(name, target["stages"], platform=platform)


def lane_devices(with_stand_in: bool = False) -> list[int]:
    """This process's devices whose arrays go to the reducers through a lane, as XLA numbers them for the handlers."""
    if with_stand_in:
        return [device.id for device in jax.local_devices(backend="cpu")]
    return [device.local_hardware_id for device in _gpus()]


def _gpus() -> list[jax.Device]:
    try:
        return list(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return []
