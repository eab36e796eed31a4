"""Other algorithms for the same hosts and bytes, as lists of transfers that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxhetero import _simulator as native
from jaxhetero.errors import ConfigError, InternalError
from jaxhetero.simulator.hosts import Costs, Host, Network, make_cluster

_MOST_TRANSFER_BYTES = 2**32 - 1
# A host passes on one slice of a part while it receives the next.
_SLICES = 8


@dataclass(frozen=True)
class Moved:
    """What a simulation of transfers found."""

    time_s: float
    """From the start to the last arrival."""
    sent_bytes: tuple[float, ...]
    """By host: all that it sent, headers of packets and acknowledgements included."""
    event_count: int


@dataclass
class _Transfers:
    """A list of transfers that grows; each is known by its place."""

    made: list[native.Transfer] = field(default_factory=list)

    def add(self, sender: int, receiver: int, size_bytes: float, after: Sequence[int] = ()) -> int:
        if size_bytes > _MOST_TRANSFER_BYTES:
            raise ConfigError(f"one transfer would have {size_bytes:.0f} bytes; at most {_MOST_TRANSFER_BYTES}")
        self.made.append(native.Transfer(sender, receiver, max(1, round(size_bytes)), 0.0, after))
        return len(self.made) - 1

    def add_ring(
        self, ranks: Sequence[int], size_bytes: float, rounds: int, after: dict[int, list[int]]
    ) -> dict[int, list[int]]:
        """Each rank sends a part of the bytes to the next one, and passes on what it got, ``rounds`` times.

        ``after``: what each rank waits for. Returns the last of what each has got.
        """
        slice_bytes = size_bytes / len(ranks) / _SLICES
        slices = [{rank: after.get(rank, []) for rank in ranks}] * _SLICES
        pairs = list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
        for _ in range(rounds):
            slices = [
                {receiver: [self.add(sender, receiver, slice_bytes, got[sender])] for sender, receiver in pairs}
                for got in slices
            ]
        return {rank: [transfer for got in slices for transfer in got[rank]] for rank in ranks}

    def run(self, hosts: Sequence[Host], network: Network, costs: Costs) -> Moved:
        whole = tuple(Host((host.bytes_per_s,), host.cores, host.memory_gb_per_s, host.machine) for host in hosts)
        simulation = native.Transfers(make_cluster(whole, network), costs.to_native(), self.made)
        try:
            simulation.run()
        except RuntimeError as error:
            raise InternalError(str(error)) from error
        return Moved(max(simulation.ends_s), tuple(simulation.sent_bytes), simulation.event_count)


def simulate_ring(
    hosts: Sequence[Host], size_bytes: float, network: Network | None = None, costs: Costs | None = None
) -> Moved:
    """A ring all-reduce: each host sends a part of the bytes to the next one, ``2(n-1)`` times.

    The interfaces of a host count as one of their common rate, and its process as one strand: give the ``costs`` of a
    message divided by the number of strands that share them.

    Blocks, without the GIL.

    Raises:
      ConfigError: fewer than two hosts, or too many bytes.

    Example:
      >>> from jaxhetero.simulator import Host, simulate_ring
      >>> moved = simulate_ring([Host.of_gbits(10)] * 8, 2**26)
      >>> 1.75 < moved.time_s / (2**26 / 1.25e9) < 2.0
      True
    """
    _check(hosts)
    transfers = _Transfers()
    transfers.add_ring(range(len(hosts)), size_bytes, 2 * (len(hosts) - 1), {})
    return transfers.run(hosts, network or Network(), costs or Costs())


def simulate_tree(
    hosts: Sequence[Host],
    size_bytes: float,
    network: Network | None = None,
    costs: Costs | None = None,
    *,
    chunk_count: int = 64,
) -> Moved:
    """Two binary trees, each of which sums one half of the bytes to its root and brings the total back.

    A host that has children in one tree is a leaf of the other. Each half moves in ``chunk_count`` chunks.

    Blocks, without the GIL.

    Raises:
      ConfigError: fewer than two hosts, or too many bytes.

    Example:
      >>> from jaxhetero.simulator import Host, simulate_tree
      >>> simulate_tree([Host.of_gbits(10)] * 8, 2**26).time_s > 2**26 / 1.25e9
      True
    """
    _check(hosts)
    transfers = _Transfers()
    count = len(hosts)
    for ranks in (range(count), range(count - 1, -1, -1)):
        for _ in range(chunk_count):
            _add_tree(transfers, ranks, size_bytes / 2 / chunk_count)
    return transfers.run(hosts, network or Network(), costs or Costs())


def _add_tree(transfers: _Transfers, ranks: Sequence[int], size_bytes: float) -> None:
    """The place of a host's parent is ``(place - 1) // 2``."""
    from_children: dict[int, list[int]] = {place: [] for place in range(len(ranks))}
    for place in range(len(ranks) - 1, 0, -1):
        parent = (place - 1) // 2
        up = transfers.add(ranks[place], ranks[parent], size_bytes, from_children[place])
        from_children[parent].append(up)
    got = {0: from_children[0]}
    for place in range(1, len(ranks)):
        parent = (place - 1) // 2
        got[place] = [transfers.add(ranks[parent], ranks[place], size_bytes, got[parent])]


def simulate_hierarchy(
    hosts: Sequence[Host],
    size_bytes: float,
    group_size: int,
    network: Network | None = None,
    costs: Costs | None = None,
) -> Moved:
    """Rings in groups of hosts, such as those of one leaf, and between the groups.

    Each group scatters its sums in a ring. Then rings between the groups sum each host's part, and at last each group
    gathers the totals in a ring.

    Blocks, without the GIL.

    Raises:
      ConfigError: ``group_size`` does not divide the number of hosts, or too many bytes.

    Example:
      >>> from jaxhetero.simulator import Host, simulate_hierarchy
      >>> simulate_hierarchy([Host.of_gbits(10)] * 8, 2**26, 4).time_s > 1.7 * 2**26 / 1.25e9
      True
    """
    _check(hosts)
    if group_size < 1 or len(hosts) % group_size:
        raise ConfigError(f"group_size is {group_size}; it must divide {len(hosts)} hosts")
    transfers = _Transfers()
    groups = [range(first, first + group_size) for first in range(0, len(hosts), group_size)]
    got: dict[int, list[int]] = {}
    for group in groups:
        got |= transfers.add_ring(group, size_bytes, group_size - 1, {})
    for place in range(group_size):
        across = [group[place] for group in groups]
        if len(across) > 1:
            own = {rank: got.get(rank, []) for rank in across}
            got |= transfers.add_ring(across, size_bytes / group_size, 2 * (len(across) - 1), own)
    for group in groups:
        transfers.add_ring(group, size_bytes, group_size - 1, {rank: got.get(rank, []) for rank in group})
    return transfers.run(hosts, network or Network(), costs or Costs())


def simulate_parameter_server(
    workers: Sequence[Host],
    servers: Sequence[Host],
    tensor_bytes: Sequence[int],
    network: Network | None = None,
    costs: Costs | None = None,
    *,
    servers_of: Sequence[int] | None = None,
) -> Moved:
    """Parameter servers without balance: each tensor belongs as a whole to one server.

    A server sends a tensor's total back once it has the tensor of every worker. No server is inside a worker.
    ``servers_of`` has the number of each tensor's server; by default they take turns.

    Blocks, without the GIL.

    Raises:
      ConfigError: fewer than two workers, no servers or tensors, a tensor of no server, or too many bytes.

    Example:
      >>> from jaxhetero.simulator import Host, simulate_parameter_server
      >>> host = Host.of_gbits(10)
      >>> simulate_parameter_server([host] * 8, [host] * 8, [2**22] * 16).time_s > 2**26 / 1.25e9
      True
    """
    _check(workers)
    if not servers or not tensor_bytes:
        raise ConfigError(f"{len(servers)} servers for {len(tensor_bytes)} tensors: at least one of both")
    if servers_of is None:
        servers_of = [number % len(servers) for number in range(len(tensor_bytes))]
    if len(servers_of) != len(tensor_bytes) or not all(0 <= server < len(servers) for server in servers_of):
        raise ConfigError(
            f"servers_of has {len(servers_of)} numbers in 0..{len(servers) - 1}; there are {len(tensor_bytes)} tensors"
        )
    transfers = _Transfers()
    ranks = range(len(workers))
    for size_bytes, place in zip(tensor_bytes, servers_of, strict=True):
        server = len(workers) + place
        pushes = [transfers.add(rank, server, size_bytes) for rank in ranks]
        for rank in ranks:
            transfers.add(server, rank, size_bytes, pushes)
    return transfers.run([*workers, *servers], network or Network(), costs or Costs())


def _check(hosts: Sequence[Host]) -> None:
    if len(hosts) < 2:
        raise ConfigError(f"{len(hosts)} hosts: at least two have something to reduce")
