"""Starts Python programs without importing JAX anew: a server that has imported it forks a real process for each.

A process that imports JAX takes 1.3 CPU seconds before its first line; one that is forked here begins with its first
line. Pid, signals, environment, standard streams and the end of the process are real.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]
# One message, with the whole environment of a process in it, is smaller.
_MESSAGE_BYTES = 1 << 20
# What Python and JAX read when they start, and so has to be the same in the server and in what it forks.
_READ_AT_START = ("PYTHON", "JAX_", "LD_", "ASAN_", "TSAN_", "UBSAN_")


class ForkServer:
    """The test's side: one server, and the connections to the processes that it has forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start a server for processes that have the same ``read_at_start`` as ``environment``."""
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(remote.fileno())],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
            )

    def start(self, command: list[str], environment: Mapping[str, str], output: IO[bytes], errors: IO[bytes]) -> Forked:
        """As ``subprocess.Popen([sys.executable, *command])``, of a program or of ``-m`` and a module."""
        own, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = _Request(command, dict(environment), str(Path.cwd()))
        with remote:
            handed = [remote.fileno(), output.fileno(), errors.fileno()]
            socket.send_fds(self._control, [json.dumps(vars(request)).encode()], handed)
        return Forked(own)

    def close(self) -> None:
        """End the server, and kill what it has forked and still runs."""
        self._control.close()
        self._process.wait()


class Forked:
    """A process that the server has forked, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process."""
        if self.returncode is None:
            self._connection.settimeout(None if timeout is None else max(timeout, 1e-6))
            try:
                self.returncode = int(self._connection.recv(64))
            except TimeoutError:
                assert timeout is not None
                raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Does nothing if the process has ended: only its parent, the server, knows that the pid is still its own."""
        if self.poll() is None:
            with contextlib.suppress(BrokenPipeError):  # it has ended just now
                self._connection.send(str(int(number)).encode())

    def kill(self) -> None:
        """As ``subprocess.Popen.kill``."""
        self.send_signal(signal.SIGKILL)


def read_at_start(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What a forked process cannot change of an environment."""
    return tuple(sorted((name, text) for name, text in environment.items() if name.startswith(_READ_AT_START)))


# --- In the server.


@dataclass
class _Request:
    command: list[str]
    environment: dict[str, str]
    folder: str


@dataclass
class _Server:
    control: socket.socket
    connections: dict[int, socket.socket] = field(default_factory=dict)  # by pid

    def serve(self) -> _Request | None:
        """Fork until the control connection ends. Returns in each forked process, with what it is to run."""
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector, wake, woken:
            selector.register(woken, selectors.EVENT_READ)
            selector.register(self.control, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is woken:
                        woken.recv(4096)
                        for connection in self.reap():
                            if connection in selector.get_map():
                                selector.unregister(connection)
                            connection.close()
                    elif key.fileobj is self.control:
                        message, handed, *_ = socket.recv_fds(self.control, _MESSAGE_BYTES, 3)
                        if not message:
                            return None
                        if (request := self.fork(json.loads(message), handed)) is not None:
                            signal.set_wakeup_fd(-1)
                            return request
                        pid, connection = next(reversed(self.connections.items()))
                        selector.register(connection, selectors.EVENT_READ, pid)
                    elif self.connections.get(key.data) is key.fileobj:
                        self.pass_signal(key.data, selector)

    def fork(self, message: dict[str, Any], handed: list[int]) -> _Request | None:
        pid = os.fork()
        if pid == 0:
            for connection in (self.control, *self.connections.values()):
                connection.close()
            os.close(handed[0])
            for stream, number in zip(handed[1:], (1, 2), strict=True):
                os.dup2(stream, number)
                os.close(stream)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _Request(**message)
        for stream in handed[1:]:
            os.close(stream)
        self.connections[pid] = socket.socket(fileno=handed[0])
        self.connections[pid].send(str(pid).encode())
        return None

    def reap(self) -> Iterator[socket.socket]:
        """The connections of the processes that have ended, each told its exit code."""
        while self.connections:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self.connections.pop(pid)
            with contextlib.suppress(OSError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            yield connection

    def pass_signal(self, pid: int, selector: selectors.BaseSelector) -> None:
        number = self.connections[pid].recv(64)
        if number:
            os.kill(pid, int(number))
        else:  # the test holds the process no longer
            selector.unregister(self.connections[pid])


def _become(request: _Request) -> NoReturn:
    """Run a program in this process, which was forked for it."""
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    os.chdir(request.folder)
    import numpy as np

    np.random.seed()  # else every process would draw the same numbers
    if request.command[0] == "-m":
        sys.argv = request.command[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request.command
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def main() -> None:
    """Import what most programs import, and serve."""
    import jax.numpy  # noqa: F401
    import optax  # noqa: F401

    import jaxhetero._collectives.api
    import jaxhetero._native
    import jaxhetero.cli
    import jaxhetero.optimizers  # noqa: F401

    gc.collect()
    gc.freeze()  # else the first collection in a forked process would copy the memory of all that is imported
    server = _Server(socket.socket(fileno=int(sys.argv[1])))
    request = server.serve()
    if request is not None:
        _become(request)
    for pid, connection in server.connections.items():
        os.kill(pid, signal.SIGKILL)
        connection.close()
    server.control.close()


if __name__ == "__main__":
    main()
