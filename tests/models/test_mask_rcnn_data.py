"""Images of COCO folders as Mask R-CNN's batches: padded squares with boxes and masks, each image once an epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from models.common.batches import BatchSplit
from models.common.errors import DataError, TrainerError
from models.mask_rcnn.batch import image_keys
from models.mask_rcnn.coco import CocoPart
from models.mask_rcnn.data import CocoData, read_photo, scaled_size
from models.mask_rcnn.presets import PRESETS, ImageConfig, Preset
from tests.models import coco_folder
from tests.models.coco_folder import HELD_OUT, TRAIN, change, set_first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return coco_folder.write_coco(tmp_path / "coco", {TRAIN: 10, HELD_OUT: 5})


def preset_of(**images: Any) -> Preset:
    nuclei = PRESETS["nuclei"]
    config = ImageConfig(**{"size": 64, "short_sides": (48, 48), "test_short_side": 48, "long_side": 64} | images)
    model = replace(nuclei.model, class_count=2)
    return replace(nuclei, model=model, images=config, global_batch=4, train_part=TRAIN, held_out_part=HELD_OUT)


# --- images ----------------------------------------------------------------------------------------------------------


def read_first(folder: Path) -> Any:
    return CocoData(folder, preset_of()).load_train(0, 0)


def test_a_truncated_jpeg_is_named(folder: Path) -> None:
    photo = folder / TRAIN / "001.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3)).astype(np.uint8)).save(photo)
    photo.write_bytes(photo.read_bytes()[:-500])
    change(folder, set_first("images", file_name="001.jpg"))
    with pytest.raises(DataError, match=r"001.jpg is truncated, or no image"):
        read_first(folder)


def test_an_empty_file_and_one_of_another_size_are_named(folder: Path) -> None:
    photo = folder / TRAIN / "001.png"
    photo.write_bytes(b"")
    with pytest.raises(DataError, match=r"001.png is truncated, or no image"):
        read_first(folder)
    Image.new("RGB", (64, 49)).save(photo)
    with pytest.raises(DataError, match=r"001.png is 64 x 49 pixels; the annotation file says 64 x 48"):
        read_first(folder)


def test_images_without_objects_are_evaluated_and_not_trained_on(folder: Path) -> None:
    def empty_first_two(content: dict[str, Any]) -> None:
        content["annotations"] = [thing for thing in content["annotations"] if thing["image_id"] > 20]

    for part in (TRAIN, HELD_OUT):
        change(folder, empty_first_two, part)
    data = CocoData(folder, preset_of())
    assert [image.id for image in data.train_images] == list(range(30, 101, 10))
    assert "2 images without objects are not used" in str(data)
    assert not data.load_held_out(0)["classes"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 12}, "instances_train.json has 10 images with objects, fewer than one global batch"),
        (
            {"model": replace(PRESETS["nuclei"].model, class_count=3)},
            "has 2 categories; class_count is 3: give",
        ),
    ],
)
def test_data_that_do_not_fit_the_settings_are_refused(folder: Path, changes: Any, message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        CocoData(folder, replace(preset_of(), **changes))


def test_parts_with_different_categories_are_refused(folder: Path) -> None:
    change(folder, lambda content: content["categories"].append({"id": 4, "name": "more"}), HELD_OUT)
    with pytest.raises(DataError, match="differ in categories"):
        CocoData(folder, preset_of())


def test_parts_that_name_a_category_differently_are_refused(folder: Path) -> None:
    change(folder, set_first("categories", name="ring"), HELD_OUT)
    with pytest.raises(DataError, match="differ in categories"):
        CocoData(folder, preset_of())


@pytest.mark.parametrize(("bits", "numbers"), [(16, np.uint16), (32, np.float32)])
def test_deep_pictures_are_scaled_or_refused(folder: Path, bits: int, numbers: type) -> None:
    pixels = np.linspace(0, 65535, 48 * 64).astype(numbers).reshape(48, 64)
    Image.fromarray(pixels).save(folder / TRAIN / "001.tif")
    change(folder, set_first("images", file_name="001.tif"))
    if bits == 16:
        assert (np.asarray(read_photo(CocoPart(folder, TRAIN).images[0])) == (pixels[..., None] >> 8)).all()
    else:
        with pytest.raises(DataError, match=r"001.tif has pixels of Pillow's mode 'F'"):
            read_first(folder)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((640, 480), (1067, 800)), ((480, 640), (800, 1067)), ((1000, 500), (1333, 666)), ((2000, 10), (1333, 7))],
)
def test_the_short_side_is_scaled_unless_the_long_side_is_too_long(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert scaled_size(size, 800, ImageConfig()) == expected


def colors_in_boxes(example: Any) -> list[Any]:
    """From the objects to their colours: the mean pixel of the image where the mask is."""
    found = []
    for box, mask in zip(example["boxes"], example["masks"], strict=True):
        left, top, right, bottom = np.round(box).astype(int)
        if right - left < 4 or bottom - top < 4:
            continue
        inside = np.asarray(Image.fromarray(mask * 255).resize((right - left, bottom - top))) > 250
        found.append(example["image"][top:bottom, left:right][inside].mean(axis=0))
    return found


@pytest.mark.parametrize("options", [{}, {"flip": True}, {"turn": True}, {"short_sides": (24, 40)}])
def test_boxes_and_masks_follow_the_pixels(folder: Path, options: dict[str, Any]) -> None:
    """Red discs are class 2, blue triangles class 1. Outside of the real area there is nothing."""
    data = CocoData(folder, preset_of(**{"flip": False, "object_count": 4} | options))
    seen = set()
    for epoch in range(12):
        example = data.load_train(3, epoch)
        height, width = example["size"]
        seen.add((height, width, *example["boxes"].round().ravel().tolist()))
        assert example["image"][: int(height), : int(width)].any()
        assert not example["image"][int(height) :].any()
        assert not example["image"][:, int(width) :].any()
        assert (example["boxes"] >= 0).all()
        assert (example["boxes"] <= [width, height, width, height]).all()
        assert example["classes"].tolist()[2:] == [0, 0]
        colors = colors_in_boxes(example)
        assert len(colors) == 2
        for number, color in zip(example["classes"], colors, strict=False):
            assert color[0 if number == 2 else 2] > 180
            assert color[2 if number == 2 else 0] < 110
    assert len(seen) == {"flip": 2, "turn": 4}.get(next(iter(options), ""), len(seen))
    assert (len(seen) > 1) == bool(options)


def test_of_too_many_objects_the_largest_are_taken(folder: Path) -> None:
    data = CocoData(folder, preset_of(object_count=1, flip=False))
    boxes = [thing.box for thing in data.train_images[0].single_objects]
    largest = max(boxes, key=lambda box: (box[2] - box[0]) * (box[3] - box[1]))
    np.testing.assert_allclose(data.load_train(0, 0)["boxes"], [largest], rtol=1e-6)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_count", [1, 2])
def test_every_image_comes_once_an_epoch(folder: Path, worker_count: int) -> None:
    """Two and a half epochs of ten images in steps of four, over all workers."""
    preset = replace(preset_of(), schedule=replace(PRESETS["nuclei"].schedule, step_count=5, warmup_steps=0))
    data = CocoData(folder, preset)
    seen: list[tuple[int, int]] = []
    for rank in range(worker_count):
        split = BatchSplit.make(4, 2, rank=rank, worker_count=worker_count)
        for (batch,) in data.train_batches(split, 0):
            assert batch.image.shape == (2, 64, 64, 3)
            seen += zip(batch.epoch.tolist(), batch.number.tolist(), strict=True)
    assert len(seen) == len(set(seen)) == 5 * 4
    assert {number for epoch, number in seen if epoch == 0} == set(range(10))


def test_a_resumed_run_gets_the_same_batches(folder: Path) -> None:
    preset = replace(preset_of(flip=True), schedule=replace(PRESETS["nuclei"].schedule, step_count=5, warmup_steps=0))
    data, split = CocoData(folder, preset), BatchSplit.make(4, 2, rank=0, worker_count=1)
    whole, resumed = list(data.train_batches(split, 0)), list(data.train_batches(split, 3))
    assert len(resumed) == 4
    for (wanted,), (found,) in zip(whole[-4:], resumed, strict=True):
        for name in ("image", "size", "boxes", "classes", "masks", "number", "epoch"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("worker_count", [1, 2, 3])
def test_every_held_out_image_is_evaluated_once(folder: Path, worker_count: int) -> None:
    data = CocoData(folder, preset_of())
    seen: list[int] = []
    for rank in range(worker_count):
        split = BatchSplit(6, 2, rank, worker_count)
        for batch, is_real in data.held_out_batches(split):
            seen += batch.number[is_real].tolist()
    assert sorted(seen) == list(range(5))


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_what_is_drawn_for_an_image_does_not_depend_on_the_images_beside_it(implementation: str) -> None:
    """Whatever random generator is the default."""

    def draw(numbers: list[int]) -> Any:
        keys = image_keys(7, np.full(len(numbers), 2), np.array(numbers))
        return jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)

    with jax.default_prng_impl(implementation):
        np.testing.assert_array_equal(draw([5, 6])[1:], draw([6]))
        assert len(np.unique(draw([5, 6]))) == 6
