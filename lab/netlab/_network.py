"""The interface between a lab and its network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lab.netlab.counters import Counters
from lab.netlab.rate import Rate


class Network(Protocol):
    """There are two implementations: namespaces, and loopback, whose hosts have no interface to cut, slow or count."""

    description: str
    isolated: bool

    def address(self, host: str) -> str: ...
    def free_port(self, host: str) -> int: ...
    def command(self, host: str, command: Sequence[str]) -> list[str]: ...
    def cut(self, host: str) -> None: ...
    def connect(self, host: str) -> None: ...
    def set_rate(self, host: str, rate: Rate | None, nic: int | None = None) -> None: ...
    def counters(self) -> dict[str, list[Counters]]: ...
