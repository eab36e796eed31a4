"""A command inside of another program, which passes signals on to it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def wrapped(command: Sequence[str], *numbers: int) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start a command, and pass it these signals as long as the block runs, those before its start included.

    Gives the process, and a list to which each signal that comes is added. Must run on the main thread, because it
    handles signals.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        child = subprocess.Popen(command)
        for number in list(received):  # those that came before there was a child
            child.send_signal(number)
        yield child, received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_code(returncode: int) -> int:
    """That of a shell: 128 + N after signal N."""
    return 128 - returncode if returncode < 0 else returncode
