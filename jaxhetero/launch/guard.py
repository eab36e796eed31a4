"""The launcher's side of the guard, which kills the job's processes if the launcher is killed: see guard_program.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from jaxhetero.errors import InternalError


class Guard:
    """The process that kills the job's processes if the launcher is killed."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("guard_program.py")
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise InternalError(f"cannot start {sys.executable}: {error.strerror}") from None

    def watch_this_process(self) -> None:
        """Put this process's group under guard. A new child calls it before it can start other processes."""
        self._tell(b"+%d\n" % os.getpid())

    def forget(self, group: int) -> None:
        """Take a group that is gone from the guard: the system may give its number to strangers."""
        self._tell(b"-%d\n" % group)

    def close(self) -> None:
        """End the guard, which kills the groups that are left."""
        with self._popen:
            pass

    def _tell(self, line: bytes) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            os.write(self._popen.stdin.fileno(), line)
