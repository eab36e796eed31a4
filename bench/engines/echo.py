"""The traffic of an all-reduce through reducers, without sums, frames and checks: the limit of network and hosts.

A reducer sends back to every worker as many bytes as have come from all workers. It therefore waits for the same bytes
as a reducer that sums. No all-reduce over dedicated reducers and sockets can be faster on these hosts.

``python -m bench.engines.echo LIBRARY ADDRESS PORT WORKER_COUNT`` is one reducer.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.harness.errors import BenchError

SOURCE = Path(__file__).with_suffix(".cc")
_CONNECT_S = 60.0
UNLIMITED = 1 << 62


class Reducers:
    """A worker's connections to all reducers, given as ``ADDRESS:PORT``."""

    def __init__(self, library: str, addresses: Sequence[str], window_bytes: int) -> None:
        self._library = ctypes.CDLL(library)
        self._window_bytes = window_bytes
        self._sockets = [_connect(address) for address in addresses]
        self._descriptors = _descriptors(self._sockets)

    def exchange(self, given: np.ndarray, result: np.ndarray) -> None:
        """Send ``given``, and fill ``result``, which has the same size, with the bytes that come back."""
        data = ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(result.ctypes.data)
        sizes = ctypes.c_size_t(given.nbytes), ctypes.c_size_t(self._window_bytes)
        error = self._library.echo_exchange(self._descriptors, len(self._sockets), *data, *sizes)
        if error:
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()


def _descriptors(sockets: Sequence[socket.socket]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(sockets))(*(connection.fileno() for connection in sockets))


def _connect(address: str) -> socket.socket:
    """Connect, and wait for a reducer that starts later than its workers."""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            connection = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise BenchError(f"no reducer at {address} within {_CONNECT_S:.0f} s") from None
            time.sleep(0.05)
    return _prepared(connection)


def _prepared(connection: socket.socket) -> socket.socket:
    """Set the options that jaxhetero sets on its connections."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return connection


def main() -> None:
    library, address, port, worker_count = sys.argv[1:]
    with socket.create_server((address, int(port))) as listener:
        listener.settimeout(_CONNECT_S)
        workers = [_prepared(listener.accept()[0]) for _ in range(int(worker_count))]
    error = ctypes.CDLL(library).echo_serve(_descriptors(workers), len(workers))
    if error:
        raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    main()
