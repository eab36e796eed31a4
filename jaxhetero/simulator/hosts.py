"""Simulated hosts, and the network between them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxhetero import _simulator as native
from jaxhetero.errors import ConfigError

_BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class Costs:
    """The processor time that a message costs the process that sends it, and again the one that receives it.

    With the defaults, a GB that is sent and one that is received take 0.64 s in chunks of 256 KiB. Measured were 0.68 s
    for a worker and 0.55 s for a reducer (docs/performance.md, "Without a limit of the network"). What a message costs
    lies between 1.5 us, in large chunks there, and 7.6 us in the lab's small ones. A message has one chunk.
    """

    s_per_message: float = 5e-6
    """Seconds for each message: system calls, and the kernel's packets."""
    s_per_gb: float = 0.3
    """Seconds for each GB beside that: copies, and a reducer's sums."""
    wake_up_s: float = 5e-6
    """Seconds before the first message after a pause."""
    s_per_call: float = 50e-6
    """Seconds of a worker for each bucket, before its first chunk goes out: the call, and what follows it in JAX."""

    def to_native(self) -> native.Costs:
        """What the native module takes."""
        return native.Costs(
            s_per_call=self.s_per_call,
            s_per_message=self.s_per_message,
            s_per_byte=self.s_per_gb / _BYTES_PER_GB,
            wake_up_s=self.wake_up_s,
        )

    def __post_init__(self) -> None:
        if min(self.s_per_message, self.s_per_gb, self.wake_up_s, self.s_per_call) < 0:
            raise ConfigError(f"{self}: no cost is below 0 seconds")


@dataclass(frozen=True)
class Host:
    """A host of one worker or one reducer, or of both where the worker has a reducer inside."""

    interfaces: tuple[float, ...]
    """The rate of each network interface, in bytes per second each way. Headers of packets are part of these bytes."""
    cores: int = 64
    """How many strands of its processes run at once."""
    memory_gb_per_s: float = 0.0
    """How fast bytes of messages go through memory, of all strands together; 0 for no limit."""
    machine: str = ""
    """Hosts of one name share the cores and the memory of one machine, those of the first of them."""

    def __post_init__(self) -> None:
        if not self.interfaces or min(self.interfaces) <= 0:
            raise ConfigError(
                f"interfaces is {self.interfaces}; a host has one or more, of more than 0 bytes per second"
            )
        if self.cores < 1 or self.memory_gb_per_s < 0:
            raise ConfigError(f"cores is {self.cores} and memory_gb_per_s {self.memory_gb_per_s}; at least 1 and 0")

    @classmethod
    def of_gbits(cls, gbits: float, *, interface_count: int = 1, cores: int = 64) -> Host:
        """A host whose interfaces have so many Gbit/s each way together.

        Example:
          >>> from jaxhetero.simulator import Host
          >>> Host.of_gbits(100, interface_count=2).interfaces
          (6250000000.0, 6250000000.0)
        """
        return cls((gbits / interface_count * 1e9 / 8,) * interface_count, cores)

    @property
    def bytes_per_s(self) -> float:
        """Of all its interfaces."""
        return sum(self.interfaces)


@dataclass(frozen=True)
class Network:
    """What lies between the interfaces of hosts: a switch that is never full, or leaves and spines.

    The defaults are an Ethernet of packets of 1500 bytes, whose headers, checksum and gap take 90 bytes beside the 1448
    bytes of data that TCP has.
    """

    latency_s: float = 25e-6
    """One way, without the time that bytes take at the interfaces."""
    own_host_latency_s: float = 10e-6
    """Between a worker and the reducer inside it."""
    packet_bytes: int = 1448
    packet_overhead_bytes: int = 90
    ack_bytes: int = 90
    """Of an acknowledgement; a receiver sends one for every ``bytes_per_ack`` of a message, and at least one."""
    bytes_per_ack: int = 16384
    piece_bytes: int = 65536
    """What an interface sends of one message before another flow has its turn."""
    burst_bytes: float = 0.0
    """What an interface passes at once after a pause, as a token bucket does."""
    flow_gbits: float = 0.0
    """The most that one connection gets, as in a cloud; 0: as much as the interface."""
    queue_bytes: float = 0.0
    """What exceeds a queue of so many bytes is lost, and sent anew; 0: nothing is lost."""
    loss_timeout_s: float = 0.2
    """How long TCP waits for a lost packet behind which nothing comes."""
    hosts_per_leaf: int = 0
    """Hosts of one leaf switch, in the order workers, reducers; 0: one switch has all."""
    spine_count: int = 1
    uplink_gbits: float = 0.0
    """The rate from a leaf to each spine. Connections choose a spine by chance."""

    def __post_init__(self) -> None:
        if self.hosts_per_leaf and (self.uplink_gbits <= 0 or self.spine_count < 1):
            raise ConfigError("leaves need links to spines: give uplink_gbits above 0, and spine_count of at least 1")
        if min(self.packet_bytes, self.bytes_per_ack, self.piece_bytes) < 1:
            raise ConfigError(f"{self}: packets, pieces and bytes_per_ack have at least one byte")

        least_bytes = self.piece_bytes / self.payload_share + self.packet_overhead_bytes
        if 0 < self.queue_bytes < least_bytes:
            raise ConfigError(
                f"queue_bytes is {self.queue_bytes}; a piece would never pass: 0, or {least_bytes:.0f} on"
            )

    @property
    def payload_share(self) -> float:
        """The share of an interface's rate that data gets: its goodput over its rate."""
        return self.packet_bytes / (self.packet_bytes + self.packet_overhead_bytes)

    def to_native(self) -> native.Network:
        """What the native module takes."""
        network = native.Network()
        for name in (
            *("latency_s", "own_host_latency_s", "packet_bytes", "packet_overhead_bytes", "ack_bytes", "bytes_per_ack"),
            *("piece_bytes", "burst_bytes", "queue_bytes", "loss_timeout_s", "hosts_per_leaf", "spine_count"),
        ):
            setattr(network, name, getattr(self, name))
        network.flow_bytes_per_s = self.flow_gbits * 1e9 / 8
        network.uplink_bytes_per_s = self.uplink_gbits * 1e9 / 8
        return network


def make_cluster(hosts: tuple[Host, ...], network: Network) -> native.Cluster:
    """The hosts in their order, with a processor for each that shares no machine."""
    cluster = native.Cluster()
    cluster.network = network.to_native()
    machines: dict[str, int] = {}
    processor_count = 0
    for host in hosts:
        processor = machines.get(host.machine, processor_count)
        if processor == processor_count:
            cluster.add_processor(host.cores, host.memory_gb_per_s * _BYTES_PER_GB)
            processor_count += 1
        if host.machine:
            machines[host.machine] = processor
        cluster.add_host(host.interfaces, processor)
    return cluster
