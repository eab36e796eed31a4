"""What this process has counted: its metrics, and the times of its latest rounds."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from jaxhetero._job.world import current
from jaxhetero.config import host_name
from jaxhetero.watching import trace
from jaxhetero.watching.rounds_file import wall_offset_us

# Counts that metrics() adds up over a worker and the reducer in its process.
_SUMMED = {"refused_count", "bad_frame_count", "checksum_mismatch_count"}


@dataclass(frozen=True)
class Metrics:
    """Counts of one worker since ``initialize()``. Names end in their unit: ``_bytes``, ``_us``, ``_count``.

    Example:
      The goodput of a training run so far, in MB/s:

      >>> metrics = jaxhetero.Metrics(sent_bytes=3_000_000, busy_us=500_000)
      >>> metrics.sent_bytes / metrics.busy_us
      6.0
    """

    sent_bytes: int = 0
    """Bytes given to the network or to shared memory, headers and handshakes included."""
    received_bytes: int = 0
    """Bytes taken from the network or from shared memory, headers and handshakes included."""
    channel_sent_bytes: int = 0
    """Part of ``sent_bytes``: what went to other workers over channels, which a pipeline uses."""
    channel_received_bytes: int = 0
    """Part of ``received_bytes``: what came from other workers over channels."""
    round_count: int = 0
    """Completed rounds; one for each bucket of each collective that ran."""
    bucket_bytes: int = 0
    """The sizes of these rounds' buckets on the wire, added up."""
    busy_us: int = 0
    """Microseconds during which at least one round was in flight."""
    view_count: int = 0
    """Changes of the members: how often a reducer, or a worker of an elastic job, was lost, left or joined after the
    start."""
    rate_change_count: int = 0
    """How often the plan has followed rates of interfaces that changed; see ``Config.measure_rates``."""
    kept_bytes: int = 0
    """Memory that holds contributions to completed rounds, in case a reducer is lost. Updated four times a second."""
    pending_count: int = 0
    """Rounds that ``jaxhetero.psum_start`` has started and no ``jaxhetero.psum_done`` has finished."""
    pending_bytes: int = 0
    """Memory for the totals of these rounds; their contributions take as much."""
    done_wait_us: int = 0
    """Microseconds that programs have waited in ``jaxhetero.psum_done``, added up over its buckets."""
    live_reducer_count: int = 0
    """Reducers that take part now."""
    live_worker_count: int = 0
    """Workers that take part now: in an elastic job some may be lost."""
    shared_connection_count: int = 0
    """Connections to reducers, and for channels, on this host that moved to shared memory."""
    lent_bytes: int = 0
    """Part of ``sent_bytes``: payloads that reducers on this host, or devices of a fabric, read in place, without a
    copy."""
    saved_bytes: int = 0
    """Bytes that this worker did not send because chunks went in a shorter code; see ``Config.compress``."""
    fabric_connection_count: int = 0
    """Connections to reducers, and for channels, that moved to a fabric; see ``Config.fabric``."""
    fabric_unknown_count: int = 0
    """Messages over a fabric that belonged to no connection: late ones, or those of strangers."""
    fabric_retry_count: int = 0
    """Messages for which the fabric had no room at first."""
    fabric_error_count: int = 0
    """Operations of the fabric that failed."""
    message_ns: int = 0
    """Nanoseconds of a core that it costs a worker to send or to receive a message, as measured at the start; 0 where
    the cores had little to do, or nothing was measured."""
    byte_ps: int = 0
    """Picoseconds that each of its bytes costs beside that."""
    refused_count: int = 0
    """Connections from processes that did not prove the job's token: strangers, port scans. This count and those below
    include the reducer in this process."""
    bad_frame_count: int = 0
    """Connections that ended because the peer broke the protocol."""
    checksum_mismatch_count: int = 0
    """Part of ``bad_frame_count``: the last frame was damaged; see ``Config.checksum`` and ``Config.encrypt``."""


class RoundTimes(NamedTuple):
    """The stages of one round on this worker, in seconds of ``time.monotonic()``.

    Example:
      >>> times = jaxhetero.RoundTimes("grads (float32[8])", 0, 32, 1.00, 1.01, 1.02, 1.05)
      >>> round(times.end_s - times.requested_s, 3)
      0.05
    """

    op: str
    """The op's name in messages, with the shapes of its bucket."""
    round: int
    bytes: int
    """The size of the bucket on the wire."""
    requested_s: float
    """The program had computed the operands."""
    first_push_s: float
    """The worker began to push the first chunk."""
    first_result_s: float
    """The first chunk of the total had arrived."""
    end_s: float
    """The whole total had arrived."""


def metrics() -> Metrics:
    """The counts of this worker so far; all zero in a world of one. Does not block.

    Raises:
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.metrics().round_count
      0
    """
    world = current()
    if world._communicator is None:
        return Metrics()
    counts = world._communicator.metrics()
    if world._reducer is not None:
        for name, count in world._reducer.metrics().items():
            if name in _SUMMED:
                counts[name] += count
    return Metrics(**{field.name: counts[field.name] for field in fields(Metrics)})


def timeline() -> list[RoundTimes]:
    """The latest rounds of this worker, at most 4096, in the order in which they ended; none in a world of one.

    Does not block.

    Raises:
      NotInitializedError: before ``initialize()``.

    Example:
      >>> jaxhetero.timeline()
      []
    """
    communicator = current()._communicator
    return [] if communicator is None else [RoundTimes(*record[:7]) for record in communicator.timeline()[1]]


def write_timeline(path: str | os.PathLike[str], *, profile: str | os.PathLike[str] | None = None) -> None:
    """Write the rounds of ``timeline()`` as a trace for https://ui.perfetto.dev.

    It has a track for each op, with its rounds and their stages, one for each reducer, with its part of each round, and
    one for the times in which rounds stood still, because a worker or a reducer was lost or came.
    ``jaxhetero launch --timeline FILE`` writes such a trace of all workers and all rounds.

    Args:
      path: the file to write, in Chrome's JSON. It is replaced as a whole or not at all.
      profile: a folder that ``jax.profiler.trace()`` has written in this process. The trace then has the events of its
        latest run too, and of the rounds those since it began, all in microseconds since then. Otherwise times are
        microseconds since 1970.

    Does not block, but for the time of writing. A world of one has no rounds.

    Raises:
      ConfigError: the file cannot be written, or there is no profile in the folder.
      NotInitializedError: before ``initialize()``.

    Example:
      >>> import json, pathlib
      >>> jaxhetero.write_timeline("rounds.json")
      >>> sorted(json.loads(pathlib.Path("rounds.json").read_text()))
      ['displayTimeUnit', 'otherData', 'traceEvents']
    """
    world = current()
    taken = trace.read_profile(Path(profile)) if profile is not None else trace.Profile(0, [])
    offset_us = wall_offset_us() - taken.start_us
    worker = trace.WorkerTrace(0, f"worker {world.rank} (host {host_name()})", offset_us)
    communicator = world._communicator
    records, views = ([], []) if communicator is None else (communicator.timeline()[1], communicator.views())
    rounds = (event for record in records if worker.begins(record) >= 0 for event in worker.round(record))
    changes = (event for view in views if worker.halted(view) >= 0 for event in worker.view(view))
    with trace.replacing(Path(path)) as part:
        trace.write_events(part, itertools.chain(worker.head(), rounds, changes, taken.events), {})
