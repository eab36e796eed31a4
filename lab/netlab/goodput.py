"""The goodput of TCP from one host to another: the bytes of payload per second.

As a program, this file is one end: ``goodput.py receive ADDRESS`` or ``goodput.py send ADDRESS PORT SECONDS``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.netlab.host import Host

_BLOCK_BYTES = 1 << 18
# The first bytes do not count: TCP is in slow start, and the token buckets are still full.
_SETTLE_S = 0.4


def measure_goodput(source: Host, target: Host, duration_s: float = 2.0) -> float:
    """Bytes per second of one TCP connection from ``source`` to ``target``, measured after slow start."""
    program: list[str | Path] = [sys.executable, "-I", "-S", Path(__file__)]
    receiver = target.start([*program, "receive", target.address], stdout=subprocess.PIPE)
    with receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        source.run([*program, "send", target.address, port, str(duration_s + _SETTLE_S)], timeout_s=duration_s + 30)
        return float(receiver.stdout.readline())


def _receive(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    block = bytearray(_BLOCK_BYTES)
    with connection:
        settled_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < settled_s:
            connection.recv_into(block)
        begin_s = end_s = time.monotonic()
        received_bytes = 0
        while count := connection.recv_into(block):
            received_bytes += count
            end_s = time.monotonic()
    print(received_bytes / (end_s - begin_s), flush=True)


def _send(address: str, port: int, duration_s: float) -> None:
    block = bytes(_BLOCK_BYTES)
    with socket.create_connection((address, port)) as connection:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            connection.sendall(block)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2])
    else:
        _send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
