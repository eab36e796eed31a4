"""Boxes: overlaps, coding one box relative to another, and the anchors of a feature pyramid.

A box is ``(x0, y0, x1, y1)`` in pixels. ``...`` in a shape stands for any leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.mask_rcnn.batch import Array

Weights = tuple[float, float, float, float]

# A box grows at most to a side of 1000 pixels from a stride of 16: exp of more would overflow.
_LARGEST_LOG_SCALE = math.log(1000 / 16)
_TINY = 1e-12  # keeps the overlap of two empty boxes from being no number


def areas(boxes: Array) -> jax.Array:
    """float32 ``[..., 4]`` to float32 ``[...]``."""
    return jnp.asarray((boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]))


def intersections(a: Array, b: Array) -> jax.Array:
    """The area that boxes have in common; the leading axes of both broadcast."""
    width = jnp.minimum(a[..., 2], b[..., 2]) - jnp.maximum(a[..., 0], b[..., 0])
    height = jnp.minimum(a[..., 3], b[..., 3]) - jnp.maximum(a[..., 1], b[..., 1])
    return jnp.maximum(width, 0) * jnp.maximum(height, 0)


def overlaps(a: Array, b: Array) -> jax.Array:
    """Intersection over union of every pair: float32 ``[N, 4]`` and ``[M, 4]`` to float32 ``[N, M]``, from 0 to 1."""
    a, b = a[:, None], b[None]
    common = intersections(a, b)
    return common / jnp.maximum(areas(a) + areas(b) - common, _TINY)


def generalized_overlaps(a: Array, b: Array) -> jax.Array:
    """GIoU (Rezatofighi et al., 2019) of boxes ``a`` and ``b``, one by one: ``[..., 4]`` to ``[...]``, from -1 to 1."""
    common = intersections(a, b)
    union = jnp.maximum(areas(a) + areas(b) - common, _TINY)
    hull = jnp.concatenate([jnp.minimum(a[..., :2], b[..., :2]), jnp.maximum(a[..., 2:], b[..., 2:])], axis=-1)
    return common / union - (1 - union / jnp.maximum(areas(hull), _TINY))


def _centers_and_sizes(boxes: Array) -> tuple[jax.Array, jax.Array]:
    starts, ends = jnp.asarray(boxes[..., :2]), jnp.asarray(boxes[..., 2:])
    sizes = ends - starts
    return starts + 0.5 * sizes, sizes


def encode(boxes: Array, references: Array, weights: Weights) -> jax.Array:
    """``boxes`` relative to ``references``: float32 ``[..., 4]`` each, neither of them empty.

    The result is the shift of the centre in sizes of the reference and the logarithm of the scale, ``(dx, dy, dw,
    dh)``, times ``weights``.
    """
    centers, sizes = _centers_and_sizes(boxes)
    reference_centers, reference_sizes = _centers_and_sizes(references)
    shifts = (centers - reference_centers) / reference_sizes
    return jnp.concatenate([shifts, jnp.log(sizes / reference_sizes)], axis=-1) * jnp.asarray(weights)


def decode(deltas: Array, references: Array, weights: Weights) -> jax.Array:
    """The boxes that ``deltas`` mean relative to ``references``, the inverse of ``encode``: float32 ``[..., 4]``."""
    centers, sizes = _centers_and_sizes(references)
    deltas = deltas / jnp.asarray(weights)
    centers = centers + deltas[..., :2] * sizes
    half = 0.5 * sizes * jnp.exp(jnp.minimum(deltas[..., 2:], _LARGEST_LOG_SCALE))
    return jnp.concatenate([centers - half, centers + half], axis=-1)


def clip(boxes: Array, size: Array) -> jax.Array:
    """The part of ``boxes`` (``[..., 4]``) inside of an image of ``size`` (float32 ``[2]``: height and width)."""
    height, width = size[0], size[1]
    return jnp.clip(boxes, 0, jnp.stack([width, height, width, height]))


def are_larger(boxes: Array, side: float) -> jax.Array:
    """Whether both sides of a box have at least this length: float32 ``[..., 4]`` to bool ``[...]``."""
    return jnp.all(boxes[..., 2:] - boxes[..., :2] >= side, axis=-1)


def anchors(shape: tuple[int, int], stride: int, side: float, ratios: Sequence[float]) -> jax.Array:
    """The anchors of one level, float32 ``[rows * columns * ratios, 4]``: row by row, at each place one per ratio.

    ``shape`` has the rows and columns of the level. At place ``(row, column)`` the anchors have the centre
    ``(column, row) * stride``, the area ``side ** 2`` and the ratios of height to width, and whole corners.
    """
    roots = np.sqrt(np.asarray(ratios, np.float32))
    half = np.stack([side / roots, side * roots], axis=-1) / 2
    around = np.round(np.concatenate([-half, half], axis=-1))
    rows, columns = shape
    y, x = jnp.meshgrid(jnp.arange(rows) * stride, jnp.arange(columns) * stride, indexing="ij")
    centers = jnp.stack([x, y, x, y], axis=-1)
    return (centers[:, :, None] + around).reshape(-1, 4).astype(jnp.float32)
