"""Which cores this process may use, and how many strands it offers to run on them."""

from __future__ import annotations

import os
from pathlib import Path

# Enough for 100 Gbit/s. Every strand has a connection to every reducer, so a job does not have more than it uses.
MOST_CHOSEN_STRANDS = 8
# A program of JAX has the other cores, but for two strands, which a job takes only if it measures that they are faster.
_WORKER_SHARE = 4
_FEW_STRANDS = 2


def usable_cores() -> int:
    """The cores that the affinity and the CPU quota (cgroup) of this process allow; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def worker_strands() -> int:
    """How many strands a worker, and a reducer inside it, can run beside its program."""
    cores = usable_cores()
    return _clamp(max(cores // _WORKER_SHARE, min(cores, _FEW_STRANDS)))


def reducer_strands() -> int:
    """How many strands a dedicated reducer can run."""
    return _clamp(usable_cores())


def memory_nodes(root: Path = Path("/sys/devices/system/node")) -> list[list[int]]:
    """The cores of each memory node (NUMA) that has some which the affinity of this process allows."""
    allowed = os.sched_getaffinity(0)
    lists = (_read(root / f"node{number}" / "cpulist") for number in _numbers(_read(root / "online")))
    nodes = (sorted(allowed.intersection(_numbers(cores))) for cores in lists)
    return [cores for cores in nodes if cores]


def _read(path: Path) -> str:
    """Its text; nothing where a container or an old kernel hides it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _numbers(text: str) -> list[int]:
    """Of a list as Linux writes it: ``0-3,8`` is 0, 1, 2, 3 and 8."""
    numbers: list[int] = []
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _clamp(strands: int) -> int:
    return max(1, min(strands, MOST_CHOSEN_STRANDS))


def _quota(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The least CPU quota, in cores, of this process's cgroup (version 2) and of those around it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return None
    folder = root / own
    quotas = [_quota_of(group) for group in (folder, *folder.parents) if group.is_relative_to(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    try:
        allowed, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if allowed == "max" else int(allowed) / int(period)
