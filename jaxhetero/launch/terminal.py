"""The output of many processes on one terminal or in one file: whole lines, each with its process's name in front.

A progress bar is a line that is written again and again, with a carriage return before or after each version. On a
terminal the one of the first worker stays in place below everything else; elsewhere, and for the other processes, a
version appears as a line of its own now and then, and the last one always.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Iterable, Sequence

from jaxhetero.config import colour_wanted

_STDOUT, _STDERR = 1, 2
_UPDATE_INTERVAL_S = 10.0
# The limit of a line's memory. A longer line is shown in pieces.
_LINE_BYTES_MAX = 8 << 20
# Escape sequences that move the cursor or erase: they would destroy other processes' lines. Colours are allowed.
_CURSOR_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE_LINE = b"\r\x1b[K"
_PLAIN = b"\x1b[0m"
# Cyan, green, yellow, magenta, blue: no red, which reads as an error.
_COLOURS = (36, 32, 33, 35, 34)


class LineSplitter:
    """Cuts the bytes of one pipe into lines, and recognises progress bars among them."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends."""
        first, *others = data.split(b"\n")
        self._rest += first
        lines = []
        if others:
            lines = [_last_version(bytes(self._rest)), *map(_last_version, others[:-1])]
            self._rest = bytearray(others[-1])
        if b"\r" in self._rest:
            self._forget_old_versions()
        if len(self._rest) > _LINE_BYTES_MAX:
            lines += self.close()
        return lines

    def update(self) -> bytes | None:
        """The newest version of a progress bar on the unfinished line, else None."""
        return _last_version(bytes(self._rest)) if self._rest.startswith(b"\r") else None

    def close(self) -> list[bytes]:
        """The last line, if it had no newline."""
        lines = [_last_version(bytes(self._rest))] if self._rest.strip() else []
        self._rest.clear()
        return lines

    def _forget_old_versions(self) -> None:
        # A carriage return at the end stays: the next bytes replace this version instead of continuing it.
        end = b"\r" if self._rest.endswith(b"\r") else b""
        self._rest = bytearray(b"\r" + _last_version(bytes(self._rest)) + end)


def _last_version(line: bytes) -> bytes:
    if b"\r" in line:
        line = next((version for version in reversed(line.split(b"\r")) if version), b"")
    return _CURSOR_MOVES.sub(b"", line) if b"\x1b" in line else line


class Sink:
    """Standard output or standard error of this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._open = True
        self.is_terminal = os.isatty(fd)
        self.has_colour = self.is_terminal and colour_wanted()

    def write(self, data: bytes) -> None:
        """Write all of ``data``. Drop it once the reader is gone: a job outlives the ``head`` it was piped into."""
        view = memoryview(data)
        while view and self._open:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                select.select([], [self._fd], [])
            except OSError:
                self._open = False

    def columns(self) -> int:
        """The width of the terminal."""
        try:
            return os.get_terminal_size(self._fd).columns or 80
        except OSError:
            return 80


class Display:
    """Writes the lines of processes, progress bars and the launcher's own messages to the two sinks."""

    def __init__(self, names: Sequence[str], launcher: str = "jaxhetero launch") -> None:
        """``names`` of the processes, and of the launcher itself."""
        self.out, self.err = Sink(_STDOUT), Sink(_STDERR)
        self._launcher = launcher
        width = max(map(len, names)) + 2
        self._labels = {name: f"[{name}]".ljust(width).encode() for name in names}
        self._colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._status = b""
        self._shown: dict[str, tuple[float, bytes]] = {}

    def lines(self, sink: Sink, name: str, lines: Iterable[bytes]) -> None:
        """Show finished lines of a process."""
        self._write(sink, b"".join(self._labelled(sink, name, line) + b"\n" for line in lines))

    def update(self, sink: Sink, name: str, text: bytes, *, live: bool) -> None:
        """Show a new version of a progress bar; ``live`` keeps it in place when ``sink`` is a terminal."""
        if live and sink.is_terminal:
            # A bar that wraps could not be erased again.
            text = _ESCAPES.sub(b"", text).decode("utf-8", "replace")[: self.columns_for(name)].encode()
            self._status = self._labels[name] + b" " + text
            sink.write(_ERASE_LINE + self._status)
            return
        shown_at, shown = self._shown.get(name, (-_UPDATE_INTERVAL_S, b""))
        now = time.monotonic()
        if now - shown_at >= _UPDATE_INTERVAL_S and text.strip() and text != shown:
            self._shown[name] = now, text
            self.lines(sink, name, [text])

    def columns_for(self, name: str) -> int:
        """The terminal's width, less the label in front of a process's line."""
        return max(1, self.err.columns() - len(self._labels[name]) - 2)

    def end_update(self, sink: Sink) -> None:
        """Erase the progress bar: its line is finished."""
        if self._status and sink.is_terminal:
            self._status = b""
            sink.write(_ERASE_LINE)

    def message(self, text: str) -> None:
        """Show a message of the launcher itself."""
        self._write(self.err, f"{self._launcher}: {text}\n".encode(errors="replace"))

    def _labelled(self, sink: Sink, name: str, line: bytes) -> bytes:
        label = self._labels[name]
        if not sink.has_colour:
            return label + b" " + line
        end = _PLAIN if b"\x1b" in line else b""
        return b"\x1b[%dm%s%s %s%s" % (self._colours[name], label, _PLAIN, line, end)

    def _write(self, sink: Sink, data: bytes) -> None:
        if self._status and sink.is_terminal:
            data = _ERASE_LINE + data + self._status
        sink.write(data)


def last_lines(data: bytes, count: int) -> list[str]:
    """The last lines of a log, fit to be shown."""
    splitter = LineSplitter()
    lines = splitter.feed(data) + splitter.close()
    return [line.decode("utf-8", "replace") for line in lines[-count:]]


def show_count(number: int, word: str, plural: str = "s") -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {word}{'' if number == 1 else plural}"
