"""COCO's annotation files: the images of a part, such as train2017, and the objects on them, checked when read.

A COCO folder has ``annotations/instances_PART.json`` and the images in ``PART/``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.common.errors import DataError
from models.mask_rcnn.masks import Box, Polygons, RunLengths

ANNOTATIONS = "annotations"
# A polygon needs three points.
_FEWEST_COORDINATES = 6


@dataclass(frozen=True)
class CocoObject:
    """One annotation."""

    id: int
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

    Objects without area, and objects wholly outside of their image, are left out and counted.

    Raises:
      DataError: the part is missing or damaged, or an annotation is of an unknown image or category.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.annotation_file = folder / ANNOTATIONS / f"instances_{part}.json"
        content = _read_json(self.annotation_file)
        try:
            self.category_names: dict[int, str] = {int(entry["id"]): entry["name"] for entry in content["categories"]}
            objects = self._read_objects(content)
            self.images = self._read_images(content, objects, folder / part)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{self.annotation_file} is no COCO annotation file: {type(error).__name__}: {error}"
            ) from None
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

    def _read_images(
        self, content: Mapping[str, Any], objects: Mapping[int, list[CocoObject]], folder: Path
    ) -> list[CocoImage]:
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}, which {self.annotation_file} describes")
        present = {path.name for path in folder.iterdir()}
        images = []
        for entry in content["images"]:
            path = folder / entry["file_name"]
            if path.name not in present and not path.is_file():
                raise DataError(f"there is no file {path}, which {self.annotation_file} names")
            images.append(
                CocoImage(entry["id"], path, entry["width"], entry["height"], tuple(objects[int(entry["id"])]))
            )
        if not images:
            raise DataError(f"{self.annotation_file} has no images")
        return images

    def _read_objects(self, content: Mapping[str, Any]) -> dict[int, list[CocoObject]]:
        """The objects of each image."""
        sizes = {int(entry["id"]): (int(entry["width"]), int(entry["height"])) for entry in content["images"]}
        if len(sizes) < len(content["images"]):
            raise DataError(f"{self.annotation_file} has two images with one id")
        self.left_out: Counter[str] = Counter()
        objects: dict[int, list[CocoObject]] = {number: [] for number in sizes}
        for entry in content["annotations"]:
            where = f"annotation {entry['id']} of {self.annotation_file}"
            if entry["image_id"] not in sizes:
                raise DataError(f"{where} is on image {entry['image_id']}, which the file does not have")
            if entry["category_id"] not in self.category_names:
                raise DataError(f"{where} has the category {entry['category_id']}, which the file does not have")
            found = read_object(entry, *sizes[entry["image_id"]], where=where)
            if isinstance(found, str):
                self.left_out[found] += 1
            else:
                objects[entry["image_id"]].append(found)
        return objects


def read_object(entry: Mapping[str, Any], width: int, height: int, *, where: str) -> CocoObject | str:
    """An annotation as an object of an image of this size, or the reason to leave it out.

    Raises:
      DataError: it is damaged. The message calls it ``where``.
    """
    segmentation = _read_segmentation(entry["segmentation"], width, height, where)
    left, top, box_width, box_height = map(float, entry["bbox"])
    if not all(map(math.isfinite, (left, top, box_width, box_height))):
        raise DataError(f"{where} has the box {entry['bbox']}, which is not finite")
    box = (max(left, 0.0), max(top, 0.0), min(left + box_width, float(width)), min(top + box_height, float(height)))
    if box_width <= 0 or box_height <= 0 or not segmentation or entry.get("area", 1) <= 0:
        return "without area"
    if box[0] >= box[2] or box[1] >= box[3] or _is_outside(segmentation, width, height):
        return "outside of their image"
    return CocoObject(
        id=int(entry["id"]),
        category_id=int(entry["category_id"]),
        box=box,
        segmentation=segmentation,
        area=float(entry.get("area", box_width * box_height)),
        is_crowd=bool(entry.get("iscrowd", 0)),
    )


def _read_segmentation(found: Any, width: int, height: int, where: str) -> Polygons | RunLengths:
    """Polygons with less than three points are dropped, so the list may be empty."""
    if isinstance(found, dict):
        if list(found["size"]) != [height, width]:
            raise DataError(f"{where} has a mask of {found['size']}; its image is {[height, width]}")
        if isinstance(found["counts"], list) and sum(found["counts"]) != height * width:
            raise DataError(f"{where} has a mask of {sum(found['counts'])} pixels; its image has {height * width}")
        return dict(found)
    polygons = [np.asarray(polygon, np.float64) for polygon in found]
    for polygon in polygons:
        if polygon.ndim != 1 or len(polygon) % 2 or not np.isfinite(polygon).all():
            raise DataError(f"{where} has a polygon that is no list of x and y in turn")
    return [polygon for polygon in polygons if len(polygon) >= _FEWEST_COORDINATES]


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
    except ValueError as error:
        raise DataError(f"{path} is truncated, or no JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is no COCO annotation file: it is a JSON {type(content).__name__}")
    return content
