"""A folder that the workers of one host fill once, share, and remove together.

Two locks say who may do what. The kernel releases them when a process ends, however it ends, so nobody waits for a
process that is gone.

- The *turn* is held by one process at a time, while it looks at the folder, fills it, or leaves it.
- The *users* are all who read the folder, each with a shared lock. Who holds the turn and gets the users' lock for
  itself alone knows that nobody reads the folder: what lies in it was left by processes that are gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from models.common.errors import SettingsError

TURN, USERS, JOB, PART, RECORDS = "turn.lock", "users.lock", "job", "records.part", "records"
POLL_S = 0.05
LEAVE_TIMEOUT_S = 5.0


class HostFolder:
    """One process's part in such a folder. ``job`` is the same string in all processes that may share it."""

    def __init__(self, path: Path, job: str) -> None:
        self._path = path
        self._job = job
        self._turn: int | None = None
        self._users: int | None = None

    def enter(self, fill: Callable[[Path], None], is_stopped: Callable[[], bool]) -> Path | None:
        """The filled folder, or None after ``is_stopped``. The first process fills it; the others wait for its end.

        If ``fill`` raises, or its process dies, no other process sees what it left. Call ``leave`` afterwards, also
        if this raises: until then other processes wait.

        Raises:
          SettingsError: the folder cannot be made, has other files in it, or belongs to another job.
        """
        if not self._take_turn(is_stopped):
            return None
        self._users = os.open(self._path / USERS, os.O_RDWR | os.O_CREAT, 0o600)
        records = self._path / RECORDS
        if _try_lock(self._users, fcntl.LOCK_EX):
            self._clear()
            part = self._path / PART
            part.mkdir()
            fill(part)
            (self._path / JOB).write_text(self._job, encoding="utf-8")
            part.rename(records)
        # At once: only a process that has the turn ever has this lock for itself alone.
        fcntl.flock(self._users, fcntl.LOCK_SH)
        if (self._path / JOB).read_text(encoding="utf-8") != self._job:
            raise SettingsError(f"--stage {self._path}: another job that is running has it; give another folder")
        self._drop_turn()
        return records

    def leave(self) -> None:
        """Give the folder up. The last process removes it."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        has_turn = self._turn is not None or self._take_turn(lambda: time.monotonic() > deadline, create=False)
        if has_turn:
            if self._users is None:
                self._users = os.open(self._path / USERS, os.O_RDWR | os.O_CREAT, 0o600)
            if _try_lock(self._users, fcntl.LOCK_EX):
                self._remove()
        if self._users is not None:
            os.close(self._users)
            self._users = None
        self._drop_turn()

    def _take_turn(self, give_up: Callable[[], bool], *, create: bool = True) -> bool:
        while not give_up():
            try:
                turn = self._make_turn() if create else os.open(self._path / TURN, os.O_RDWR)
            except OSError:
                if not create:
                    return False  # there is nothing to leave
                continue  # the last user has just removed the folder
            if _try_lock(turn, fcntl.LOCK_EX) and self._is_in_place(turn):
                self._turn = turn
                return True
            os.close(turn)
            time.sleep(POLL_S)
        return False

    def _make_turn(self) -> int:
        if not self._path.parent.is_dir():
            raise SettingsError(f"--stage {self._path}: there is no folder {self._path.parent}")
        try:
            # Not with exist_ok, which looks again whether it is a folder, and fails if it was removed meanwhile.
            with suppress(FileExistsError):
                self._path.mkdir(mode=0o700)
            names = sorted(path.name for path in self._path.iterdir())
            if names and TURN not in names:
                raise SettingsError(f"--stage {self._path} has other files in it, as {names[0]}: give a new folder")
            return os.open(self._path / TURN, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SettingsError(f"--stage {self._path} cannot be written: {error.strerror}") from None

    def _is_in_place(self, turn: int) -> bool:
        """Whether the lock is still the one that other processes find: the last user removes it."""
        try:
            return os.path.samestat(os.fstat(turn), (self._path / TURN).stat())
        except FileNotFoundError:
            return False

    def _drop_turn(self) -> None:
        if self._turn is not None:
            os.close(self._turn)
            self._turn = None

    def _clear(self) -> None:
        for name in (PART, RECORDS):
            if (self._path / name).exists():
                shutil.rmtree(self._path / name)
        (self._path / JOB).unlink(missing_ok=True)

    def _remove(self) -> None:
        for name in (PART, RECORDS):
            shutil.rmtree(self._path / name, ignore_errors=True)
        # The turn last: a folder that has files and no turn is taken for one of somebody else.
        for name in (JOB, USERS, TURN):
            (self._path / name).unlink(missing_ok=True)
        # It stays if another process has just come, or if the folder above is not ours to change.
        with suppress(OSError):
            self._path.rmdir()


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
