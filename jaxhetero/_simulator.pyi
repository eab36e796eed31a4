"""The simulator's core, as bound by xla_ffi/simulator/module.cc. jaxhetero/simulator checks what it is given.

Times are in seconds, rates in bytes per second, and hosts and processors are numbered in the order of their addition.
``run`` works without the GIL until the simulation ends, and raises RuntimeError if it stands still.
"""

from collections.abc import Sequence

class Network:
    latency_s: float
    own_host_latency_s: float
    packet_bytes: int
    packet_overhead_bytes: int
    ack_bytes: int
    bytes_per_ack: int
    piece_bytes: int
    burst_bytes: float
    flow_bytes_per_s: float
    queue_bytes: float
    loss_timeout_s: float
    hosts_per_leaf: int
    spine_count: int
    uplink_bytes_per_s: float

class Cluster:
    network: Network
    def add_processor(self, core_count: int, memory_bytes_per_s: float) -> None: ...
    def add_host(self, interfaces: Sequence[float], processor: int) -> None: ...

class Costs:
    def __init__(self, *, s_per_call: float, s_per_message: float, s_per_byte: float, wake_up_s: float) -> None: ...

class Job:
    strand_count: int
    worker_costs: Costs
    reducer_costs: Costs
    call_bytes: int
    step_count: int
    step_s: float
    slowdowns: Sequence[float]
    seed: int
    def __init__(self, worker_hosts: Sequence[int], reducer_hosts: Sequence[int], colocated_count: int) -> None: ...
    def set_shape(self, *, chunk_bytes: int, window_chunks: int, measure_rates: bool, strands: int) -> None: ...
    def add_bucket(self, count: int, dtype: int, ready_s: float, priority: int, needed_s: float) -> None:
        """A step of its own ends with a bucket whose `needed_s` is below 0."""

    def part_counts(self, cluster: Cluster) -> list[int]:
        """Into how many parts, one for each strand, the job cuts each of its buckets."""

class TwoHop:
    step_ends_s: list[float]
    """By step and rank."""
    sent_bytes: list[float]
    """By host, and of a host by interface."""
    received_bytes: list[float]
    busy_s: list[float]
    """By process: workers, dedicated reducers, reducers in workers."""
    event_count: int
    lost_count: int
    rates_text: str
    def __init__(self, cluster: Cluster, job: Job) -> None: ...
    def run(self) -> None: ...

class Transfer:
    def __init__(self, sender: int, receiver: int, bytes: int, ready_s: float, after: Sequence[int]) -> None: ...

class Transfers:
    ends_s: list[float]
    sent_bytes: list[float]
    event_count: int
    def __init__(self, cluster: Cluster, costs: Costs, transfers: Sequence[Transfer]) -> None: ...
    def run(self) -> None: ...
