from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """The traffic of a host's network interface, or of all of them, since the lab began.

    With segmentation offload the kernel counts a packet before it is cut for the wire, so its headers count once.
    """

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.sent_packets + other.sent_packets,
            self.received_packets + other.received_packets,
        )

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_packets - earlier.received_packets,
        )
