from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counters:
    """What a host's network interface has carried since the lab began.

    A packet that the kernel has not yet cut to the size of the wire (segmentation offload) counts its headers once.
    """

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_packets - earlier.received_packets,
        )
