"""``--stage FOLDER``: training data is copied once a host, and read from there by all workers of the host."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import jax
import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.filesize import decimal

import jaxhetero
from models.common.errors import DataError, SettingsError, TrainerError
from models.common.host_folder import HostFolder
from models.common.progress import CopyProgress
from models.common.room import find_room
from models.common.source import Source, SourceFile

StageFolder = Annotated[
    Path | None,
    tyro.conf.arg(
        help="Copy the data once a host into this folder, such as /dev/shm/train, read it there, and remove it at the "
        "end. The folder must be new, or empty."
    ),
]
"""The type of the option ``--stage``."""

COPY_THREADS = 8
# How often the workers tell each other how far they are. A round with a worker that is late would time out otherwise.
SHARE_S = 0.5
STALL_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 3.0


@contextmanager
def staged(data: str | None, stage: Path | None, prefixes: tuple[str, ...], console: Console) -> Iterator[Path | None]:
    """The folder to read ``data`` from: its copy in ``stage``, or ``data`` itself if ``stage`` is None.

    Call it on every worker after ``jaxhetero.initialize()``. It blocks until the data is there on every host. The last
    worker of a host to leave the block removes the copy.

    ``prefixes`` are the beginnings of the names of the files and folders in ``data`` that are needed.

    Raises:
      SettingsError: ``stage`` cannot be used, or nothing can read ``data``.
      DataError: ``data`` is missing, damaged, changes or ends while it is copied, or does not fit. It is raised on
        every worker.
    """
    if stage is None:
        if data is not None and "://" in data:
            raise SettingsError(f"--data {data} is no folder of this host: give --stage FOLDER as well, to copy it")
        yield None if data is None else Path(data)
        return
    if data is None:
        raise SettingsError("--stage needs --data, the folder or URL to copy from")
    with _sigterm_as_ctrl_c():
        staging = _Staging(stage, data, prefixes)
        try:
            yield staging.finish(console)
        finally:
            staging.leave()


class _Stopped(TrainerError):
    """The copy is not wanted any more."""


class _Staging:
    """Copies the data on a thread, so that the worker answers the others and Ctrl-C meanwhile."""

    def __init__(self, stage: Path, data: str, prefixes: tuple[str, ...]) -> None:
        job: NDArray[np.uint32] = np.asarray(jaxhetero.broadcast(np.frombuffer(os.urandom(16), np.uint32)))
        self._host_folder = HostFolder(stage.resolve(), job.tobytes().hex())
        self._stage, self._data, self._prefixes = stage, data, prefixes
        self._copied_bytes = self._total_bytes = 0
        self._is_copying = False
        self._moved_at = time.monotonic()
        self._counting = threading.Lock()
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._folder: Path | None = None
        self._thread = threading.Thread(target=self._run, name="staging", daemon=True)
        self._thread.start()

    def finish(self, console: Console) -> Path | None:
        """Wait until all workers have their data. Rank 0 shows how far they are.

        Raises:
          TrainerError: a worker has failed; on that worker, the reason.
        """
        with CopyProgress(console, visible=jaxhetero.rank() == 0) as progress:
            while True:
                self._ended.wait(SHARE_S)
                waiting, failed, host_count, copied, total = np.asarray(_sum_over_workers(self._figures())).tolist()
                progress.update(copied, total, round(host_count))
                # Only what all workers know decides: so all leave after the same round.
                if failed:
                    raise self._error or self._another_failed()
                if not waiting:
                    return self._folder

    def leave(self) -> None:
        """Stop the copy if it is not complete, and give the host's folder up."""
        self._stop.set()
        # A file system that does not answer must not keep the worker.
        self._thread.join(STOP_TIMEOUT_S)
        self._host_folder.leave()

    def _another_failed(self) -> DataError:
        """Wait for the end of the worker that has failed, so that the error names it."""
        self._stop.set()
        reason = ""
        try:
            jaxhetero.barrier()
        except RuntimeError as error:  # a JaxheteroError, or what XLA makes of one
            reason = f": {error}"
        return DataError(f"another worker could not stage its data, and its own message says why{reason}")

    def _figures(self) -> NDArray[np.float32]:
        is_stalled = self._is_copying and time.monotonic() - self._moved_at > STALL_TIMEOUT_S
        if is_stalled and not self._ended.is_set():
            self._error = DataError(f"no byte came from {self._data} for {STALL_TIMEOUT_S:.0f} s")
        # In this order: the thread sets its error before it ends.
        waiting = not self._ended.is_set()
        failed = self._error is not None
        return np.array([waiting, failed, self._is_copying, self._copied_bytes, self._total_bytes], np.float32)

    def _run(self) -> None:
        try:
            self._folder = self._host_folder.enter(self._fill, self._stop.is_set)
        except OSError as error:
            self._error = self._error or DataError(f"--stage {self._stage}: {error}")
        except Exception as error:
            self._error = self._error or error
        self._ended.set()

    def _fill(self, target: Path) -> None:
        self._moved_at, self._is_copying = time.monotonic(), True
        source = Source(self._data, self._prefixes)
        files = source.list()
        self._total_bytes = sum(file.size_bytes for file in files)
        room, limit = find_room(target)
        if self._total_bytes > room:
            raise DataError(
                f"{self._data} has {decimal(self._total_bytes)} to stage, and only {decimal(room)} are {limit}: give "
                "--stage a folder with more room, or leave it out"
            )
        self._copy(source, files, target)

    def _copy(self, source: Source, files: Sequence[SourceFile], target: Path) -> None:
        errors: list[Exception] = []
        left = iter(files)

        def copy_files() -> None:
            try:
                while file := self._next(left):
                    source.copy(file, target / file.name, self._count)
            except Exception as error:
                errors.append(error)
                self._stop.set()

        threads = [threading.Thread(target=copy_files, daemon=True) for _ in range(min(COPY_THREADS, len(files)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _next(self, left: Iterator[SourceFile]) -> SourceFile | None:
        self._check_stop()
        with self._counting:
            return next(left, None)

    def _count(self, size_bytes: int) -> None:
        self._check_stop()
        with self._counting:
            self._copied_bytes += size_bytes
            self._moved_at = time.monotonic()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _Stopped("the copy was stopped")


@jax.jit
def _sum_over_workers(figures: jax.Array) -> jax.Array:
    total: jax.Array = jaxhetero.psum(figures, name="staging")
    return total


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """A launcher stops a worker by SIGTERM, which would end it without removing the copy.

    Only the main thread can handle signals. In another one, such as Ray Train's, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
