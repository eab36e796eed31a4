"""Copies between a GPU and pinned memory without jaxhetero: the CUDA driver, and two streams."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from bench.harness.errors import BenchError

_NOT_READY = 600


class Copies:
    """Copies of ``size`` bytes from and to the device memory at ``pointer``. Each direction has its own stream."""

    def __init__(self, library: str, pointer: int, size: int) -> None:
        self._driver = ctypes.CDLL(library)
        self._pointer, self._size = ctypes.c_uint64(pointer), ctypes.c_size_t(size)
        self._call("cuInit", 0)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxPushCurrent_v2", context)
        self._streams = [ctypes.c_void_p(), ctypes.c_void_p()]
        self._memory = [ctypes.c_void_p(), ctypes.c_void_p()]
        for stream, memory in zip(self._streams, self._memory, strict=True):
            self._call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
            self._call("cuMemHostAlloc", ctypes.byref(memory), self._size, 1)

    def _call(self, function: str, *arguments: object) -> None:
        if result := getattr(self._driver, function)(*arguments):
            raise BenchError(f"{function}: CUDA error {result}")

    def to_host(self) -> None:
        self._call("cuMemcpyDtoHAsync_v2", self._memory[0], self._pointer, self._size, self._streams[0])

    def to_device(self) -> None:
        """Copy from pinned memory whose bytes do not matter."""
        self._call("cuMemcpyHtoDAsync_v2", self._pointer, self._memory[1], self._size, self._streams[1])

    def wait(self) -> None:
        for stream in self._streams:
            while (result := self._driver.cuStreamQuery(stream)) == _NOT_READY:
                time.sleep(20e-6)
            if result:
                raise BenchError(f"cuStreamQuery: CUDA error {result}")

    def close(self) -> None:
        for memory, stream in zip(self._memory, self._streams, strict=True):
            self._call("cuMemFreeHost", memory)
            self._call("cuStreamDestroy_v2", stream)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def mean_time(copies: Copies, begin: Callable[[], None], repeats: int) -> float:
    """The mean seconds of the copies that one call of ``begin`` begins."""
    copies.wait()
    start = time.perf_counter()
    for _ in range(repeats):
        begin()
    copies.wait()
    return (time.perf_counter() - start) / repeats
