"""Masks of detections, which span their boxes, as masks of whole images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def paste_mask(
    mask: NDArray[Any], box: NDArray[Any], height: int, width: int, threshold: float = 0.5
) -> NDArray[np.bool_]:
    """The pixels of an image that are on an object: bool ``[height, width]``.

    Args:
      mask: probabilities, ``[side, side]``, which span the box.
      box: float ``[4]``, in pixels of the image. It may reach beyond the image.
      threshold: a pixel whose middle has at least this probability is on the object. Between the samples of the mask
        the probability is bilinear.
    """
    pasted = np.zeros((height, width), bool)
    rows, row_weights = _line(box[1], box[3], height, len(mask))
    columns, column_weights = _line(box[0], box[2], width, len(mask))
    pasted[rows, columns] = row_weights @ mask @ column_weights.T >= threshold
    return pasted


def _line(start: float, end: float, pixel_count: int, side: int) -> tuple[slice, NDArray[np.float32]]:
    """The pixels whose middle is between two ends, and each one's weights of the samples, ``[pixels, side]``."""
    first = max(0, int(np.ceil(start - 0.5)))
    last = max(first, min(pixel_count, int(np.ceil(end - 0.5))))
    middles = np.arange(first, last) + 0.5
    samples = np.clip((middles - start) / max(end - start, 1e-6) * side - 0.5, 0, side - 1)
    weights = np.maximum(0, 1 - np.abs(samples[:, None] - np.arange(side)))
    return slice(first, last), weights.astype(np.float32)
