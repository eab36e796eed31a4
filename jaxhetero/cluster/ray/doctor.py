"""``jaxhetero doctor`` on every node of a Ray cluster at once."""

from __future__ import annotations

import io
import secrets
import socket
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from jaxhetero.config import format_address, interface_address
from jaxhetero.doctor import Visit
from jaxhetero.doctor import run_doctor as take_part


def run_doctor(
    console: Console,
    *,
    interface: str = "",
    start_timeout_s: float = Visit.start_timeout_s,
    seconds: float = Visit.seconds,
) -> int:
    """Examine all nodes of the cluster that this process is connected to, and show the findings.

    Blocks until all nodes were examined, or ``start_timeout_s`` has passed and those that came were. Takes no resources
    of Ray's.

    Args:
      console: where to show the findings.
      interface: the network interface to use on every node. Default: by the routes.
      start_timeout_s: how long to wait for all nodes.
      seconds: how long each pair of nodes sends to each other.

    Returns:
      The exit code: 0 if there is nothing to mend, else 1.

    Raises:
      JaxheteroError: no examination could take place.

    Example:
      After ``ray.init()``:

      >>> from rich.console import Console
      >>> from jaxhetero.cluster.ray import run_doctor
      >>> run_doctor(Console())  # doctest: +SKIP
      0
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    coordinator = ray.get(_on(nodes[0], _find_coordinator).remote(interface))
    visit = Visit(coordinator, secrets.token_hex(32), len(nodes), start_timeout_s=start_timeout_s, seconds=seconds)
    examinations = [_on(node, _examine).remote(visit, interface, console.width) for node in nodes]
    code: int
    code, findings = ray.get(examinations)[0]  # all have the same findings
    console.print(findings, end="", markup=False, highlight=False)
    return code


def _on(node: str, function: Any) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)


def _address(interface: str) -> str:
    return interface_address(interface) if interface else str(ray.util.get_node_ip_address())


def _find_coordinator(interface: str) -> str:
    host = _address(interface)
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
    return format_address(host, port)


def _examine(visit: Visit, interface: str, width: int) -> tuple[int, str]:
    output = io.StringIO()
    code = take_part(replace(visit, host=_address(interface)), Console(file=output, width=width))
    return code, output.getvalue()
