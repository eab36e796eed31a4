"""``jaxhetero coordinator``: runs that of an elastic job until its workers have left. Imports neither jax nor numpy."""

from __future__ import annotations

import signal
from dataclasses import asdict

from jaxhetero._job.lookup import await_name
from jaxhetero.config import CoordinatorConfig
from jaxhetero.errors import from_status
from jaxhetero.launch.service import catch_signals, load_native, set_up_log
from jaxhetero.watching.native_log import EventPump, logger

# How long a signal may wait for the main thread to return from native code.
_POLL_MS = 50


def run_coordinator(config: CoordinatorConfig, log_level: str = "info") -> int:
    """Run a coordinator in this process, logging to standard error.

    Blocks until every worker has left. Must run on the main thread, because it handles signals. It keeps nothing on
    disk. If it is killed, rounds go on, and another one may be started at the same address: it learns from the workers
    how the job is.

    Args:
      config: its settings.
      log_level: "debug", "info", "warning" or "error".

    Returns:
      The exit code: 0 if every worker left in order, 128 + N after signal N.

    Raises:
      JaxheteroError: the job failed, or the port belongs to another process; see ``jaxhetero.errors``.
    """
    set_up_log(log_level)
    signals = catch_signals()
    await_name(config.coordinator, config.start_timeout_ms / 1000, lambda: bool(signals))
    server = load_native().CoordinatorServer(asdict(config))
    pump = EventPump(server)
    pump.start()
    try:
        status = server.start()
        while status[0] == "ok" and not server.wait(_POLL_MS) and not signals:
            pass
        if signals:
            logger.info("got %s; stopping", signal.Signals(signals[0]).name)
            return 128 + signals[0]
        status = status if status[0] != "ok" else server.result()
        if status[0] != "ok":
            raise from_status(*status)
        return 0
    finally:
        server.stop()
        pump.stop()
