"""``GET /metrics`` for Prometheus, on a port of its own: off unless asked for, and never a way in.

A stranger may ask as well. It learns numbers and the job's id, which opens nothing. Nothing that it sends is read but
the request's head, each connection has a deadline, and only a few are served at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import socketserver
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from jaxhetero.config import Config, ReducerConfig, format_address, parse_address
from jaxhetero.errors import AddressInUse, ConfigError
from jaxhetero.watching.native_log import logger
from jaxhetero.watching.watched import Watched

_PATH = "/metrics"
_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# From accept to close: a connection that takes longer is closed.
_DEADLINE_S = 5.0
_MOST_CONNECTIONS = 8
# How late a deadline, or the end of the process, may be noticed.
_POLL_S = 0.1


class Exporter(threading.Thread):
    """Serves the metrics of this process until ``stop``. A context manager; does nothing where ``metrics_port`` is 0.

    The thread is no daemon, for the reason that ``EventPump`` has: it ends by itself after the main thread.

    Raises:
      ConfigError: prometheus-client is not installed.
      AddressInUse: another process has the port, or the address is not one of this host.
    """

    def __init__(self, config: Config | ReducerConfig) -> None:
        super().__init__(name="jaxhetero-metrics", daemon=False)
        self._stopping = threading.Event()
        self._server = _Server(_listening_address(config)) if config.metrics_port else None
        if self._server is not None:
            logger.info("metrics at http://%s%s", self._server.name, _PATH)
            self.start()

    def show(self, *watched: Watched) -> None:
        """What to serve from now on."""
        if self._server is not None:
            self._server.watched = watched

    def run(self) -> None:
        """What the thread does."""
        assert self._server is not None
        main = threading.main_thread()
        while main.is_alive() and not self._stopping.is_set():
            self._server.handle_request()  # or nothing, after _POLL_S
            self._server.close_connections(before=time.monotonic())
        self._server.close_connections(before=float("inf"))
        self._server.server_close()  # waits for the threads of the connections, which are closed

    def stop(self) -> None:
        """Close the port and its connections. May be called twice."""
        self._stopping.set()
        if self.is_alive():
            self.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """One thread a connection; no HTTPServer, because that one asks the name service when it binds."""

    timeout = _POLL_S  # of handle_request()
    request_queue_size = 128
    allow_reuse_address = True
    daemon_threads = False

    def __init__(self, address: tuple[str, int]) -> None:
        host, port = address
        self.name = format_address(host, port)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise AddressInUse(
                f"cannot listen on {self.name} for metrics: {error.strerror}; give another --metrics-port or "
                "JAXHETERO_METRICS_PORT, each process of a host its own"
            ) from None
        self.watched: Sequence[Watched] = ()
        self._slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}  # in the order of their accept; guarded by _lock
        _servers.add(self)

    def close_connections(self, before: float) -> None:
        """Those whose deadline is before that time."""
        with self._lock:
            for connection in [each for each, deadline in self._deadlines.items() if deadline < before]:
                self._cut(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A new connection, in the main loop. The oldest makes place for it: a scrape takes milliseconds."""
        if not self._slots.acquire(blocking=False):
            with self._lock:
                if self._deadlines:
                    self._cut(next(iter(self._deadlines)))
            if not self._slots.acquire(timeout=_POLL_S):
                return self.shutdown_request(request)
        with self._lock:
            self._deadlines[request] = time.monotonic() + _DEADLINE_S
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._deadlines.pop(connection, None)
        self._slots.release()

    def _cut(self, connection: socket.socket) -> None:
        """The thread of the connection wakes up and ends it."""
        del self._deadlines[connection]
        with contextlib.suppress(OSError):  # the peer has gone, or the thread is closing it
            connection.shutdown(socket.SHUT_RDWR)

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies, and leave the port and the connections as they are."""
        for each in (self.socket, *self._deadlines):
            if each.fileno() >= 0:
                os.close(each.detach())

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # those are the peer's
            logger.warning("metrics for %s: %r", client_address, error)


# A fork asks nobody, so the child has to find them.
_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for server in _servers:
        server.leave_to_parent()
    _servers.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _DEADLINE_S
    server_version = "jaxhetero"
    sys_version = ""
    error_message_format = "%(code)d\n"
    error_content_type = "text/plain"

    def do_GET(self) -> None:
        if self.path != _PATH:
            return self.send_error(HTTPStatus.NOT_FOUND)
        from jaxhetero.watching.families import render

        text = render(self.server.watched)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a stranger writes no log."""


def _listening_address(config: Config | ReducerConfig) -> tuple[str, int]:
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            f"metrics_port is {config.metrics_port}, which needs a library: pip install prometheus-client"
        )
    return config.host or _address_towards(*parse_address("coordinator", config.coordinator)), config.metrics_port


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no address for the metrics: there is no way to the coordinator {format_address(host, port)}: "
            f"{error.strerror}; set host or interface"
        ) from None
