"""The hosts of a lab on the machine's loopback interface, each with an address of its own."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import NoReturn

from lab.netlab.counters import Counters
from lab.netlab.errors import LabError
from lab.netlab.rate import Rate

_FIRST_ADDRESS = ipaddress.IPv4Address("127.77.0.2")


class Loopback:
    isolated = False

    def __init__(self, hosts: Sequence[str], reason: str) -> None:
        self._addresses = {host: str(_FIRST_ADDRESS + index) for index, host in enumerate(hosts)}
        self._reason = reason
        self.description = f"{len(hosts)} hosts on loopback, without rates: {reason}"

    def address(self, host: str) -> str:
        return self._addresses[host]

    def free_port(self, host: str) -> int:
        with socket.socket() as probe:
            probe.bind((self.address(host), 0))
            return int(probe.getsockname()[1])

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def cut(self, host: str) -> None:
        self._refuse("cut", host)

    def connect(self, host: str) -> None:
        self._refuse("restore", host)

    def set_rate(self, host: str, rate: Rate | None, nic: int | None = None) -> None:
        self._refuse("slow", host)

    def counters(self) -> dict[str, list[Counters]]:
        self._refuse("count the bytes of", " ".join(self._addresses))

    def _refuse(self, what: str, host: str) -> NoReturn:
        raise LabError(f"cannot {what} {host}: the hosts have no network interface of their own ({self._reason})")
