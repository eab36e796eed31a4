"""Annotations and masks of COCO folders as Mask R-CNN reads them, and what is wrong with bad ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.common.errors import DataError
from models.mask_rcnn.batch import MASK_SIZE
from models.mask_rcnn.coco import CocoPart
from models.mask_rcnn.masks import cropped_mask, encode_mask, mask_pixels
from tests.models import coco_folder
from tests.models.coco_folder import SIZE, TRAIN, change, set_first


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
            r"annotation 1 of \S+ has damaged run lengths: they are not those of 48 x 64 pixels",
        ),
        (set_first("annotations", segmentation=[[1, 2, 3]]), r"annotation 1 of \S+ has a polygon that is no list of x"),
        (set_first("images", id=20), r"instances_train.json has two images with one id, 20"),
        (set_first("images", file_name="none.png"), r"there is no file \S+none.png, which image 10 of \S+ names"),
        # The base name alone is that of a file.
        (set_first("images", file_name="sub/001.png"), r"there is no file \S+sub/001.png, which image 10 of \S+ names"),
        (set_first("images", width=0), r"image 10 of \S+ has 0 x 48 pixels"),
        (drop("categories"), r"instances_train.json has no 'categories'"),
        (drop("annotations"), r"instances_train.json has no 'annotations'"),
        (lambda content: content.update(images={}), r"instances_train.json has images that are no list"),
        (lambda content: content["images"].append(7), r"has images of which number 10 is no object: 7"),
        (lambda content: content.update(images=[], annotations=[]), r"\S+ has no images"),
    ],
)
def test_a_bad_annotation_file_is_refused(folder: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    change(folder, edit)
    with pytest.raises(DataError, match=message):
        CocoPart(folder, TRAIN)


@pytest.mark.parametrize(
    ("name", "called", "fields", "message"),
    [
        ("images", "image", {"id": value}, "id .* no integer")
        for value in ("7", 7.5, None, True, float("nan"), float("inf"), 2.0**60, [7])
    ]
    + [
        (name, called, {field: value}, f"{field} .* no {kind}")
        for name, called, field, kind in (
            ("images", "image", "width", "integer"),
            ("images", "image", "file_name", "text"),
            ("categories", "category", "id", "integer"),
            ("categories", "category", "name", "text"),
            ("annotations", "annotation", "image_id", "integer"),
            ("annotations", "annotation", "category_id", "integer"),
            ("annotations", "annotation", "area", "finite number"),
            ("annotations", "annotation", "bbox", "list of 4 finite numbers"),
        )
        for value in (None, [1, 2], {})
    ]
    + [
        ("annotations", "annotation", {"bbox": value}, "bbox .* no list of 4 finite numbers")
        for value in (
            [0, 0],
            [0, 0, float("nan"), 1],
            [0, 0, 1, float("inf")],
            ["0", "0", "1", "1"],
            [0, 0, 10**400, 1],
        )
    ]
    + [
        ("annotations", "annotation", {"bbox": [20, 20, -8, 8]}, "bbox .* not left, top, width and height"),
        ("annotations", "annotation", {"area": "9"}, "area '9', which is no finite number"),
        ("annotations", "annotation", {"area": float("nan")}, "area nan, which is no finite number"),
    ]
    + [
        ("annotations", "annotation", {"iscrowd": value}, "iscrowd .* neither 0 nor 1")
        for value in ("0", "false", 2, None)
    ]
    + [
        ("annotations", "annotation", {"segmentation": value}, "has a segmentation that is neither polygons nor run")
        for value in (None, "0", 7)
    ]
    + [
        ("annotations", "annotation", {"segmentation": [value]}, "has a polygon that is no list of x and y in turn")
        for value in (7, "1", [1, 2, 3], [[1, 2]], ["1"] * 6, [float("nan")] * 6, {"size": [48, 64], "counts": [3072]})
    ]
    + [
        (
            "annotations",
            "annotation",
            {"segmentation": [[1, 2, 9, 9, value, 5]]},
            "has a polygon that reaches far beyond",
        )
        for value in (1e9, -1e300, 500)
    ]
    + [
        ("annotations", "annotation", {"segmentation": {"size": [48, 64], "counts": value}}, "has damaged run lengths")
        for value in (None, 7, [], [3072.0], [-8, 3080], [[3072]], [[1], [2, 3]], [10**30], "oops", "", "é0")
    ],
)
def test_a_bad_entry_is_refused_by_its_name_and_its_file(
    folder: Path, name: str, called: str, fields: dict[str, Any], message: str
) -> None:
    change(folder, lambda content: content[name][0].update({"id": 10 if name == "images" else 17} | fields))
    number = fields.get("id", 10 if name == "images" else 17)
    with pytest.raises(DataError, match=rf"^{called} {re.escape(str(number))} of \S+instances_train.json .*{message}"):
        CocoPart(folder, TRAIN)


@pytest.mark.parametrize("field", ["bbox", "segmentation", "image_id", "category_id"])
def test_a_missing_field_is_named_even_without_an_id(folder: Path, field: str) -> None:
    def forget(content: dict[str, Any]) -> None:
        del content["annotations"][2][field], content["annotations"][2]["id"]

    change(folder, forget)
    with pytest.raises(DataError, match=rf"^annotation number 2 of \S+instances_train.json has no '{field}'"):
        CocoPart(folder, TRAIN)


def doubled(name: str, /, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[name].append(content[name][0] | fields)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (doubled("annotations"), r"annotation 1 of \S+ is there twice"),
        (doubled("categories"), r"category 17 of \S+ has the id of 'disc'"),
        (doubled("categories", name="other"), r"category 17 of \S+ has the id of 'disc'"),
        (doubled("categories", id=18), r"category 18 of \S+ has the name 'disc' of another one; remove"),
        (doubled("images"), r"instances_train.json has two images with one id, 10"),
    ],
)
def test_what_is_there_twice_is_refused(folder: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    change(folder, edit)
    with pytest.raises(DataError, match=message):
        CocoPart(folder, TRAIN)


@pytest.mark.parametrize("number", [99, None])
def test_a_copy_under_another_id_is_left_out_and_counted(folder: Path, number: int | None) -> None:
    """COCO's own train2017 has some."""
    objects = [image.objects for image in CocoPart(folder, TRAIN).images]
    change(folder, doubled("annotations", id=number))
    part = CocoPart(folder, TRAIN)
    assert str(part).endswith("; left out: 1 objects that are copies of others")
    assert [len(image.objects) for image in part.images] == [len(of_image) for of_image in objects]


@pytest.mark.parametrize(
    "numbers", [lambda place: 1, lambda place: 1.0 * place, lambda place: f"a{place}", lambda place: 2**70 - place]
)
def test_annotations_may_have_any_ids(folder: Path, numbers: Callable[[int], Any]) -> None:
    expected = [len(image.objects) for image in CocoPart(folder, TRAIN).images]

    def renumber(content: dict[str, Any]) -> None:
        for place, entry in enumerate(content["annotations"]):
            entry["id"] = numbers(place)

    change(folder, renumber)
    assert [len(image.objects) for image in CocoPart(folder, TRAIN).images] == expected


def test_ids_may_be_huge_negative_or_floats_with_the_value_of_integers(folder: Path) -> None:
    number_of = {10: 2**80, 20: -5, 30: 0}

    def renumber(content: dict[str, Any]) -> None:
        for name, field in (("images", "id"), ("annotations", "image_id")):
            for entry in content[name]:
                entry[field] = float(entry[field]) if entry[field] > 30 else number_of[entry[field]]

    change(folder, renumber)
    ids = [image.id for image in CocoPart(folder, TRAIN).images]
    assert ids == [2**80, -5, 0, *range(40, 101, 10)]
    assert {type(number) for number in ids} == {int}


def test_a_missing_area_is_that_of_the_mask(folder: Path) -> None:
    expected = [thing.area for image in CocoPart(folder, TRAIN).images for thing in image.objects]

    def forget(content: dict[str, Any]) -> None:
        for entry in content["annotations"]:
            del entry["area"]

    change(folder, forget)
    assert [thing.area for image in CocoPart(folder, TRAIN).images for thing in image.objects] == expected


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"segmentation": [[70, 4, 90, 4, 90, 20]]}, "outside of their image"),
        ({"bbox": [-9, 4, 8, 8]}, "outside of their image"),
        ({"bbox": [8, 4, 0, 8]}, "without area"),
        ({"area": 0}, "without area"),
        ({"segmentation": [[8, 4, 9, 4]]}, "without area"),
        ({"segmentation": []}, "without area"),
        ({"segmentation": {"size": [48, 64], "counts": [3072]}}, "without area"),
        ({"bbox": [8, 4, 1e-9, 8]}, "without area"),
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
    with pytest.raises(DataError, match=r"instances_none.json has no 'categories'"):
        CocoPart(folder, "none")
