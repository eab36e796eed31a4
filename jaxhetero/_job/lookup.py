"""Waits for a name that a cluster does not know yet."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from jaxhetero.config import parse_address
from jaxhetero.errors import StartTimeout
from jaxhetero.watching.native_log import logger

_RETRY_S = 0.2
_REPORT_S = 3.0


def await_name(coordinator: str, timeout_s: float, is_stopped: Callable[[], bool] = lambda: False) -> None:
    """Block until the name in the coordinator's address can be looked up, for at most ``timeout_s``.

    In Kubernetes the name of rank 0's host exists once its pod has an address. Logs every few seconds that it waits.
    Returns early once ``is_stopped``, which is asked a few times a second.

    Raises:
      StartTimeout: there is no such name by then.

    Example:
      >>> from jaxhetero._job.lookup import await_name
      >>> await_name("127.0.0.1:4000", timeout_s=1)
    """
    host, port = parse_address("coordinator", coordinator)
    start = reported = time.monotonic()
    while not is_stopped():
        try:
            socket.getaddrinfo(host, port)
            return
        except socket.gaierror as error:
            now = time.monotonic()
            if now - start > timeout_s:
                raise StartTimeout(
                    f"the name of the coordinator {coordinator} was not found in {timeout_s:g} s ({error.strerror}); "
                    "is rank 0's host there, and is the name right?"
                ) from None
            if now - reported > _REPORT_S:
                reported = now
                logger.warning("still looking for the name of the coordinator %s: %s", coordinator, error.strerror)
        time.sleep(_RETRY_S)
