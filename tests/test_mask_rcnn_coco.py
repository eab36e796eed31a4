"""Annotations and masks of COCO folders as Mask R-CNN reads them, and what is wrong with bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coco_folder
import numpy as np
import pytest
from coco_folder import SIZE, TRAIN, change, set_first

from models.common.errors import DataError
from models.mask_rcnn.batch import MASK_SIZE
from models.mask_rcnn.coco import CocoPart
from models.mask_rcnn.masks import cropped_mask, encode_mask, mask_pixels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return coco_folder.write_coco(tmp_path / "coco", {TRAIN: 10})


# --- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_those_of_pycocotools(folder: Path) -> None:
    """Polygons, run lengths, and run lengths as a string."""
    annotations = json.loads(coco_folder.annotation_file(folder, TRAIN).read_text())["annotations"]
    assert {type(annotation["segmentation"]) for annotation in annotations} == {dict, list}
    for annotation in annotations:
        expected = coco_folder.pixels_of(annotation, SIZE)
        segmentation = annotation["segmentation"]
        if isinstance(segmentation, list):
            segmentation = [np.array(polygon) for polygon in segmentation]
        for form in (segmentation, encode_mask(expected)):
            np.testing.assert_array_equal(mask_pixels(form, SIZE[1], SIZE[0], where="it"), expected)


def test_run_lengths_of_large_masks_with_fine_detail_can_be_read() -> None:
    """Numbers of several groups, and negative differences."""
    rng = np.random.default_rng(0)
    mask = np.kron(rng.random((40, 30)) < 0.4, np.ones((7, 13))) + (rng.random((280, 390)) < 0.01) > 0
    mask[:, :100] = False
    found = mask_pixels(encode_mask(mask), *mask.shape, where="it")
    np.testing.assert_array_equal(found, mask)


def test_a_mask_is_cropped_to_its_box() -> None:
    """The left half of the box, as a polygon, whose corners pycocotools rounds, and as run lengths."""
    box = (8.0, 4.0, 40.0, 36.0)
    polygon = [np.array([8, 4, 24, 4, 24, 36, 8, 36.0])]
    pixels = np.zeros((48, 64), np.uint8)
    pixels[4:36, 8:24] = 1
    half = np.zeros((MASK_SIZE, MASK_SIZE), np.uint8)
    half[:, : MASK_SIZE // 2] = 1
    for form in (polygon, encode_mask(pixels)):
        assert np.sum(cropped_mask(form, box, MASK_SIZE, where="it") != half) <= 4


@pytest.mark.parametrize("counts", [[5, 6], "oops", "0"])
def test_damaged_run_lengths_are_named(counts: Any) -> None:
    with pytest.raises(DataError, match=r"annotation 7 has damaged run lengths: they are not those of 4 x 4 pixels"):
        mask_pixels({"size": [4, 4], "counts": counts}, 4, 4, where="annotation 7")


# --- the annotation file ---------------------------------------------------------------------------------------------


def test_a_part_has_images_objects_and_classes(folder: Path) -> None:
    part = CocoPart(folder, TRAIN)
    assert part.class_of == {coco_folder.TRIANGLE: 1, coco_folder.DISC: 2}
    assert [part.category_of(number) for number in (1, 2)] == [coco_folder.TRIANGLE, coco_folder.DISC]
    assert [image.id for image in part.images] == list(range(10, 101, 10))
    crowd_count = sum(thing.is_crowd for image in part.images for thing in image.objects)
    assert 0 < crowd_count < 10
    assert all(len(image.single_objects) == 2 for image in part.images)
    assert str(part) == f"10 images, {20 + crowd_count} objects, 2 categories"


def test_the_truth_for_scoring_is_that_of_the_file(folder: Path) -> None:
    content, truth = json.loads(coco_folder.annotation_file(folder, TRAIN).read_text()), CocoPart(folder, TRAIN).truth()
    for wanted, found in zip(content["annotations"], truth["annotations"], strict=True):
        assert found["bbox"] == pytest.approx(wanted["bbox"])
        assert {key: found[key] for key in wanted if key != "bbox"} == {
            key: wanted[key] for key in wanted if key != "bbox"
        }


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.__delitem__(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_first("annotations", image_id=5), r"annotation 1 of \S+ is on image 5, which the file does not have"),
        (set_first("annotations", category_id=9), r"annotation 1 of \S+ has the category 9, which the file does not"),
        (
            set_first("annotations", segmentation={"size": [48, 65], "counts": [48 * 65]}),
            r"annotation 1 of \S+ has a mask of \[48, 65\]; its image is \[48, 64\]",
        ),
        (
            set_first("annotations", segmentation={"size": [48, 64], "counts": [5]}),
            r"annotation 1 of \S+ has a mask of 5 pixels; its image has 3072",
        ),
        (set_first("annotations", segmentation=[[1, 2, 3]]), r"annotation 1 of \S+ has a polygon that is no list of x"),
        (set_first("annotations", bbox=[0, 0, float("nan"), 1]), r"annotation 1 of \S+ has the box .* not finite"),
        (set_first("annotations", bbox=[0, 0]), r"\S+ is no COCO annotation file: ValueError"),
        (set_first("images", id=20), r"has two images with one id"),
        (set_first("images", file_name="none.png"), r"there is no file \S+none.png, which \S+ names"),
        (drop("categories"), r"\S+ is no COCO annotation file: KeyError: 'categories'"),
        (lambda content: content.update(images=[], annotations=[]), r"\S+ has no images"),
    ],
)
def test_a_bad_annotation_file_is_refused(folder: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    change(folder, edit)
    with pytest.raises(DataError, match=message):
        CocoPart(folder, TRAIN)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"segmentation": [[70, 4, 90, 4, 90, 20]]}, "outside of their image"),
        ({"bbox": [-9, 4, 8, 8]}, "outside of their image"),
        ({"bbox": [8, 4, 0, 8]}, "without area"),
        ({"area": 0}, "without area"),
        ({"segmentation": [[8, 4, 9, 4]]}, "without area"),
        ({"segmentation": []}, "without area"),
    ],
)
def test_objects_that_cannot_be_seen_are_left_out_and_counted(
    folder: Path, fields: dict[str, Any], reason: str
) -> None:
    change(folder, set_first("annotations", **fields))
    part = CocoPart(folder, TRAIN)
    assert str(part).endswith(f"; left out: 1 objects {reason}")
    assert 1 not in {annotation["id"] for annotation in part.truth()["annotations"]}


def test_an_object_that_is_partly_outside_is_clipped(folder: Path) -> None:
    change(folder, set_first("annotations", bbox=[-4, 40, 20, 20], segmentation=[[-4, 40, 16, 40, 16, 60, -4, 60]]))
    first = CocoPart(folder, TRAIN).images[0].objects[0]
    assert first.box == (0, 40, 16, 48)
    assert cropped_mask(first.segmentation, first.box, MASK_SIZE, where="it").mean() > 0.99


def test_missing_and_truncated_files_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file \S+instances_val2017.json"):
        CocoPart(folder, "val2017")
    path = coco_folder.annotation_file(folder, TRAIN)
    path.write_text(path.read_text()[:-100])
    with pytest.raises(DataError, match=r"instances_train.json is truncated, or no JSON"):
        CocoPart(folder, TRAIN)
    path.write_text("[]")
    with pytest.raises(DataError, match=r"instances_train.json is no COCO annotation file: it is a JSON list"):
        CocoPart(folder, TRAIN)
    (folder / "annotations" / "instances_none.json").write_text("{}")
    with pytest.raises(DataError, match=r"is no COCO annotation file: KeyError: 'categories'"):
        CocoPart(folder, "none")
