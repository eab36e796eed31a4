"""``python -m jaxhetero.cluster.spot COMMAND...``: a worker on a spot instance of EC2 leaves before that is taken away.

The instance's metadata tells two minutes before. The command then gets SIGTERM, on which a worker of an elastic job
leaves in order. For where nobody else looks there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException

from jaxhetero.cluster.wrapped import exit_code, wrapped

_ENDPOINT = "http://169.254.169.254"
_ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as AWS's own programs have it
_POLL_S = 5.0  # as AWS advises
_REQUEST_S = 2.0
_USAGE = 2
# The service is on the instance's own link: no proxy leads to it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read_notice(endpoint: str = _ENDPOINT) -> str:
    """What AWS is about to do to this instance, as JSON; empty while it is to stay. Takes two requests.

    Raises:
      OSError: there is no such service, as on a host that is no instance.
      HTTPException: what answers does not speak HTTP.
    """

    def request(path: str, method: str = "GET", **headers: str) -> str:
        named = {f"X-aws-ec2-metadata-{name.replace('_', '-')}": value for name, value in headers.items()}
        asked = urllib.request.Request(f"{endpoint.rstrip('/')}/latest/{path}", headers=named, method=method)
        with _OPENER.open(asked, timeout=_REQUEST_S) as answer:
            text: str = answer.read().decode()
            return text

    token = request("api/token", "PUT", token_ttl_seconds="60")
    try:
        return request("meta-data/spot/instance-action", token=token)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise


def run(command: Sequence[str], endpoint: str = _ENDPOINT, poll_s: float = _POLL_S) -> int:
    """Run a command to its end, and send it SIGTERM once there is a notice. Passes SIGTERM and SIGHUP on.

    Must run on the main thread, because it handles signals.

    Returns:
      The command's exit code, 128 + N after signal N. Of one that has left in order after a notice it is 143, so that
      what starts failed workers again starts this one, on another host.
    """
    notice = complaint = ""
    with wrapped(command, signal.SIGTERM, signal.SIGHUP) as (child, _):
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = exit_code(child.wait(poll_s))
                break
            try:
                if not notice and (notice := read_notice(endpoint)):
                    _say(f"AWS is about to take this instance away ({notice}); SIGTERM to {command[0]}")
                    child.terminate()
            except (OSError, HTTPException) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    _say(f"cannot read the notices of spot instances from {endpoint}: {complaint}")
    return 128 + signal.SIGTERM if notice and code == 0 else code


def _say(text: str) -> None:
    print(f"jaxhetero.cluster.spot: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        _say("no command: give what the worker runs, as in `python -m jaxhetero.cluster.spot python train.py`")
        sys.exit(_USAGE)
    sys.exit(run(sys.argv[1:], os.environ.get(_ENDPOINT_VARIABLE) or _ENDPOINT))
