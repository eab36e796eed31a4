"""``jaxhetero reducer``: runs one dedicated reducer until every worker has left. Imports neither jax nor numpy."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from jaxhetero._job.cores import memory_nodes, reducer_strands
from jaxhetero._job.lookup import await_name
from jaxhetero.config import ReducerConfig, rail_addresses
from jaxhetero.errors import ConfigError, JaxheteroError, from_status
from jaxhetero.launch.service import catch_signals, load_native, set_up_log
from jaxhetero.watching.exporter import Exporter
from jaxhetero.watching.native_log import EventPump, logger
from jaxhetero.watching.watched import watch_reducer

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
      JaxheteroError: the job failed, or a port belongs to another process; see ``jaxhetero.errors``.
    """
    set_up_log(log_level)
    signals = catch_signals()
    await_name(config.coordinator, config.start_timeout_ms / 1000, lambda: bool(signals))
    with Exporter(config) as exporter:
        return _serve_until_end(config, signals, exporter)


def _serve_until_end(config: ReducerConfig, signals: list[int], exporter: Exporter) -> int:
    stay = _serve(config, signals, exporter)
    is_back = False
    # One that no round has reached would be lost again, for example because a worker cannot reach it.
    while stay.lost_number is not None and stay.round_count and not signals:
        logger.warning("%s; joining it again", stay.status[1])
        is_back = True
        patience_ms = min(_RETURN_MS, config.start_timeout_ms)
        stay = _serve(replace(config, number=stay.lost_number, start_timeout_ms=patience_ms), signals, exporter)
    if signals:
        return 128 + signals[0]
    has_not_returned = is_back and stay.status[0] != "ok" and not stay.round_count
    if stay.lost_number is not None or has_not_returned:
        logger.warning("the job goes on, or has ended, without this reducer: %s", stay.status[1])
        return LOST
    _check(stay.status)
    return 0


def keep_reducer(config: ReducerConfig, restart_count: int, log_level: str = "info") -> int:
    """Run a reducer in a child process, and a new one, with the same settings, in the place of one that crashed.

    Blocks until a reducer has ended by itself, or ``restart_count + 1`` of them were killed by a signal or lost. Must
    run on the main thread of a process without other threads. Passes signals on, and ends the child if it is killed.

    Args:
      config: the settings of the reducers.
      restart_count: how often one is started anew.
      log_level: as for ``run_reducer``.

    Returns:
      The exit code of the last reducer, as for ``run_reducer``; 128 + N if signal N killed it.
    """
    set_up_log(log_level)
    signals = catch_signals()
    for attempt in range(restart_count + 1):
        parent, child = os.getpid(), os.fork()
        if child == 0:
            os._exit(_run_as_child(parent, config, log_level))
        code = _wait_for_child(child, signals)
        if signals or not (code > 128 or code == LOST) or attempt == restart_count:
            break
        how = "was lost" if code == LOST else f"was killed by {signal.Signals(code - 128).name}"
        logger.warning("this reducer %s; starting it anew, %d of at most %d times", how, attempt + 1, restart_count)
    return code


def _run_as_child(parent: int, config: ReducerConfig, log_level: str) -> int:
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be noticed
        return 128 + signal.SIGKILL
    try:
        return run_reducer(config, log_level)
    except JaxheteroError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 2 if isinstance(error, ConfigError) else 1
    except BaseException:
        logger.exception("the reducer failed")
        return 1


def _wait_for_child(child: int, signals: list[int]) -> int:
    """The exit code of the child; ``signals`` are passed on to it, those that come later as well."""
    passed_on = 0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        for number in signals[passed_on:]:
            os.kill(child, number)
        passed_on = len(signals)
        time.sleep(_POLL_MS / 1000)


def _serve(config: ReducerConfig, signals: list[int], exporter: Exporter) -> _Stay:
    """Take part in the job once, until its end, a loss or a signal."""
    server = _make_server(config)
    status = server.start()
    if status[0] != "ok":
        return _Stay(status)
    exporter.show(watch_reducer(server))
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
    logger.info("done: %s", " ".join(f"{name}={value}" for name, value in counts.items() if value) or "met nobody")
    return _Stay(server.result(), server.lost_number(), counts["round_count"])


def _make_server(config: ReducerConfig) -> ReducerServer:
    cores = {"most_strands": reducer_strands(), "memory_nodes": memory_nodes()}
    place = {"colocated_rank": -1, "more_hosts": rail_addresses(config)[1:]}
    server: ReducerServer = load_native().ReducerServer(asdict(config) | cores | place)
    return server


def _check(status: Status) -> None:
    code, message = status
    if code != "ok":
        raise from_status(code, message)
