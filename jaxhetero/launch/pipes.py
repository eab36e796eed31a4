"""The pipes from a job's processes: reads their output, logs it and shows it."""

from __future__ import annotations

import os
import selectors
from dataclasses import dataclass, field

from jaxhetero.launch.process import Process
from jaxhetero.launch.terminal import Display, LineSplitter, Sink

# The process whose progress bar stays in place on a terminal.
LIVE = "worker 0"
_READ_BYTES = 1 << 16
# More than a pipe can hold (1 MiB unless privileged).
_DRAIN_BLOCKS = 32


@dataclass
class Pipe:
    """Our end of a child's standard output or standard error."""

    process: Process
    fd: int
    sink: Sink
    splitter: LineSplitter = field(default_factory=LineSplitter)

    @property
    def is_live(self) -> bool:
        """Whether its progress bar is the one that stays in place on a terminal."""
        return self.process.name == LIVE


class Pipes:
    """The open pipes, each registered with ``selector`` as the ``data`` of its key."""

    def __init__(self, selector: selectors.BaseSelector, display: Display) -> None:
        self._selector = selector
        self._display = display
        self._open: list[Pipe] = []

    def add(self, process: Process, fd: int, sink: Sink) -> None:
        """Watch a pipe from ``process``, whose output ``sink`` shows."""
        os.set_blocking(fd, False)
        pipe = Pipe(process, fd, sink)
        self._open.append(pipe)
        self._selector.register(fd, selectors.EVENT_READ, pipe)

    def read(self, pipe: Pipe) -> bool:
        """Pass on the bytes in a pipe, up to one block; return whether it may hold more."""
        try:
            data = os.read(pipe.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        trouble = pipe.process.log(data)
        if trouble:
            self._display.message(trouble)
        self._show(pipe, data)
        if not data:
            self._selector.unregister(pipe.fd)
            self._open.remove(pipe)
        return bool(data)

    def _show(self, pipe: Pipe, data: bytes) -> None:
        """Show the lines that ``data`` completes, and the progress bar after them; no data is the end of the pipe."""
        had_update = pipe.splitter.update() is not None
        lines = pipe.splitter.feed(data) if data else pipe.splitter.close()
        if pipe.is_live and had_update and (lines or not data):
            self._display.end_update(pipe.sink)
        self._display.lines(pipe.sink, pipe.process.name, lines)
        update = pipe.splitter.update()
        if update is not None:
            self._display.update(pipe.sink, pipe.process.name, update, live=pipe.is_live)

    def drain(self, process: Process) -> None:
        """Pass on the bytes that an ended process left in its pipes.

        Does not wait for end of file: a grandchild may hold a pipe open for ever.
        """
        for pipe in [pipe for pipe in self._open if pipe.process is process]:
            for _ in range(_DRAIN_BLOCKS):
                if not self.read(pipe):
                    break
