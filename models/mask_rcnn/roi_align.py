"""RoIAlign (He et al., 2017): the features inside of a box, resampled to a small square, from any level of a pyramid.

One gather over all levels laid end to end serves all boxes, whatever their levels, so no shape depends on the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.mask_rcnn.batch import Array
from models.mask_rcnn.boxes import areas

_EPSILON = 1e-6  # a box of exactly the canonical size must not fall a level short


def pyramid_levels(
    boxes: Array, level_count: int, *, canonical_size: float = 224, canonical_level: int = 2
) -> jax.Array:
    """The level for each box, from 0, the finest: float32 ``[..., 4]`` to int32 ``[...]``.

    A box of the canonical size goes to the canonical level, one of half the size to the level below (Lin et al., 2017).
    """
    sides = jnp.sqrt(jnp.maximum(areas(boxes), 0))
    level = canonical_level + jnp.floor(jnp.log2(sides / canonical_size + _EPSILON))
    return jnp.clip(level, 0, level_count - 1).astype(jnp.int32)


def roi_align(
    pyramid: Sequence[jax.Array],
    strides: Sequence[float],
    boxes: Array,
    images: Array,
    levels: Array | None = None,
    *,
    size: int,
    aligned: bool,
    ratio: int = 2,
) -> jax.Array:
    """The features of N boxes: float32 ``[N, size, size, channels]``.

    Each box is cut into ``size x size`` bins. A bin's value is the mean of ``ratio x ratio`` bilinear samples. Samples
    more than one place outside of the map count as 0. The gradient reaches the pyramid, not the boxes.

    Args:
      pyramid: the levels, ``[images, rows, columns, channels]`` each.
      strides: pixels of the image between two places of each level.
      boxes: float32 ``[N, 4]``, in pixels of the image.
      images: int32 ``[N]``, the image of each box.
      levels: int32 ``[N]``, the level of each box. Without it, 0.
      aligned: put the sample at pixel ``x`` to place ``x / stride - 0.5``, because a place stands for the middle of its
        pixels. Without it, to ``x / stride``, half a place further, and boxes are at least one place wide, as in the
        first Mask R-CNN.
    """
    taps = _taps([level.shape for level in pyramid], strides, boxes, images, levels, size, aligned, ratio)
    places = jnp.concatenate([level.reshape(-1, level.shape[-1]) for level in pyramid])
    return _weighted_sum(places, taps).reshape(len(boxes), size, size, -1)


class _Taps(NamedTuple):
    """Each of M output places is the sum of K places of the pyramid times their weights."""

    places: jax.Array
    """int32 ``[K, M]``"""
    weights: jax.Array
    """float32 ``[K, M]``"""


def _taps(
    shapes: Sequence[tuple[int, ...]],
    strides: Sequence[float],
    boxes: Array,
    images: Array,
    levels: Array | None,
    size: int,
    aligned: bool,
    ratio: int,
) -> _Taps:
    level = jnp.zeros(len(boxes), jnp.int32) if levels is None else jnp.asarray(levels)
    rows, columns = (jnp.asarray([shape[axis] for shape in shapes], jnp.int32)[level] for axis in (1, 2))
    starts = np.cumsum([0, *(math.prod(shape[:3]) for shape in shapes[:-1])])
    scaled = jnp.asarray(boxes) / jnp.asarray(strides, jnp.float32)[level][:, None] - (0.5 if aligned else 0.0)
    lengths = scaled[:, 2:] - scaled[:, :2]
    if not aligned:
        lengths = jnp.maximum(lengths, 1)
    y, y_weights = _line(scaled[:, 1], lengths[:, 1], rows, size, ratio)
    x, x_weights = _line(scaled[:, 0], lengths[:, 0], columns, size, ratio)
    first = jnp.asarray(starts, jnp.int32)[level] + images * rows * columns
    # Axes of what follows: row taps, column taps, boxes, bin rows, bin columns.
    places = first[:, None, None] + (y * columns[:, None])[:, None, :, :, None] + x[None, :, :, None, :]
    weights = y_weights[:, None, :, :, None] * x_weights[None, :, :, None, :]
    taps = (2 * ratio) ** 2
    return _Taps(places.reshape(taps, -1), weights.reshape(taps, -1))


def _line(start: jax.Array, length: jax.Array, place_count: jax.Array, size: int, ratio: int) -> tuple[jax.Array, ...]:
    """The taps of each bin along one axis, and their weights: ``[2 * ratio, N, size]`` each."""
    offsets = (np.arange(size) + (np.arange(ratio)[:, None] + 0.5) / ratio) / size
    samples = start[:, None] + offsets[:, None] * length[:, None]
    last = (place_count - 1)[:, None]
    is_inside = (samples >= -1) & (samples <= last + 1)
    samples = jnp.clip(samples, 0, last)
    # Clipped again as integers: no box, not even one that is no number, may lead outside of the memory.
    low = jnp.clip(jnp.floor(samples).astype(jnp.int32), 0, last)
    above = samples - low
    places = jnp.stack([low, jnp.minimum(low + 1, last)])
    weights = jnp.stack([1 - above, above]) * is_inside / ratio
    shape = (2 * ratio, len(start), size)
    return places.reshape(shape), weights.astype(jnp.float32).reshape(shape)


@jax.custom_vjp
def _weighted_sum(places: jax.Array, taps: _Taps) -> jax.Array:
    """``[places, channels]`` to float32 ``[M, channels]``. XLA makes one loop of it that keeps no sample in memory."""
    rows = (_rows(places, place) * weight[:, None] for place, weight in zip(*taps, strict=True))
    total: jax.Array = sum(rows, start=jnp.float32(0))
    return total


def _rows(places: jax.Array, wanted: jax.Array) -> jax.Array:
    rows: jax.Array = places.at[wanted].get(mode="promise_in_bounds")
    return rows


def _forward(places: jax.Array, taps: _Taps) -> tuple[jax.Array, tuple[jax.Array, _Taps]]:
    return _weighted_sum(places, taps), (places, taps)


def _backward(saved: tuple[jax.Array, _Taps], gradient: jax.Array) -> tuple[jax.Array, None]:
    """Adds to one array, tap after tap. Autodiff would make an array as large as the pyramid for each tap."""
    places, taps = saved

    def add(tap: jax.Array, total: jax.Array) -> jax.Array:
        return total.at[taps.places[tap]].add(gradient * taps.weights[tap][:, None], mode="promise_in_bounds")

    total = jax.lax.fori_loop(0, len(taps.places), add, jnp.zeros(places.shape, jnp.float32))
    return total.astype(places.dtype), None


_weighted_sum.defvjp(_forward, _backward)
