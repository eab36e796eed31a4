"""COCO's annotation files: the images of a part, such as train2017, and the objects on them, checked when read.

A COCO folder has ``annotations/instances_PART.json`` and the images in ``PART/``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.common.errors import DataError
from models.mask_rcnn.entries import Entry, is_finite
from models.mask_rcnn.masks import Box, Polygons, RunLengths, mask_area, read_run_lengths

ANNOTATIONS = "annotations"
# A polygon needs three points.
_FEWEST_COORDINATES = 6
# A polygon may reach beyond its image by so many times its size. What draws it needs memory for its whole length.
_FARTHEST = 2
# A box with a shorter side than this, in pixels, has no area.
_THINNEST = 0.1


@dataclass(frozen=True)
class CocoObject:
    """One annotation."""

    id: Any
    """As in the file, where it need not be unique, and may be missing."""
    category_id: int
    box: Box
    """Clipped to the image."""
    segmentation: Polygons | RunLengths
    area: float
    """Of the mask, in pixels."""
    is_crowd: bool
    """A group of objects: not learnt, and detections in it count neither as right nor as wrong."""


@dataclass(frozen=True)
class CocoImage:
    """One image of a part."""

    id: int
    path: Path
    width: int
    height: int
    objects: tuple[CocoObject, ...]

    @property
    def single_objects(self) -> list[CocoObject]:
        """The objects that are not crowds."""
        return [thing for thing in self.objects if not thing.is_crowd]


class CocoPart:
    """All images of a part, in the order of the annotation file.

    Objects without area, objects wholly outside of their image, and copies of other objects are left out and counted.

    Raises:
      DataError: the part is missing or damaged, an annotation is of an unknown image or category, or a category, an
        image or an annotation is there twice.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.annotation_file = folder / ANNOTATIONS / f"instances_{part}.json"
        content = Entry(_read_json(self.annotation_file), "", self.annotation_file)
        self.category_names = _read_categories(content)
        images: dict[int, Entry] = {}
        for entry in content.entries("images", "image"):
            if images.setdefault(entry.integer("id"), entry) is not entry:
                content.refuse(f"has two images with one id, {entry.integer('id')}")
        if not images:
            content.refuse("has no images")
        sizes = {number: _read_size(entry) for number, entry in images.items()}
        self.left_out: Counter[str] = Counter()
        objects = self._read_objects(content, sizes)
        paths = _find_files(folder / part, images)
        self.images = [CocoImage(number, paths[number], *sizes[number], tuple(objects[number])) for number in images]
        self._categories = sorted(self.category_names)
        self.class_of = {category: number for number, category in enumerate(self._categories, start=1)}
        """From a category to its class: 1 for the lowest id. 0 is the background."""

    def __str__(self) -> str:
        object_count = sum(len(image.objects) for image in self.images)
        text = f"{len(self.images):,} images, {object_count:,} objects, {len(self.category_names)} categories"
        left_out = ", ".join(f"{count:,} objects {why}" for why, count in sorted(self.left_out.items()))
        return f"{text}; left out: {left_out}" if left_out else text

    def category_of(self, number: int) -> int:
        """The category of a class of the model."""
        return self._categories[number - 1]

    def truth(self) -> dict[str, Any]:
        """The images and objects in COCO's format again, for its scoring."""
        annotations = [
            {
                "id": thing.id,
                "image_id": image.id,
                "category_id": thing.category_id,
                "bbox": _to_corner_and_size(thing.box),
                "segmentation": _to_json(thing.segmentation),
                "area": thing.area,
                "iscrowd": int(thing.is_crowd),
            }
            for image in self.images
            for thing in image.objects
        ]
        images = [{"id": image.id, "width": image.width, "height": image.height} for image in self.images]
        categories = [{"id": number, "name": name} for number, name in sorted(self.category_names.items())]
        return {"images": images, "annotations": annotations, "categories": categories}

    def _read_objects(self, content: Entry, sizes: Mapping[int, tuple[int, int]]) -> dict[int, list[CocoObject]]:
        """The objects of each image."""
        objects: dict[int, list[CocoObject]] = {number: [] for number in sizes}
        with_box: dict[tuple[Any, ...], list[Entry]] = {}
        for entry in content.entries("annotations", "annotation"):
            image, category = entry.integer("image_id"), entry.integer("category_id")
            if image not in sizes:
                entry.refuse(f"is on image {image}, which the file does not have")
            if category not in self.category_names:
                entry.refuse(f"has the category {category}, which the file does not have")
            earlier = with_box.setdefault((image, category, *entry.numbers("bbox", 4)), [])
            found = "that are copies of others" if _is_copy(entry, earlier) else read_object(entry, *sizes[image])
            earlier.append(entry)
            if isinstance(found, str):
                self.left_out[found] += 1
            else:
                objects[image].append(found)
        return objects


def _read_categories(content: Entry) -> dict[int, str]:
    names: dict[int, str] = {}
    for entry in content.entries("categories", "category"):
        number, name = entry.integer("id"), entry.text("name")
        if number in names:
            entry.refuse(f"has the id of {names[number]!r}")
        if name in names.values():
            entry.refuse(f"has the name {name!r} of another one; remove the one without annotations, or join them")
        names[number] = name
    return names


def _read_size(image: Entry) -> tuple[int, int]:
    """The width and height."""
    width, height = image.integer("width"), image.integer("height")
    if width < 1 or height < 1:
        image.refuse(f"has {width} x {height} pixels")
    return width, height


def _find_files(folder: Path, images: Mapping[int, Entry]) -> dict[int, Path]:
    """Each image's file."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}, which {next(iter(images.values())).file} describes")
    present = {path.name for path in folder.iterdir()}
    paths = {}
    for number, image in images.items():
        name = image.text("file_name")
        paths[number] = folder / name
        if name not in present and not paths[number].is_file():
            raise DataError(f"there is no file {paths[number]}, which {image.where} names")
    return paths


def _is_copy(entry: Entry, earlier: Sequence[Entry]) -> bool:
    """Whether one of the annotations with the same image, category and box has the same mask. COCO has a few such.

    Raises:
      DataError: it has the same id as well, so the file has it twice.
    """
    for other in earlier:
        if other.get("segmentation") == entry.get("segmentation"):
            if other.fields.get("id") == entry.fields.get("id"):
                entry.refuse("is there twice")
            return True
    return False


def read_object(entry: Entry, width: int, height: int) -> CocoObject | str:
    """An annotation as an object of an image of this size, or the reason to leave it out.

    Raises:
      DataError: it is damaged.
    """
    segmentation = _read_segmentation(entry, width, height)
    left, top, box_width, box_height = entry.numbers("bbox", 4)
    if box_width < 0 or box_height < 0:
        entry.refuse(f"has the bbox {entry.get('bbox')}, which is not left, top, width and height")
    box = (max(left, 0.0), max(top, 0.0), min(left + box_width, float(width)), min(top + box_height, float(height)))
    area = entry.number("area") if "area" in entry.fields else mask_area(segmentation, height, width)
    if min(box_width, box_height) < _THINNEST or not segmentation or area <= 0:
        return "without area"
    if min(box[2] - box[0], box[3] - box[1]) < _THINNEST or _is_outside(segmentation, width, height):
        return "outside of their image"
    return CocoObject(
        id=entry.fields.get("id"),
        category_id=entry.integer("category_id"),
        box=box,
        segmentation=segmentation,
        area=area,
        is_crowd=entry.flag("iscrowd"),
    )


def _read_segmentation(entry: Entry, width: int, height: int) -> Polygons | RunLengths:
    """Empty if nothing is on the object. Polygons with less than three points are dropped."""
    found = entry.get("segmentation")
    if isinstance(found, dict):
        if found.get("size") != [height, width]:
            entry.refuse(f"has a mask of {found.get('size')}; its image is {[height, width]}")
        mask = {"size": [height, width], "counts": found.get("counts")}
        return mask if read_run_lengths(mask, height, width, where=entry.where)[1::2].any() else []
    if not isinstance(found, list):
        entry.refuse("has a segmentation that is neither polygons nor run lengths")
    for polygon in found:
        if not isinstance(polygon, list) or len(polygon) % 2 or not all(map(is_finite, polygon)):
            entry.refuse("has a polygon that is no list of x and y in turn")
    polygons = [np.asarray(polygon, np.float64) for polygon in found if len(polygon) >= _FEWEST_COORDINATES]
    for polygon in polygons:
        x, y = polygon[0::2] / width, polygon[1::2] / height
        if min(x.min(), y.min()) < -_FARTHEST or max(x.max(), y.max()) > 1 + _FARTHEST:
            entry.refuse(f"has a polygon that reaches far beyond its image of {width} x {height} pixels")
    return polygons


def _is_outside(segmentation: Polygons | RunLengths, width: int, height: int) -> bool:
    """Whether no polygon reaches into the image. A mask of run lengths has the size of its image."""
    if isinstance(segmentation, dict):
        return False
    return all(
        polygon[0::2].max() <= 0
        or polygon[1::2].max() <= 0
        or polygon[0::2].min() >= width
        or polygon[1::2].min() >= height
        for polygon in segmentation
    )


def _to_corner_and_size(box: Box) -> list[float]:
    left, top, right, bottom = box
    return [left, top, right - left, bottom - top]


def _to_json(segmentation: Polygons | RunLengths) -> Any:
    return segmentation if isinstance(segmentation, dict) else [polygon.tolist() for polygon in segmentation]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is truncated, or no JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is no COCO annotation file: it is a JSON {type(content).__name__}")
    return content
