"""``jaxhetero reducer``: runs one dedicated reducer until every worker has left. Imports neither jax nor numpy."""

from __future__ import annotations

import logging
import signal
from dataclasses import asdict, dataclass, replace
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
# How long a lost reducer looks for the coordinator, which is there as long as the job is.
_RETURN_MS = 2_000

LOST = 3
"""The exit code of a reducer that the job has gone on without, and that has not come back."""


@dataclass(frozen=True)
class _Stay:
    """A reducer's part in a job, from its registration to its end."""

    status: Status
    lost_number: int | None = None
    """The number under which the job has gone on without it."""
    round_count: int = 0


def run_reducer(config: ReducerConfig, log_level: str = "info") -> int:
    """Run a reducer in this process, logging to standard error.

    Blocks until every worker has left. Must run on the main thread, because it handles signals. A reducer that was
    stopped or cut off, so that the job has gone on without it, joins the job again.

    Args:
      config: the settings of this reducer.
      log_level: "debug", "info", "warning" or "error".

    Returns:
      The exit code: 0 if every worker left in order, ``LOST`` if the job has gone on without it, 128 + N after
      signal N.

    Raises:
      JaxheteroError: the job failed; see ``jaxhetero.errors``.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    signals = _catch_signals()
    stay = _serve(config, signals)
    is_back = False
    # One that no round has reached would be lost again, for example because a worker cannot reach it.
    while stay.lost_number is not None and stay.round_count and not signals:
        logger.warning("%s; joining it again", stay.status[1])
        is_back = True
        patience_ms = min(_RETURN_MS, config.start_timeout_ms)
        stay = _serve(replace(config, number=stay.lost_number, start_timeout_ms=patience_ms), signals)
    if signals:
        return 128 + signals[0]
    has_not_returned = is_back and stay.status[0] != "ok" and not stay.round_count
    if stay.lost_number is not None or has_not_returned:
        logger.warning("the job goes on, or has ended, without this reducer: %s", stay.status[1])
        return LOST
    _check(stay.status)
    return 0


def _serve(config: ReducerConfig, signals: list[int]) -> _Stay:
    """Take part in the job once, until its end, a loss or a signal."""
    server = _make_server(config)
    status = server.start()
    if status[0] != "ok":
        return _Stay(status)
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
    counts = server.metrics()
    logger.info("done: %s", " ".join(f"{name}={value}" for name, value in counts.items()))
    return _Stay(server.result(), server.lost_number(), counts["round_count"])


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
