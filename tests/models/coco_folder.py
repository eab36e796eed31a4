"""A small COCO folder: discs and triangles on noise, as run lengths and as polygons, some crowds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

TRAIN, HELD_OUT = "train", "held-out"
SIZE = (64, 48)
"""The width and height of an image."""
DISC, TRIANGLE = 17, 3
"""Categories. Their ids are neither in order nor without gaps, as in COCO."""
CATEGORIES = [{"id": DISC, "name": "disc"}, {"id": TRIANGLE, "name": "triangle"}]


def write_coco(folder: Path, parts: dict[str, int], *, size: tuple[int, int] = SIZE) -> Path:
    """Parts by their names and numbers of images. Returns the folder."""
    for seed, (part, count) in enumerate(parts.items()):
        _write_part(folder, part, count, size, np.random.default_rng(seed))
    return folder


def _write_part(folder: Path, part: str, count: int, size: tuple[int, int], rng: np.random.Generator) -> None:
    for name in (part, "annotations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in range(1, count + 1):
        pixels = rng.integers(0, 60, (size[1], size[0], 3)).astype(np.uint8)
        for annotation in _objects(size, rng):
            color = (230, 60, 60) if annotation["category_id"] == DISC else (60, 60, 230)
            if not annotation["iscrowd"]:
                pixels[pixels_of(annotation, size)] = color
            annotations.append(annotation | {"id": len(annotations) + 1, "image_id": 10 * number})
        name = f"{number:03d}.png"
        Image.fromarray(pixels).save(folder / part / name)
        images.append({"id": 10 * number, "file_name": name, "width": size[0], "height": size[1]})
    content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
    annotation_file(folder, part).write_text(json.dumps(content))


def annotation_file(folder: Path, part: str) -> Path:
    return folder / "annotations" / f"instances_{part}.json"


def change(folder: Path, edit: Callable[[dict[str, Any]], None], part: str = TRAIN) -> None:
    """Edit an annotation file."""
    path = annotation_file(folder, part)
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def set_first(name: str, /, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of the first entry of a list: images, categories or annotations."""
    return lambda content: content[name][0].update(fields)


def _objects(size: tuple[int, int], rng: np.random.Generator) -> list[dict[str, Any]]:
    """A disc on the left, a triangle on the right, and sometimes a crowd in the corner."""
    width, height = size
    radius = rng.uniform(0.12, 0.2) * width
    x, y = rng.uniform(radius, width / 2 - radius), rng.uniform(radius, height - radius)
    rows, columns = np.mgrid[:height, :width] + 0.5
    disc = (columns - x) ** 2 + (rows - y) ** 2 < radius**2
    left, right = width * rng.uniform(0.5, 0.6), width * rng.uniform(0.8, 1.0)
    top, bottom = height * rng.uniform(0.0, 0.2), height * rng.uniform(0.7, 1.0)
    found = [
        _annotation(_run_lengths(disc), DISC, size),
        _annotation([[left, bottom, right, bottom, (left + right) / 2, top]], TRIANGLE, size),
    ]
    if rng.random() < 0.5:
        crowd = np.zeros((height, width), bool)
        crowd[: height // 8, : width // 8] = True
        found.append(_annotation(_run_lengths(crowd), DISC, size) | {"iscrowd": 1})
    return found


def _run_lengths(mask: Any) -> dict[str, Any]:
    """Not compressed, as COCO writes crowds."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat, prepend=False)).tolist()
    return {"size": list(mask.shape), "counts": np.diff([0, *edges, flat.size]).tolist()}


def _annotation(segmentation: Any, category: int, size: tuple[int, int]) -> dict[str, Any]:
    encoded = _encoded(segmentation, size)
    return {
        "category_id": category,
        "segmentation": segmentation,
        "bbox": coco_mask.toBbox(encoded).tolist(),
        "area": float(coco_mask.area(encoded)),
        "iscrowd": 0,
    }


def _encoded(segmentation: Any, size: tuple[int, int]) -> Any:
    found = coco_mask.frPyObjects(segmentation, size[1], size[0])
    return coco_mask.merge(found) if isinstance(found, list) else found


def pixels_of(annotation: dict[str, Any], size: tuple[int, int]) -> Any:
    """bool ``[height, width]``, by pycocotools."""
    with warnings.catch_warnings():  # of NumPy 2, in pycocotools
        warnings.simplefilter("ignore")
        return coco_mask.decode(_encoded(annotation["segmentation"], size)).astype(bool)
