"""A stand-in for NVIDIA's driver, as a library: what ``JAXHETERO_CUDA_STAND_IN`` takes."""

from __future__ import annotations

import ctypes
from pathlib import Path

from bench.engines.build_native import build as build_library

_SOURCE = Path(__file__).parent / "fake_cuda.cc"


def build(folder: Path) -> Path:
    """Compile it into ``folder``; takes seconds. The compiler is ``$CXX``, or g++."""
    return build_library(_SOURCE, folder)


class FakeCuda:
    """The stand-in that this process has loaded."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.fake_cuda_violations.restype = ctypes.c_char_p
        self._library.fake_cuda_call_count.restype = ctypes.c_int64
        self._library.fake_cuda_set_speed.argtypes = [ctypes.c_double, ctypes.c_int64]

    def violations(self) -> list[str]:
        text: bytes = self._library.fake_cuda_violations()
        return text.decode().splitlines()

    def call_count(self, function: str) -> int:
        """How often a function of the driver was called."""
        return int(self._library.fake_cuda_call_count(function.encode()))

    def set_speed(self, bytes_per_s: float, latency_us: int) -> None:
        """How long copies take; ``bytes_per_s`` 0 for no time."""
        self._library.fake_cuda_set_speed(bytes_per_s, latency_us)
