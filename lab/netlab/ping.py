"""The round-trip time of a byte between two hosts.

As a program, this file is one end: ``ping.py answer ADDRESS`` or ``ping.py ask ADDRESS PORT COUNT``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.netlab.host import Host


def measure_round_trip(source: Host, target: Host, count: int = 200) -> float:
    """Median seconds of ``count`` round trips of one byte from ``source`` to ``target`` and back over TCP."""
    program: list[str | Path] = [sys.executable, "-I", "-S", Path(__file__)]
    echo = target.start([*program, "answer", target.address], stdout=subprocess.PIPE)
    with echo:
        assert echo.stdout is not None
        port = echo.stdout.readline().strip()
        return float(source.run([*program, "ask", target.address, port, str(count)]).stdout)


def _answer(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1):
            connection.sendall(data)


def _ask(address: str, port: int, count: int) -> None:
    times_s = []
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            begin_s = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            times_s.append(time.perf_counter() - begin_s)
    print(median(times_s))


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        _answer(sys.argv[2])
    else:
        _ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
