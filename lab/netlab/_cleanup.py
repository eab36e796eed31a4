"""Ends a lab: its processes, its namespaces, its files.

Every lab has a guard: ``python _cleanup.py LAB`` as a process of its own. The guard waits for the end of its standard
input and then removes the lab. The input ends when the lab's owner closes it or dies, even by SIGKILL. Every lab ends
this way, so the code is well tested. The file imports only the standard library, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PREFIX = "jaxhetero-lab"
# In the environment of every process of a lab: LAB/HOST. Without namespaces it tells the hosts' processes apart.
MARK = "JAXHETERO_NETLAB"
NETNS = Path("/run/netns")
ETC_NETNS = Path("/etc/netns")
_PROC = Path("/proc")
_KILL_S = 10.0


def name_of(pid: int, serial: int) -> str:
    """The name of a lab. It has the owner's pid, so that a lab whose owner is dead can be recognised."""
    return f"{PREFIX}-{pid}-{serial}"


def namespace_of(lab: str, host: str) -> str:
    return f"{lab}-{host}"


def remove(lab: str) -> None:
    """Remove the whole lab. Two calls, also at the same time, do no harm."""
    kill(lab)
    for namespace in _namespaces(NETNS, lab):
        # Another process may remove it first.
        subprocess.run(["ip", "netns", "delete", namespace.name], check=False, capture_output=True)
    for folder in _namespaces(ETC_NETNS, lab):
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> None:
    """Remove the labs whose owner is dead: their guards may have been killed as well."""
    for lab in sorted(_labs()):
        pid = int(lab.split("-")[2])
        if not (_PROC / str(pid)).exists():
            remove(lab)


def kill(lab: str, host: str | None = None) -> None:
    """Kill the processes of the lab, or of one host, and their children."""
    deadline = time.monotonic() + _KILL_S
    # The next pass finds a child that is forked during this one.
    while found := list(_processes(lab, host)):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{lab}: processes {found} do not die")
        time.sleep(0.005)


def _processes(lab: str, host: str | None) -> Iterator[int]:
    inside = set()
    for path in _namespaces(NETNS, lab, host):
        # Another process may remove it after it was listed.
        with contextlib.suppress(FileNotFoundError):
            inside.add(_identity(path))
    mark = f"{MARK}={lab}/{'' if host is None else host + chr(0)}".encode()
    for process in _numbered():
        # The process may end at any moment.
        with contextlib.suppress(OSError):
            # An entry begins at the start, or after the zero byte of the entry before.
            marked = b"\0" + mark in b"\0" + (process / "environ").read_bytes()
            if marked or _identity(process / "ns" / "net") in inside:
                yield int(process.name)


def _numbered() -> Iterator[Path]:
    return (path for path in _PROC.iterdir() if path.name.isdigit() and int(path.name) != os.getpid())


def _identity(namespace: Path) -> tuple[int, int]:
    status = namespace.stat()
    return status.st_dev, status.st_ino


def _namespaces(folder: Path, lab: str, host: str | None = None) -> list[Path]:
    wanted: Callable[[str], bool] = (
        (lambda name: name == lab or name.startswith(f"{lab}-"))
        if host is None
        else (lambda name: name == namespace_of(lab, host))
    )
    return [path for path in folder.iterdir() if wanted(path.name)] if folder.is_dir() else []


def _labs() -> set[str]:
    """The names of all labs that have a namespace, a folder or a process."""
    pattern = rf"{PREFIX}-\d+-\d+"
    names = [path.name for folder in (NETNS, ETC_NETNS) if folder.is_dir() for path in folder.iterdir()]
    for process in _numbered():
        with contextlib.suppress(OSError):
            names += re.findall(rf"\0{MARK}=({pattern})/", "\0" + (process / "environ").read_text(errors="replace"))
    return {match[0] for name in names if (match := re.match(pattern, name))}


def main() -> None:
    # A signal that ends the owner must not end its guard first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    remove(sys.argv[1])


if __name__ == "__main__":
    main()
