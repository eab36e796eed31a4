"""How much a folder can take, also where its files are memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_CGROUPS = Path("/sys/fs/cgroup")


def find_room(folder: Path) -> tuple[int, str]:
    """The bytes that ``folder`` can take, and what limits them.

    A RAM-backed file system may promise more than there is: what is written there counts as memory of this process.
    """
    limits = [(shutil.disk_usage(folder).free, f"free in the file system of {folder}")]
    if _kind(folder) in MEMORY_FILE_SYSTEMS:
        limits.append((psutil.virtual_memory().available, "available in the memory of this host"))
        limits += [(room, "left of the memory that this process's cgroup may use") for room in cgroup_rooms()]
    return min(limits)


def _kind(folder: Path) -> str:
    """The type of the folder's file system, such as ``tmpfs``."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""


def cgroup_rooms(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What is left of each limit on this process's memory: of its cgroup (version 2) and of those around it.

    Pages of files that nobody uses do not count, since the kernel drops them first.
    """
    names = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    for name in names:
        group = root / name
        for folder in (group, *group.parents):
            limit = folder / "memory.max"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
                yield max(0, int(text) - used)
            if folder == root:
                break
