"""The counts of a process as metrics of Prometheus. The only module that imports prometheus-client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import prometheus_client.openmetrics.exposition as openmetrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from jaxhetero.watching.watched import Watched

_LABELS = ("job", "role", "rank")
_BOTH = ("worker", "reducer")
_Count = Callable[[Watched, dict[str, int]], float]


def _of(name: str, scale: float = 1) -> _Count:
    return lambda _, counts: counts[name] * scale


# name, text, whose, value
_COUNTERS: list[tuple[str, str, Sequence[str], _Count]] = [
    ("sent_bytes", "Bytes sent, headers and handshakes included.", _BOTH, _of("sent_bytes")),
    ("received_bytes", "Bytes received, headers and handshakes included.", _BOTH, _of("received_bytes")),
    ("channel_sent_bytes", "Part of sent_bytes: for channels to workers.", ("worker",), _of("channel_sent_bytes")),
    ("channel_received_bytes", "Part of received_bytes, likewise.", ("worker",), _of("channel_received_bytes")),
    ("saved_bytes", "Bytes not sent because chunks went in a shorter code.", _BOTH, _of("saved_bytes")),
    ("bucket_bytes", "Sizes of the buckets of all completed rounds.", ("worker",), _of("bucket_bytes")),
    ("rounds", "Completed rounds.", _BOTH, _of("round_count")),
    ("busy_seconds", "Time with at least one round in flight.", ("worker",), _of("busy_us", 1e-6)),
    ("done_wait_seconds", "Waits for pending rounds, added up.", ("worker",), _of("done_wait_us", 1e-6)),
    ("view_changes", "How often members were lost, left or joined.", ("worker",), _of("view_count")),
    ("rate_changes", "How often the plan has followed rates that changed.", ("worker",), _of("rate_change_count")),
    ("fabric_connections", "Connections that moved to a fabric.", _BOTH, _of("fabric_connection_count")),
    ("fabric_unknown_messages", "Messages that belonged to no connection.", _BOTH, _of("fabric_unknown_count")),
    ("fabric_retries", "Messages for which the fabric had no room at first.", _BOTH, _of("fabric_retry_count")),
    ("fabric_errors", "Operations of the fabric that failed.", _BOTH, _of("fabric_error_count")),
    ("refused_connections", "Peers that did not prove the job's token.", _BOTH, _of("refused_count")),
    ("bad_frames", "Connections whose peer broke the protocol.", _BOTH, _of("bad_frame_count")),
    ("damaged_frames", "Part of bad_frames: damaged on the way.", _BOTH, _of("checksum_mismatch_count")),
]
_GAUGES: list[tuple[str, str, Sequence[str], _Count]] = [
    ("live_reducers", "Reducers that take part.", ("worker",), _of("live_reducer_count")),
    ("live_workers", "Workers that take part.", ("worker",), _of("live_worker_count")),
    ("expected_reducers", "Reducers that the job was started with.", ("worker",), lambda who, _: who.reducer_count),
    ("kept_bytes", "Memory kept in case a reducer is lost.", ("worker",), _of("kept_bytes")),
    ("pending_rounds", "Rounds started and not finished.", ("worker",), _of("pending_count")),
    ("pending_bytes", "Memory for the totals of pending rounds.", ("worker",), _of("pending_bytes")),
    ("joined_workers", "Workers connected to the reducer.", ("reducer",), _of("joined_count")),
]


class _Counts(Collector):
    """Reads the counts when it is asked for them."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._places = [
            (who, [f"{place[0]:016x}", who.role, str(place[1])]) for who in watched if (place := who.place())
        ]

    def collect(self) -> Iterator[Metric]:
        counted = [(who, labels, who.metrics()) for who, labels in self._places]
        for family, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text, roles, value in table:
                metric = family(f"jaxhetero_{name}", text, labels=_LABELS)
                for who, labels, counts in counted:
                    if who.role in roles:
                        metric.add_metric(labels, value(who, counts))
                yield metric
        yield self._late_seconds()
        yield self._slow_worker()
        yield self._slow_reducers()
        yield self._round_seconds()
        yield self._cpu_seconds()

    def _late_seconds(self) -> Metric:
        metric = GaugeMetricFamily(
            "jaxhetero_late_seconds", "For how long rounds have waited for a worker.", labels=(*_LABELS, "late_rank")
        )
        for who, labels in self._places:
            for late_rank, waited_ms in who.late_workers() if who.late_workers is not None else ():
                metric.add_metric([*labels, str(late_rank)], waited_ms / 1000)
        return metric

    def _slow_worker(self) -> Metric:
        metric = GaugeMetricFamily(
            "jaxhetero_slow_worker", "1 for a worker whose interface has become slow.", labels=(*_LABELS, "slow_rank")
        )
        for who, labels in self._places:
            if who.slow_rank is not None and (rank := who.slow_rank()) >= 0:
                metric.add_metric([*labels, str(rank)], 1)
        return metric

    def _slow_reducers(self) -> Metric:
        metric = GaugeMetricFamily(
            "jaxhetero_slow_reducer",
            "What a reducer carries whose interface is slow; 1 is the full rate.",
            labels=(*_LABELS, "slow_reducer"),
        )
        for who, labels in self._places:
            for number, percent in who.slow_reducers() if who.slow_reducers is not None else ():
                metric.add_metric([*labels, str(number)], percent / 100)
        return metric

    def _round_seconds(self) -> Metric:
        metric = HistogramMetricFamily(
            "jaxhetero_round_seconds", "From the program's request to the complete result.", labels=_LABELS
        )
        for who, labels in self._places:
            if who.round_times is not None:
                edges, counts, total = who.round_times()
                metric.add_metric(labels, list(_cumulated([*map(str, edges), "+Inf"], counts)), total)
        return metric

    def _cpu_seconds(self) -> Metric:
        """Of the process: a worker and the reducer in it share one, which is the worker's."""
        metric = CounterMetricFamily("jaxhetero_cpu_seconds", "CPU time of the process.", labels=_LABELS)
        for _, labels in self._places[:1]:
            metric.add_metric(labels, time.process_time())
        return metric


def _cumulated(edges: Iterable[str], counts: Iterable[int]) -> Iterator[tuple[str, float]]:
    total = 0
    for edge, count in zip(edges, counts, strict=True):
        total += count
        yield edge, total


def render(watched: Sequence[Watched]) -> bytes:
    """The metrics of processes as text of OpenMetrics; none of a process that has not met its job yet."""
    registry = CollectorRegistry()
    registry.register(_Counts(watched))
    return bytes(openmetrics.generate_latest(registry))  # type: ignore[no-untyped-call]
