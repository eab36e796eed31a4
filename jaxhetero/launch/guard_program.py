"""The guard: kills the processes of a launcher that was killed itself.

``jaxhetero launch`` starts this file as a process of its own, and holds the other end of its standard input. There it
writes ``+PGID`` for every process group that it starts, and ``-PGID`` for every group that is gone. Input ends when the
launcher ends, even by SIGKILL; the guard then kills the groups that are left. PR_SET_PDEATHSIG would reach children,
but not grandchildren.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Wait for the end of standard input, then kill the process groups that the launcher left running."""
    # A signal meant for the launcher (say, from `pkill jaxhetero`) must not end its guard first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
