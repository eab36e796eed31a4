"""``python -m jaxhetero.cluster.pod COMMAND...``: a worker of an elastic job in a pod that may be taken away.

A worker that gets SIGTERM leaves the job in order, and its program ends with 0. To Kubernetes its index would then be
complete, and nobody would take its place. So this exits with 143 there.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from jaxhetero.cluster.wrapped import exit_code, wrapped

_USAGE = 2


def run(command: Sequence[str]) -> int:
    """Run a command to its end, and pass SIGTERM, SIGINT and SIGHUP on. Must run on the main thread.

    Returns:
      The command's exit code, 128 + N after signal N. Of one that ends with 0 after SIGTERM it is 143.
    """
    with wrapped(command, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as (child, received):
        code = exit_code(child.wait())
    return 128 + signal.SIGTERM if code == 0 and signal.SIGTERM in received else code


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("jaxhetero.cluster.pod: no command: give what the worker runs", file=sys.stderr)
        sys.exit(_USAGE)
    sys.exit(run(sys.argv[1:]))
