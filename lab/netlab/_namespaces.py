"""The hosts of a lab in network namespaces.

Each host has a veth pair for each of its interfaces, which are eth0, eth1, and so on. One more namespace holds a bridge
for all eth0, one for all eth1, and so on, and the other ends of the pairs. The machine's own network has no part of a
lab, so any number of labs can use the same addresses at the same time. A token bucket on both ends of a pair limits
both directions.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from lab.netlab._cleanup import ETC_NETNS, namespace_of
from lab.netlab.counters import Counters
from lab.netlab.errors import LabError
from lab.netlab.rate import Rate

# Of the first interfaces; the others have the networks behind it.
_SUBNET = ipaddress.IPv4Network("10.77.0.0/16")
_BRIDGE = "switch"
_NIC = "eth"
# Room for a packet of 64 KiB before segmentation, its headers, and acknowledgements of the other direction. With 64 KiB
# tbf splits such packets itself, and traffic in both directions loses 2 % of 100 Mbit/s. A larger burst would only let
# small payloads exceed the rate.
_BURST_BYTES = 80 << 10
# The bucket must hold the bytes that the rate allows between two ticks of the kernel's timer.
_BURST_S = 0.001
_QUEUE_MS = 50
_FIRST_PORT = 20_000
# States of a bridge port. A disabled port drops every frame in silence; a link that is down would notify its host.
_DISABLED, _FORWARDING = 0, 3

# `ip`, `unshare` and `sh` each replace themselves by the next program, so the started process is the command's own.
_ENTER = 'printf %s "$0" >/proc/sys/kernel/hostname && exec "$@"'
# If br_netfilter is loaded, the frames of a bridge go through the rules of the firewall, unless this turns it off.
_NO_FIREWALL = "for setting in /proc/sys/net/bridge/bridge-nf-call-*; do [ ! -e $setting ] || echo 0 >$setting; done"
_PROBE = (
    "ip link add name v0 type veth peer name v1 && ip link add name s0 type bridge && ip link set dev v1 master s0 && "
    "tc qdisc add dev v0 root tbf rate 1mbit burst 64kb latency 50ms"
)


@functools.cache
def missing() -> str | None:
    """The reason why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("ip", "tc", "bridge", "unshare"):
        if shutil.which(program) is None:
            return f"there is no `{program}`: install {'util-linux' if program == 'unshare' else 'iproute2'}"
    # In a namespace without a name, which ends with the process.
    probe = subprocess.run(["unshare", "--net", "--mount", "sh", "-c", _PROBE], capture_output=True, text=True)
    return None if probe.returncode == 0 else f"the kernel refuses: {probe.stderr.strip()}"


class Namespaces:
    isolated = True

    def __init__(self, lab: str, rates: Mapping[str, Rate | None], nic_count: int = 1) -> None:
        self._lab = lab
        self._nic_count = nic_count
        self._addresses = dict(zip(rates, map(str, itertools.islice(_SUBNET.hosts(), 1, None)), strict=False))
        self._ports = itertools.count(_FIRST_PORT)
        shown = " ".join(f"{host}={rate or 'unlimited'}" for host, rate in rates.items())
        self.description = f"{len(rates)} hosts in network namespaces: {shown}"
        self._make_switch()
        for host, rate in rates.items():
            self._make_host(host)
            if rate is not None:
                self.set_rate(host, rate)

    def _make_switch(self) -> None:
        _call("ip", "netns", "add", self._lab)
        _call("ip", "netns", "exec", self._lab, "sh", "-c", _NO_FIREWALL)
        for nic in range(self._nic_count):
            bridge = [
                f"link add name {_BRIDGE}{nic} type bridge mcast_snooping 0",
                f"link set dev {_BRIDGE}{nic} addrgenmode none up",
            ]
            _batch("ip", self._lab, bridge)

    def _make_host(self, host: str) -> None:
        namespace = namespace_of(self._lab, host)
        _call("ip", "netns", "add", namespace)
        _batch("ip", namespace, ["link set lo up"])
        for number, port in enumerate(self._port_names(host)):
            nic = f"{_NIC}{number}"
            address = ipaddress.IPv4Address(self.address(host)) + number * _SUBNET.num_addresses
            # No IPv6 address, so that an idle interface stays silent.
            switch_side = [
                f"link add name {port} type veth peer name {nic} netns {namespace}",
                f"link set dev {port} addrgenmode none master {_BRIDGE}{number} up",
            ]
            host_side = [
                f"link set dev {nic} addrgenmode none",
                f"addr add {address}/{_SUBNET.prefixlen} dev {nic}",
                f"link set dev {nic} up",
            ]
            _batch("ip", self._lab, switch_side)
            _batch("ip", namespace, host_side)
        self._write_hosts_file(namespace)

    def _port_names(self, host: str) -> list[str]:
        """The switches' ends of a host's interfaces."""
        return [host, *(f"{host}.{number}" for number in range(1, self._nic_count))]

    def _write_hosts_file(self, namespace: str) -> None:
        """Write the hosts' names and addresses. `ip netns exec` mounts this file over /etc/hosts."""
        folder = ETC_NETNS / namespace
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in self._addresses.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def address(self, host: str) -> str:
        return self._addresses[host]

    def free_port(self, host: str) -> int:
        return next(self._ports)

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        enter = ["ip", "netns", "exec", namespace_of(self._lab, host), "unshare", "--uts", "sh", "-c", _ENTER]
        return [*enter, host, *command]

    def cut(self, host: str) -> None:
        self._set_port(host, _DISABLED)

    def connect(self, host: str) -> None:
        self._set_port(host, _FORWARDING)

    def _set_port(self, host: str, state: int) -> None:
        for port in self._port_names(host):
            _call("bridge", "-n", self._lab, "link", "set", "dev", port, "state", str(state))

    def set_rate(self, host: str, rate: Rate | None, nic: int | None = None) -> None:
        for number, port in enumerate(self._port_names(host)):
            if nic not in (None, number):
                continue
            for namespace, device in ((self._lab, port), (namespace_of(self._lab, host), f"{_NIC}{number}")):
                # Deleting a qdisc that does not exist is an error, so there is one to delete.
                lines = [f"qdisc replace dev {device} root {_bucket(rate)}"]
                if rate is None:
                    lines.append(f"qdisc delete dev {device} root")
                _batch("tc", namespace, lines)

    def counters(self) -> dict[str, list[Counters]]:
        """The counters of all hosts at one moment, by interface; at a bridge, a port receives what a host sends."""
        links = json.loads(_call("ip", "-n", self._lab, "-s", "-j", "link", "show", "type", "veth"))
        ports = {link["ifname"]: _read_counters(link["stats64"]) for link in links}
        return {host: [ports[port] for port in self._port_names(host)] for host in self._addresses}


def _bucket(rate: Rate | None) -> str:
    if rate is None:
        return "pfifo_fast"
    burst_bytes = max(_BURST_BYTES, round(rate.bytes_per_s * _BURST_S))
    return f"tbf rate {rate.bits_per_s}bit burst {burst_bytes}b latency {_QUEUE_MS}ms"


def _read_counters(port: dict[str, dict[str, int]]) -> Counters:
    sent, received = port["rx"], port["tx"]
    return Counters(sent["bytes"], received["bytes"], sent["packets"], received["packets"])


def _batch(program: str, namespace: str, lines: Iterable[str]) -> None:
    _call(program, "-n", namespace, "-batch", "-", given="".join(f"{line}\n" for line in lines))


def _call(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}\n{given}".rstrip())
    return done.stdout
