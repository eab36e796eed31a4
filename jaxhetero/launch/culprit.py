"""Why a job failed: which of its processes was the first to fail by itself, and whether it would do so again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxhetero.errors import ConfigError, ReducerLost, WorkerLost
from jaxhetero.launch.process import Process

# What a process says when it fails because another one did, and the pattern that tells which.
_LOSSES = {WorkerLost.__name__: ("worker", r"rank (\d+)"), ReducerLost.__name__: ("reducer", r"reducer (\d+)")}
# For a wrong command line: of Python, click, argparse and our own commands; of a shell that cannot run a command.
_USAGE_CODES = (2, 126, 127)
_CONFIG_ERROR = re.compile(rf"(\w+\.)*{ConfigError.__name__}: ")


def is_known(failures: Sequence[Process]) -> bool:
    """Whether any of them failed for another reason than somebody else's end."""
    return not all(map(_accused, failures))


def find_culprit(failures: Sequence[Process], lost_reducers: Sequence[Process]) -> Process:
    """The process whose end made the others fail, as far as their ends and last words tell.

    The job went on without ``lost_reducers``. They are the cause only where nobody names anything else than reducers.
    """
    accused = set().union(*map(_accused, failures))
    if not is_known(failures) and not any(name.startswith("worker") for name in accused):
        failures = [*failures, *lost_reducers]

    def order(process: Process) -> tuple[bool, bool, bool, int]:
        assert process.ended_ns is not None
        killed = process.popen.returncode < 0
        return not killed, bool(_accused(process)), process.name not in accused, process.ended_ns

    return min(failures, key=order)


def find_lasting(failures: Sequence[Process]) -> str:
    """What one of them failed for that a restart would meet again; empty if there is no such thing."""
    for process in failures:
        if process.code in _USAGE_CODES:
            return f"{process.name} exited with code {process.code}, which stands for a wrong command line or setting"
        if any(map(_CONFIG_ERROR.match, process.tail())):
            return f"{process.name} raised {ConfigError.__name__}"
    return ""


def _accused(process: Process) -> set[str]:
    """The other processes that it failed for, by its own last words; "?" for one that they do not name."""
    accused = set()
    for line in process.tail():
        for word, (kind, pattern) in _LOSSES.items():
            _, found, rest = line.partition(word)
            if found:
                number = re.search(pattern, rest)
                accused.add(f"{kind} {number[1]}" if number else "?")
    # The survivors' words for an end may reach the one that ended before it is gone.
    return accused - {process.name}
