"""Masks as COCO writes them, polygons or run lengths, and as pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from models.common.errors import DataError

Polygons = list[NDArray[np.float64]]
"""Each ``[x0, y0, x1, y1, ...]`` in pixels."""
RunLengths = dict[str, Any]
"""COCO's run lengths: ``size``, which is height and width, and ``counts``: a list of numbers, or a string with them.
The numbers are those of pixels off and on the object in turn, down the columns."""
Box = tuple[float, float, float, float]
"""The left, top, right and bottom edge, in pixels."""


def encode_mask(mask: NDArray[Any]) -> RunLengths:
    """The run lengths of a mask ``[height, width]``, for JSON."""
    encoded = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    return {"size": [int(side) for side in encoded["size"]], "counts": encoded["counts"].decode()}


def mask_pixels(segmentation: Polygons | RunLengths, height: int, width: int, *, where: str) -> NDArray[np.uint8]:
    """The mask as 0 and 1: ``[height, width]``.

    Raises:
      DataError: run lengths are damaged, or of another size. The message calls the mask ``where``.
    """
    if isinstance(segmentation, list):
        run_lengths: RunLengths = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
    else:
        run_lengths = segmentation
    lengths = read_run_lengths(run_lengths, height, width, where=where)
    values = np.arange(len(lengths), dtype=np.uint8) % 2
    return np.repeat(values, lengths).reshape(width, height).T


def read_run_lengths(mask: RunLengths, height: int, width: int, *, where: str) -> NDArray[np.int64]:
    """The numbers of pixels off and on the object in turn.

    Raises:
      DataError: run lengths are damaged, or of another size. The message calls the mask ``where``.
    """
    counts = mask.get("counts")
    try:
        lengths = np.array(_read_counts(counts) if isinstance(counts, str | bytes) else counts)
    except ValueError:  # lists of several lengths
        lengths = np.array([])
    if lengths.ndim != 1 or lengths.dtype.kind != "i" or (lengths < 0).any() or lengths.sum() != height * width:
        raise DataError(f"{where} has damaged run lengths: they are not those of {height} x {width} pixels")
    return lengths


def mask_area(segmentation: Polygons | RunLengths, height: int, width: int) -> float:
    """The number of pixels on the object."""
    if isinstance(segmentation, list):
        if not segmentation:
            return 0.0
        segmentation = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
        return float(coco_mask.area(segmentation))
    return float(read_run_lengths(segmentation, height, width, where="it")[1::2].sum())


def cropped_mask(segmentation: Polygons | RunLengths, box: Box, size: int, *, where: str) -> NDArray[np.uint8]:
    """The mask inside of ``box``, scaled to ``[size, size]``: 1 for the object, 0 for what is around it.

    Errors are those of ``mask_pixels``.
    """
    left, top, right, bottom = box
    if isinstance(segmentation, list):
        scale = np.array([size / (right - left), size / (bottom - top)])
        scaled = [((polygon.reshape(-1, 2) - (left, top)) * scale).ravel() for polygon in segmentation]
        return mask_pixels(scaled, size, size, where=where)
    photo = Image.fromarray(mask_pixels(segmentation, *segmentation["size"], where=where) * np.uint8(255))
    share = photo.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return (np.asarray(share) >= 128).astype(np.uint8)


def _read_counts(text: str | bytes) -> list[int]:
    """The numbers in COCO's string. Each is written in groups of five bits, from the third on as a difference.

    pycocotools can decode a whole mask, but warns on NumPy 2, and threads cannot ignore a warning for themselves alone.
    """
    counts: list[int] = []
    value = shift = 0
    for byte in text.encode() if isinstance(text, str) else text:
        group = byte - 48
        value |= (group & 0x1F) << shift
        shift += 5
        if not group & 0x20:  # the number's last group, whose highest bit is the sign
            if group & 0x10:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts
