"""A picture of what the model finds: photographs with the objects of their annotations, and below with detections."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from models.mask_rcnn.coco import CocoImage, CocoPart
from models.mask_rcnn.data import read_photo
from models.mask_rcnn.evaluate import Finding
from models.mask_rcnn.masks import Box, mask_pixels

LOWEST_SCORE = 0.5
"""Detections with a lower score are not drawn."""
TILE = 384
"""The longer side of a photograph in the picture, in pixels."""
_GAP = 8
_MASK_SHARE = 0.45

Mask = NDArray[np.uint8]


class _Shape(NamedTuple):
    mask: Mask
    box: Box
    caption: str


def draw_findings(images: Sequence[CocoImage], part: CocoPart, findings: Sequence[Finding]) -> NDArray[np.uint8]:
    """One column for each image: above with its annotations, below with its detections: uint8 ``[height, width, 3]``.

    Crowds are not drawn. ``findings`` may be those of other images as well.
    """
    rows = (
        [_draw(image, _annotated(image, part)) for image in images],
        [_draw(image, _detected(image, part, findings)) for image in images],
    )
    height = max(tile.height for tile in rows[0])
    picture = Image.new("RGB", ((TILE + _GAP) * len(images) - _GAP, 2 * height + _GAP), "white")
    for row, tiles in enumerate(rows):
        for column, tile in enumerate(tiles):
            picture.paste(tile, (column * (TILE + _GAP), row * (height + _GAP)))
    return np.asarray(picture)


def _annotated(image: CocoImage, part: CocoPart) -> Iterator[_Shape]:
    for thing in image.single_objects:
        mask = mask_pixels(thing.segmentation, image.height, image.width, where=f"annotation {thing.id}")
        yield _Shape(mask, thing.box, _name(part, thing.category_id))


def _detected(image: CocoImage, part: CocoPart, findings: Sequence[Finding]) -> Iterator[_Shape]:
    for finding in findings:
        if finding["image_id"] == image.id and finding["score"] >= LOWEST_SCORE:
            left, top, width, height = finding["bbox"]
            mask = mask_pixels(finding["segmentation"], image.height, image.width, where="a detection")
            caption = f"{_name(part, finding['category_id'])} {finding['score']:.2f}".strip()
            yield _Shape(mask, (left, top, left + width, top + height), caption)


def _name(part: CocoPart, category: int) -> str:
    """The name of a category, or nothing if there is no other category."""
    return part.category_names[category] if len(part.category_names) > 1 else ""


def _draw(image: CocoImage, shapes: Iterator[_Shape]) -> Image.Image:
    scale = TILE / max(image.width, image.height)
    size = (round(image.width * scale), round(image.height * scale))
    photo = read_photo(image).resize(size, Image.Resampling.BILINEAR)
    outlined = []
    for number, shape in enumerate(shapes):
        color = _color(number)
        share = Image.fromarray(shape.mask * np.uint8(255 * _MASK_SHARE)).resize(size, Image.Resampling.BILINEAR)
        photo.paste(color, mask=share)
        outlined.append((color, shape))
    canvas = ImageDraw.Draw(photo)
    for color, shape in outlined:
        left, top, right, bottom = (edge * scale for edge in shape.box)
        canvas.rectangle((left, top, max(right, left), max(bottom, top)), outline=color)
        canvas.text((left + 2, top + 1), shape.caption, fill="white")
    return photo


def _color(number: int) -> tuple[int, int, int]:
    """Neighbouring numbers get hues that are far from each other."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618 % 1, 0.8, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
