"""A child process of the launcher: its signals, its end, its log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from io import FileIO
from pathlib import Path

from jaxhetero.launch.guard import Guard
from jaxhetero.launch.terminal import last_lines

COORDINATOR = "coordinator"
"""The name of the process that coordinates an elastic job."""

# In what an elastic job's coordinator logs: see membership/elastic_gates.cc.
_JOINS = re.compile(rb"rank (\d+) \([^)]*\) joins")
_TAIL_LINES = 20
_TAIL_BYTES = 1 << 16


class Process:
    """A child of the launcher, the leader of a session and process group of its own."""

    def __init__(
        self, name: str, popen: subprocess.Popen[bytes], log_path: Path, guard: Guard, failure_words: bytes = b""
    ) -> None:
        """A process that writes a line with ``failure_words`` has failed, also if its exit code is 0."""
        self.name = name
        self.popen = popen
        self.log_path = log_path
        self.ended_ns: int | None = None
        self.group_gone = False
        self._guard = guard
        self.failure = ""
        """The line with ``failure_words``, if there is one."""
        self.joined_ranks: list[int] = []
        """Of a coordinator: the workers that it has let in after the start, as it tells."""
        self._failure_words = failure_words
        self._rest = b""
        self._log: FileIO | None = log_path.open("wb", buffering=0)

    @property
    def is_worker(self) -> bool:
        """Whether it is one of the job's workers; else it is a reducer or the coordinator."""
        return self.name.startswith("worker")

    @property
    def is_coordinator(self) -> bool:
        """Whether it coordinates an elastic job."""
        return self.name == COORDINATOR

    @property
    def code(self) -> int:
        """The exit code as a shell gives it: 128 + number for a signal."""
        code = self.popen.returncode
        if code == 0 and self.failure:
            return 1
        return code if code >= 0 else 128 - code

    def reap(self) -> None:
        """Note the end of the process, if it has ended."""
        if self.ended_ns is None and self.popen.poll() is not None:
            self.ended_ns = time.monotonic_ns()
            self.send(0)

    def failed(self) -> bool:
        """Whether the process has ended with another exit code than 0, or has told of its failure."""
        return self.ended_ns is not None and self.code != 0

    def send(self, number: int) -> None:
        """Send a signal to the child and to its descendants in the group; 0 only tests whether any of them is left."""
        # Once the group is gone, the system may give its number to strangers.
        if not self.group_gone:
            try:
                os.killpg(self.popen.pid, number)
            except ProcessLookupError:
                self.group_gone = True
                self._guard.forget(self.popen.pid)
            except PermissionError:
                pass  # The child runs as another user now, whom we may send no signals.

    def log(self, data: bytes) -> str | None:
        """Append to the log file; return the error if that fails, and drop later output."""
        if self._failure_words or self.is_coordinator:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                # Behind what a program may have left of a line of its own.
                _, words, rest = line.partition(self._failure_words) if self._failure_words else (b"", b"", b"")
                if words:
                    self.failure = (words + rest).decode(errors="replace").strip()
                if self.is_coordinator:
                    self.joined_ranks += map(int, _JOINS.findall(line))
        if self._log is None:
            return None
        try:
            view = memoryview(data)
            while view:
                view = view[self._log.write(view) :]
        except OSError as error:
            self.close_log()
            return f"{self.log_path}: {error.strerror}; the log of {self.name} ends here"
        return None

    def close_log(self) -> None:
        """Close the log; later output is dropped."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def tail(self) -> list[str]:
        """The last lines of the log; none if the file was removed."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return last_lines(log.read(), _TAIL_LINES)
        return []

    def describe_end(self) -> str:
        """For people: ``worker 3 (pid 71) was killed by SIGKILL``."""
        code = self.popen.returncode
        if code == 0 and self.failure:
            return f"{self.name} (pid {self.popen.pid}) has failed: {self.failure}"
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        return f"{self.name} (pid {self.popen.pid}) {how}"


def signal_name(number: int) -> str:
    """``SIGTERM``, or ``signal 99`` where the system has no name for the number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def any_runs(groups: set[int]) -> bool:
    """Whether any process of these groups still runs.

    Signal 0 would count zombies too, and the first process of some containers never reaps orphans.
    """
    if not groups:
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group ..., where the name may hold anything, also parentheses.
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) in groups and state not in b"ZX":
                return True
    return False
