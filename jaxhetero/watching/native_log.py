"""Hands the log messages of native threads to the standard logging module."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

logger = logging.getLogger("jaxhetero")

# How long a wait for the next event may keep the interpreter from ending.
_POLL_MS = 100
# A source that has ended answers at once; this pause keeps the loop from spinning.
_PAUSE_S = 0.02


class EventSource(Protocol):
    """A native object with a queue of log messages."""

    def next_event(self, timeout_ms: int) -> tuple[int, str] | None:
        """``(level, text)``, or None after ``timeout_ms``."""


class EventPump(threading.Thread):
    """Logs the events of one native object under the logger "jaxhetero", until ``stop``.

    The thread is no daemon: the end of the interpreter tears daemon threads out of native code, which can abort the
    process. Instead the thread ends by itself after the main thread.
    """

    def __init__(self, source: EventSource, prefix: str = "") -> None:
        super().__init__(name="jaxhetero-events", daemon=False)
        self._source = source
        self._prefix = prefix
        self._stopping = threading.Event()

    def run(self) -> None:
        """Log until ``stop`` is called or the main thread has ended."""
        main = threading.main_thread()
        while main.is_alive() and not self._stopping.is_set():
            if not self._log_next(_POLL_MS):
                self._stopping.wait(_PAUSE_S)

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread and log the events that are still queued, within ``timeout_s``. May be called twice."""
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        if self.is_alive():
            self.join(timeout_s)
        while not self.is_alive() and time.monotonic() < deadline and self._log_next(0):
            pass

    def _log_next(self, timeout_ms: int) -> bool:
        event = self._source.next_event(timeout_ms)
        if event is None:
            return False
        severity, text = event
        logger.log(severity, "%s%s", self._prefix, text)
        return True
