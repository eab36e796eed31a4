"""What the commands have in common that serve a job from a process of their own: reducer and coordinator."""

from __future__ import annotations

import logging
import signal
from types import FrameType, ModuleType

from jaxhetero.errors import InternalError


def set_up_log(log_level: str) -> None:
    """Log to standard error."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")


def catch_signals() -> list[int]:
    """A list that receives every signal to end this process."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal that was ignored when we started stays ignored: nohup works that way.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    return received


def load_native() -> ModuleType:
    """The native module, or ``InternalError``."""
    try:
        from jaxhetero import _native
    except ImportError as error:
        raise InternalError(f"the native module of jaxhetero cannot be loaded; install it again: {error}") from None
    return _native
