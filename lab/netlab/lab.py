from __future__ import annotations

import functools
import itertools
import operator
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from lab.netlab import _cleanup
from lab.netlab._loopback import Loopback
from lab.netlab._namespaces import Namespaces, missing
from lab.netlab._network import Network
from lab.netlab.counters import Counters
from lab.netlab.errors import LabError
from lab.netlab.host import Host
from lab.netlab.rate import Rate

_serials = itertools.count()
# A host's name is also the name of an interface, which has at most 15 characters.
_HOST_NAME = r"[a-z][a-z0-9-]{0,13}"
_RESERVED = {"lo", "switch", "localhost"}


class Lab:
    """Hosts by name, each with a rate; ``None`` is no limit. A context manager: the hosts exist inside ``with``.

    Every host has ``nic_count`` interfaces of its rate: eth0, eth1, and so on. With ``loopback=True``, or if namespaces
    cannot be made, the hosts are on loopback.
    """

    def __init__(self, rates: Mapping[str, str | None], *, loopback: bool = False, nic_count: int = 1) -> None:
        for name in rates:
            if not re.fullmatch(_HOST_NAME, name) or name in _RESERVED:
                raise LabError(f"host name is {name!r}; it must be short, lower case, and not {' or '.join(_RESERVED)}")
        self.name = _cleanup.name_of(os.getpid(), next(_serials))
        self._rates = {name: None if rate is None else Rate.parse(rate) for name, rate in rates.items()}
        self._nic_count = nic_count
        self._why_loopback = "as asked" if loopback else _why_loopback()
        self._hosts: dict[str, Host] = {}
        self._network: Network | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        _cleanup.remove_stale()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(_cleanup.__file__)), self.name],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._network = self._make_network()
        except BaseException:
            self.close()
            raise
        for name, rate in self._rates.items():
            self._hosts[name] = Host(self.name, name, rate, self._network)
        return self

    def _make_network(self) -> Network:
        if self._why_loopback is not None:
            network: Network = Loopback(list(self._rates), self._why_loopback)
            print(f"netlab: {network.description}", file=sys.stderr)
            return network
        return Namespaces(self.name, self._rates, self._nic_count)

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes and remove the hosts. The guard does both, as it does if this process is killed."""
        if self._guard is None:
            return
        guard, self._guard = self._guard, None
        with guard:
            assert guard.stdin is not None
            guard.stdin.close()
        for host in self._hosts.values():
            host._reap()
        if guard.returncode != 0:
            raise LabError(f"{self.name} could not be removed: its guard ended with {guard.returncode}")

    def __getitem__(self, name: str) -> Host:
        if name not in self._hosts:
            raise LabError(f"there is no host {name!r}; there are: {' '.join(self._hosts) or 'none yet'}")
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def isolated(self) -> bool:
        """True if every host has a network interface of its own, with its rate."""
        return self._entered.isolated

    @property
    def nics(self) -> list[str]:
        """The names of the interfaces that every host has; none on loopback."""
        return [f"eth{number}" for number in range(self._nic_count)] if self.isolated else []

    @property
    def description(self) -> str:
        return self._entered.description

    def counters(self) -> dict[str, Counters]:
        """The counters of every host by name, over all its interfaces, read at one moment."""
        return {host: functools.reduce(operator.add, nics) for host, nics in self._entered.counters().items()}

    @property
    def _entered(self) -> Network:
        if self._network is None:
            raise LabError("the lab has no hosts yet: use it as `with Lab(...) as lab:`")
        return self._network


def _why_loopback() -> str | None:
    reason = missing()
    if reason is not None and os.environ.get("CI", "").lower() in ("1", "true"):
        raise LabError(f"CI needs hosts in network namespaces, and there can be none: {reason}")
    return reason
