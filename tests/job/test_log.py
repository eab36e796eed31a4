"""Events of native threads in Python's logging, and how their pump ends."""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import time

import pytest

from jaxhetero.watching.native_log import EventPump


class _Source:
    def __init__(self, *events: tuple[int, str]) -> None:
        self.events: queue.Queue[tuple[int, str]] = queue.Queue()
        for event in events:
            self.events.put(event)

    def next_event(self, timeout_ms: int) -> tuple[int, str] | None:
        try:
            return self.events.get(block=timeout_ms > 0, timeout=timeout_ms / 1000)
        except queue.Empty:
            return None


def test_events_are_logged_in_order_with_level_and_prefix(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxhetero")
    source = _Source((logging.INFO, "one"), (logging.DEBUG, "hidden"))
    pump = EventPump(source, "rank 3: ")
    pump.start()
    source.events.put((logging.WARNING, "two %s"))
    while not source.events.empty():
        time.sleep(0.01)
    pump.stop()
    assert not pump.is_alive()
    assert caplog.record_tuples == [
        ("jaxhetero", logging.INFO, "rank 3: one"),
        ("jaxhetero", logging.WARNING, "rank 3: two %s"),
    ]


def test_stop_logs_what_is_still_queued(caplog: pytest.LogCaptureFixture) -> None:
    source = _Source()
    pump = EventPump(source)
    pump.start()
    pump.stop()
    source.events.put((logging.WARNING, "late"))
    pump.stop()
    assert caplog.messages == ["late"]


def test_stop_keeps_its_deadline_when_events_never_end() -> None:
    class Endless:
        def next_event(self, timeout_ms: int) -> tuple[int, str] | None:
            return logging.DEBUG, "again"

    pump = EventPump(Endless())
    pump.start()
    started = time.monotonic()
    pump.stop(0.2)
    assert time.monotonic() - started < 10
    assert not pump.is_alive()


def test_without_logging_set_up_warnings_reach_stderr_and_the_interpreter_ends() -> None:
    code = (
        "import time\n"
        "from jaxhetero.watching.native_log import EventPump\n"
        "class Source:\n"
        "    events = [(20, 'info'), (30, 'warning')]\n"
        "    def next_event(self, timeout_ms):\n"
        "        return self.events.pop() if self.events else time.sleep(timeout_ms / 1000)\n"
        "EventPump(Source()).start()\n"
        "time.sleep(0.1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "warning\n")
