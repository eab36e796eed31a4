"""The times at which a train step's gradients are ready, and the time of a step with an ideal all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp

from bench.accelerator.profiles import Profile
from bench.harness.errors import BenchError
from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES, make_buckets

_ITEM_BYTES = 4
_FORWARD_SHARE = 1 / 3
_BISECTIONS = 60


@dataclass(frozen=True)
class Bucket:
    count: int
    """The elements of all its arrays, float32."""
    ready_s: float
    """Seconds from the start of the step until the last gradient is computed."""

    @property
    def bytes(self) -> int:
        return _ITEM_BYTES * self.count


def make_schedule(
    profile: Profile, size_scale: float, time_scale: float, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> list[Bucket]:
    """Gradients in buckets as ``jaxhetero.psum`` makes them, in the order of the backward pass.

    ``size_scale`` scales arrays, buckets and times alike, so that the times of the accelerator and of the network keep
    their proportion. ``time_scale`` scales only the times.
    """
    step_s = profile.step_s * size_scale * time_scale
    total = sum(layer.multiply_adds for layer in profile.layers)
    arrays, ready_s, left = [], [], total
    for layer in profile.layers:
        # The backward pass starts at the last layer, so this layer and all layers after it are done.
        done_share = left / total
        left -= layer.multiply_adds
        for count in layer.parameter_counts:
            arrays.append(jax.ShapeDtypeStruct((max(1, round(count * size_scale)),), jnp.float32))
            ready_s.append(step_s * (_FORWARD_SHARE + (1 - _FORWARD_SHARE) * done_share))
    buckets = make_buckets(arrays, max(1, round(bucket_bytes * size_scale)))
    return [
        Bucket(sum(arrays[index].size for index in bucket), max(ready_s[index] for index in bucket))
        for bucket in buckets
    ]


def ideal_step_s(schedule: list[Bucket], s_per_byte: float) -> float:
    """The time of a step with ideal all-reduces. Each starts once its bucket is ready and the one before has ended."""
    end_s = 0.0
    for bucket in schedule:
        end_s = max(end_s, bucket.ready_s) + bucket.bytes * s_per_byte
    return end_s


def ideal_across_step_s(schedule: list[Bucket], s_per_byte: float, step_count: int = 8) -> float:
    """The time of a step whose sums go on under the next one's forward pass, with ideal all-reduces.

    The network carries the bucket of those that are ready which the forward pass needs first. The forward work of a
    bucket, half of its backward work, waits for the bucket's sum. The last of a few steps counts.
    """
    forward_s = schedule[-1].ready_s * _FORWARD_SHARE
    backward_s = [later - earlier for earlier, later in pairwise([forward_s, *(bucket.ready_s for bucket in schedule)])]
    order = range(len(schedule))
    works = [(index, backward_s[index] / 2, True) for index in reversed(order)]
    works += [(index, backward_s[index], False) for index in order]
    left = dict.fromkeys(order, 0.0)  # seconds that the network needs for each bucket
    now_s, ends_s = 0.0, []

    def carry(seconds: float) -> float:
        """Until the network has nothing to do, or so long; how long."""
        index = max((index for index in order if left[index] > 0), default=None)
        if index is None:
            return seconds
        part = min(seconds, left[index])
        left[index] = 0.0 if part == left[index] else left[index] - part
        return part

    for _ in range(step_count):
        for index, work_s, waits in works:
            while waits and left[index] > 0:
                now_s += carry(left[index])
            end_s = now_s + work_s
            while now_s < end_s:
                part = carry(end_s - now_s)
                now_s = end_s if part == end_s - now_s else now_s + part
            if not waits:
                left[index] = schedule[index].bytes * s_per_byte
        ends_s.append(now_s)
    return ends_s[-1] - ends_s[-2]


def total_bytes(schedule: list[Bucket]) -> int:
    return sum(bucket.bytes for bucket in schedule)


def time_scale_that_exposes(
    profile: Profile, size_scale: float, s_per_byte: float, share: float, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> float:
    """The ``time_scale`` with which the step exposes this share of its all-reduces, which take ``s_per_byte``."""

    def exposed_share(time_scale: float) -> float:
        schedule = make_schedule(profile, size_scale, time_scale, bucket_bytes)
        compute_s = schedule[-1].ready_s
        return (ideal_step_s(schedule, s_per_byte) - compute_s) / (total_bytes(schedule) * s_per_byte)

    low, high = 0.0, 1.0
    while exposed_share(high) > share:
        low, high = high, 2 * high
        if high > 1e6:
            raise BenchError(f"the last bucket alone exposes more than {share}")
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if exposed_share(middle) > share else (low, middle)
    return high


def ring_factor(worker_count: int) -> float:
    """The best possible time of a ring in units of S/B."""
    return 2 * (worker_count - 1) / worker_count
