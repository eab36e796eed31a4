"""All rounds of a worker in a file, while they are made, and such files joined into one trace.

The file has JSON on each line: first who writes, then a list for each round, and each view where it began, at last the
worker's metrics. A worker that is killed leaves a file without its end, maybe with a torn last line.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxhetero.config import host_name
from jaxhetero.errors import ConfigError
from jaxhetero.watching.native_log import logger
from jaxhetero.watching.trace import Event, WorkerTrace, write_events

if TYPE_CHECKING:
    from jaxhetero._native import Communicator

_DRAIN_S = 0.05
# Those of a second at 60,000 a second: a program that holds the GIL for so long loses none.
_MOST_WAITING = 1 << 16


class RoundsFile(threading.Thread):
    """Writes a worker's rounds to a file. A context manager, to leave after the last round.

    The thread is no daemon, for the reason that ``EventPump`` has: it ends by itself after the main thread.

    Raises:
      ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, communicator: Communicator, rank: int) -> None:
        super().__init__(name="jaxhetero-rounds", daemon=False)
        self._communicator = communicator
        self._count = 0
        self._lost_count = 0
        self._next_view = 0
        self._stopping = threading.Event()
        communicator.keep_timeline(_MOST_WAITING)
        try:
            # Without a buffer, which a forked child would have a copy of and write again at its end.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write timeline_file {path}: {error.strerror}") from None
        self._write([{"rank": rank, "host": host_name(), "offset_us": wall_offset_us()}])

    def run(self) -> None:
        """What the thread does."""
        main = threading.main_thread()
        while main.is_alive() and not self._stopping.wait(_DRAIN_S):
            self._drain()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()
        self._drain()
        self._write([{"lost_count": self._lost_count, "metrics": self._communicator.metrics()}])
        self._file.close()

    def _drain(self) -> None:
        first, records = self._communicator.timeline(self._count)
        self._lost_count += first - self._count
        self._count = first + len(records)
        self._write(records)
        views = self._communicator.views(self._next_view)
        if views:
            self._next_view = views[-1][0] + 1
            self._write({"view": view} for view in views)

    def _write(self, lines: Iterable[Any]) -> None:
        if self._file.closed:
            return
        try:
            left = memoryview("".join(json.dumps(line) + "\n" for line in lines).encode())
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            logger.warning("the rounds in %s end here: %s", self._file.name, error.strerror)
            self._file.close()


def wall_offset_us() -> int:
    """What leads from ``time.monotonic()`` to the wall clock, in microseconds."""
    return (time.time_ns() - time.monotonic_ns()) // 1000


def join_files(target: Path, files: Mapping[str, Path]) -> None:
    """Write one trace of the rounds in ``files``, which are by the name of their worker.

    Files that are missing, empty or torn give as much as they have.
    """
    about: dict[str, Any] = {}
    write_events(target, (event for each in enumerate(files.items()) for event in _events(each, about)), about)


def _events(numbered: tuple[int, tuple[str, Path]], about: dict[str, Any]) -> Iterator[Event]:
    number, (name, path) = numbered
    lines = _read(path)
    first = next(lines, None)
    if not isinstance(first, dict):
        return
    worker = WorkerTrace(number, f"{name} (host {first['host']})", first["offset_us"])
    yield from worker.head()
    end: dict[str, Any] = {}
    for line in lines:
        if not isinstance(line, dict):
            yield from worker.round(line)
        elif "view" in line:
            yield from worker.view(line["view"])
        else:
            end = line
    about[name] = {"round_count": worker.round_count, "bucket_bytes": worker.bucket_bytes, **end}


def _read(path: Path) -> Iterator[Any]:
    """The lines of a file, up to one that is torn."""
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError):
        return
