"""`jaxhetero launch` for tests: how it is called, and what became of its processes. conftest.py has the fixtures."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JAXHETERO = [sys.executable, "-m", "jaxhetero"]
LAUNCH = [*JAXHETERO, "launch", "--log-dir", "logs"]
TIMEOUT_S = 60

# Any: text, or bytes with text=False.
Run = Callable[..., "subprocess.CompletedProcess[Any]"]
Start = Callable[..., "subprocess.Popen[Any]"]


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in b"ZX"


def read_pids(folder: Path, count: int) -> list[int]:
    """The process ids that ``count`` children wrote into files, once all are there."""
    wait_for(lambda: sum(path.stat().st_size > 0 for path in folder.glob("*.pid")) == count)
    return [int(path.read_text()) for path in folder.glob("*.pid")]


# A worker with a child of its own: both pids go into files.
FAMILY = "sleep 600 & echo $! > child-$JAXHETERO_RANK.pid; echo $$ > self-$JAXHETERO_RANK.pid; "
