"""``jaxhetero reducer``: runs one dedicated reducer until every worker has left. Imports neither jax nor numpy."""

from __future__ import annotations

import logging
import signal
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

from jaxhetero._native_log import EventPump, logger
from jaxhetero.config import ReducerConfig
from jaxhetero.errors import InternalError, from_status

if TYPE_CHECKING:
    from jaxhetero._native import ReducerServer, Status

# How long a signal may wait for the main thread to return from native code.
_POLL_MS = 50
_STOP_MS = 2_000


def run_reducer(config: ReducerConfig, log_level: str = "info") -> int:
    """Run a reducer in this process, logging to standard error.

    Blocks until every worker has left. Must run on the main thread, because it handles signals.

    Args:
      config: the settings of this reducer.
      log_level: "debug", "info", "warning" or "error".

    Returns:
      The exit code: 0 if every worker left in order, 128 + N after signal N.

    Raises:
      JaxheteroError: the job failed; see ``jaxhetero.errors``.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    signals = _catch_signals()
    server = _make_server(config)
    _check(server.start())
    pump = EventPump(server)
    pump.start()
    try:
        while not server.wait(_POLL_MS) and not signals:
            pass
        if signals:
            logger.info("got %s; stopping", signal.Signals(signals[0]).name)
            server.stop()
            server.wait(_STOP_MS)
    finally:
        pump.stop()
    logger.info("done: %s", " ".join(f"{name}={value}" for name, value in server.metrics().items()))
    if signals:
        return 128 + signals[0]
    _check(server.result())
    return 0


def _catch_signals() -> list[int]:
    """A list that receives every signal to end this process."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal that was ignored when we started stays ignored: nohup works that way.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    return received


def _make_server(config: ReducerConfig) -> ReducerServer:
    try:
        from jaxhetero import _native
    except ImportError as error:
        raise InternalError(f"the native module of jaxhetero cannot be loaded; install it again: {error}") from None
    return _native.ReducerServer(asdict(config) | {"colocated_rank": -1})


def _check(status: Status) -> None:
    code, message = status
    if code != "ok":
        raise from_status(code, message)
