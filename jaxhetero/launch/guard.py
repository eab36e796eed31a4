"""Ends the processes of a launcher that was killed before it could.

`jaxhetero launch` starts this file as a process of its own and keeps the other end of its standard input, where it
writes ``+PGID`` for every process group it starts and ``-PGID`` for every one that is gone. Input ends when the
launcher does, even by SIGKILL; whatever is left is then killed. PR_SET_PDEATHSIG would reach the children only, not
what they started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Kill what the launcher has left running when its end of our standard input closes."""
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
