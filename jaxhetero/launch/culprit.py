"""Why a job failed: which process was the first to fail by itself, and whether it would fail again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxhetero.errors import ConfigError, ReducerLost, WorkerLost
from jaxhetero.launch.process import Process

# The errors of a process that fails because another one did: the kind of the other process, and where its number is.
_LOSSES = {WorkerLost.__name__: ("worker", r"rank (\d+)"), ReducerLost.__name__: ("reducer", r"reducer (\d+)")}
# Exit codes for a wrong command line: 2 of Python, click, argparse and our own commands; 126 and 127 of a shell that
# cannot run a command.
USAGE_CODES = (2, 126, 127)
_CONFIG_ERROR = re.compile(rf"(\w+\.)*{ConfigError.__name__}: ")


def is_known(failures: Sequence[Process]) -> bool:
    """Whether any process failed for another reason than the end of another process."""
    return not all(map(_accused, failures))


def find_culprit(failures: Sequence[Process], lost: Sequence[Process]) -> Process:
    """The process whose end made the others fail, as far as exit codes and logs tell.

    The job went on without ``lost``, reducers or workers. They are the cause only if no failed process names a worker.
    """
    accused = set().union(*map(_accused, failures))
    if not is_known(failures) and not any(name.startswith("worker") for name in accused):
        failures = [*failures, *lost]

    def order(process: Process) -> tuple[bool, bool, bool, int]:
        assert process.ended_ns is not None
        killed = process.popen.returncode < 0
        return not killed, bool(_accused(process)), process.name not in accused, process.ended_ns

    return min(failures, key=order)


def find_lasting(failures: Sequence[Process]) -> str:
    """The reason of a failure that would come again after a restart; empty if there is none."""
    for process in failures:
        if process.code in USAGE_CODES:
            return f"{process.name} exited with code {process.code}, which stands for a wrong command line or setting"
        if any(map(_CONFIG_ERROR.match, process.tail())):
            return f"{process.name} raised {ConfigError.__name__}"
    return ""


def _accused(process: Process) -> set[str]:
    """The processes that ``process`` blames for its failure at the end of its log; "?" for one without a number."""
    accused = set()
    for line in process.tail():
        for word, (kind, pattern) in _LOSSES.items():
            _, found, rest = line.partition(word)
            if found:
                number = re.search(pattern, rest)
                accused.add(f"{kind} {number[1]}" if number else "?")
    # A process that is about to end may still receive the others' report of its own loss.
    return accused - {process.name}
