"""The speed of Mask R-CNN's operators on this machine, beside plain versions of them.

    python -m bench.mask_rcnn_operators

RoIAlign: 7 x 7 bins of --boxes boxes, ratio 2, forward, and forward and backward. The plain version gathers all samples
at once, weights them and takes the mean, and leaves the gradient to autodiff. Non-maximum suppression: --candidates
boxes. The plain version decides one box after the other. A time is the least of --repeats; both versions are checked
for equal results first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from models.mask_rcnn.boxes import overlaps
from models.mask_rcnn.nms import non_maximum_suppression
from models.mask_rcnn.roi_align import roi_align

SIZE, RATIO = 7, 2
STRIDE = 4


@dataclass(frozen=True)
class Options:
    """The speed of Mask R-CNN's operators on this machine, beside plain versions of them."""

    rows: int = 200
    """Rows of the map; 200 and 336 are those of the finest level of an image of 800 x 1,344 pixels."""
    columns: int = 336
    channels: int = 256
    boxes: int = 128
    """Boxes of RoIAlign."""
    candidates: int = 2000
    """Boxes of non-maximum suppression."""
    repeats: int = 10


def plain_roi_align(features: jax.Array, boxes: jax.Array) -> jax.Array:
    """From ``[rows, columns, channels]`` and ``[N, 4]`` to ``[N, 7, 7, channels]``, aligned."""
    grid = (jnp.arange(SIZE * RATIO) + 0.5) / (SIZE * RATIO)
    starts, sizes = boxes[:, None, :2], (boxes[:, 2:] - boxes[:, :2])[:, None]
    samples = (starts + grid[:, None] * sizes) / STRIDE - 0.5  # [N, 14, 2]: x and y

    def bilinear(y: jax.Array, x: jax.Array) -> jax.Array:
        last_row, last_column = features.shape[0] - 1, features.shape[1] - 1
        is_inside = (y >= -1) & (y <= last_row + 1) & (x >= -1) & (x <= last_column + 1)
        y, x = jnp.clip(y, 0, last_row), jnp.clip(x, 0, last_column)
        top, left = jnp.floor(y).astype(int), jnp.floor(x).astype(int)
        bottom, right = jnp.minimum(top + 1, last_row), jnp.minimum(left + 1, last_column)
        down, along = (y - top)[..., None], (x - left)[..., None]
        value = (1 - down) * ((1 - along) * features[top, left] + along * features[top, right])
        value += down * ((1 - along) * features[bottom, left] + along * features[bottom, right])
        return value * is_inside[..., None]

    values = bilinear(samples[:, :, None, 1], samples[:, None, :, 0])
    means: jax.Array = values.reshape(len(boxes), SIZE, RATIO, SIZE, RATIO, -1).mean(axis=(2, 4))
    return means


def our_roi_align(features: jax.Array, boxes: jax.Array) -> jax.Array:
    images = jnp.zeros(len(boxes), jnp.int32)
    return roi_align([features[None]], [STRIDE], boxes, images, size=SIZE, aligned=True, ratio=RATIO)


def plain_nms(boxes: jax.Array, threshold: float) -> jax.Array:
    """One box after the other: each that stays takes away the worse ones that it overlaps."""
    table = overlaps(boxes, boxes) > threshold
    places = jnp.arange(len(boxes))

    def decide(box: jax.Array, stays: jax.Array) -> jax.Array:
        return stays & ~(stays[box] & table[box] & (places > box))

    stays: jax.Array = jax.lax.fori_loop(0, len(boxes), decide, jnp.ones(len(boxes), bool))
    return stays


def our_nms(boxes: jax.Array, threshold: float) -> jax.Array:
    return non_maximum_suppression(boxes, jnp.ones(len(boxes), bool), threshold)


def gradient(align: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The gradient of a sum of squares with respect to the features."""
    return jax.grad(lambda features, boxes: jnp.sum(align(features, boxes) ** 2))


def milliseconds(function: Any, arguments: tuple[Any, ...], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def random_boxes(rng: np.random.Generator, count: int, width: float, height: float, largest: float) -> jax.Array:
    """Boxes with their middle inside of an image, and sides of a tenth of ``largest`` to ``largest``."""
    middles, sizes = rng.uniform(0, [width, height], (count, 2)), rng.uniform(largest / 10, largest, (count, 2))
    return jnp.asarray(np.concatenate([middles - sizes / 2, middles + sizes / 2], axis=1), jnp.float32)


def main(options: Options) -> None:
    """Check, measure and print."""
    rng = np.random.default_rng(0)
    width, height = options.columns * STRIDE, options.rows * STRIDE
    features = jnp.asarray(rng.normal(size=(options.rows, options.columns, options.channels)), jnp.float32)
    regions = random_boxes(rng, options.boxes, width, height, 112)
    candidates = random_boxes(rng, options.candidates, width, height, 300)
    suppress = {"ours": partial(our_nms, threshold=0.7), "plain": partial(plain_nms, threshold=0.7)}
    cases: list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
        ("RoIAlign", our_roi_align, plain_roi_align, (features, regions)),
        ("RoIAlign with gradient", gradient(our_roi_align), gradient(plain_roi_align), (features, regions)),
        ("NMS", suppress["ours"], suppress["plain"], (candidates,)),
    ]
    print(f"{'':24}{'ours_ms':>10}{'plain_ms':>10}")
    for name, ours, plain, arguments in cases:
        ours, plain = jax.jit(ours), jax.jit(plain)
        np.testing.assert_allclose(ours(*arguments), plain(*arguments), atol=1e-3)
        times = [milliseconds(version, arguments, options.repeats) for version in (ours, plain)]
        print(f"{name:24}{times[0]:10.2f}{times[1]:10.2f}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
