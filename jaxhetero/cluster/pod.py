"""``python -m jaxhetero.cluster.pod COMMAND...``: a worker of an elastic job in a pod that may be taken away.

A worker that gets SIGTERM leaves the job in order, and its program ends with 0. To Kubernetes its index would then be
complete, and nobody would take its place. So this exits with 143 there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

_USAGE = 2


def run(command: Sequence[str]) -> int:
    """Run a command to its end, and pass SIGTERM, SIGINT and SIGHUP on. Must run on the main thread.

    Returns:
      The command's exit code, 128 + N after signal N. Of one that ends with 0 after SIGTERM it is 143.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    previous = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        child = subprocess.Popen(command)
        for number in list(received):  # those that came before there was a child
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code < 0:
        return 128 - code
    return 128 + signal.SIGTERM if code == 0 and signal.SIGTERM in received else code


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("jaxhetero.cluster.pod: no command: give what the worker runs", file=sys.stderr)
        sys.exit(_USAGE)
    sys.exit(run(sys.argv[1:]))
