"""The COCO folders that models.mask_rcnn.prepare makes."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.common.command import run_command
from models.common.errors import DataError
from models.mask_rcnn import prepare
from models.mask_rcnn.coco import CocoPart
from models.mask_rcnn.masks import mask_pixels
from models.mask_rcnn.prepare import CATEGORIES, HELD_OUT, TRAIN


@pytest.fixture(scope="module")
def nuclei(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nuclei") / "coco"
    try:
        assert prepare.run(["nuclei", str(folder)]) == 0
    except DataError as error:
        pytest.skip(f"no nuclei: {error}")
    return folder


def test_nuclei_of_the_right_half_are_held_out(nuclei: Path) -> None:
    """Eight tiles without overlap, and all tiles of the left half that begin at a multiple of 16."""
    train, held_out = (CocoPart(nuclei, part) for part in (TRAIN, HELD_OUT))
    assert str(train) == "225 images, 2,490 objects, 1 categories"
    assert str(held_out) == "8 images, 73 objects, 1 categories"
    assert held_out.category_names == {1: "nucleus"}
    for part in (train, held_out):
        for image in part.images:
            assert (image.width, image.height) == (128, 128)
            for thing in image.objects:
                assert thing.is_crowd == (thing.area < 20)
                assert mask_pixels(thing.segmentation, 128, 128, where="it").sum() == thing.area
    left = [np.asarray(Image.open(image.path)) for image in train.images]
    right = [np.asarray(Image.open(image.path)) for image in held_out.images]
    assert not any(np.array_equal(ours[:16, :16], theirs[:16, :16]) for ours in left for theirs in right)


def test_a_file_that_is_not_the_wheel_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.whl").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"other.whl is not the wheel of stardist==0.9.2"):
        prepare.run(["nuclei", str(tmp_path / "coco"), "--wheel", str(tmp_path / "other.whl")])
    with pytest.raises(DataError, match=r"there is no file \S+none.whl"):
        prepare.run(["nuclei", str(tmp_path / "coco"), "--wheel", str(tmp_path / "none.whl")])
    with zipfile.ZipFile(tmp_path / "damaged.whl", "w") as wheel:
        wheel.writestr("stardist/data/images/img2d.tif", b"II*\0" + bytes(20))
    with pytest.raises(DataError, match=r"damaged.whl is not the wheel of stardist==0.9.2"):
        prepare.run(["nuclei", str(tmp_path / "coco"), "--wheel", str(tmp_path / "damaged.whl")])
    assert not (tmp_path / "coco").exists()


def write_stamps(folder: Path) -> tuple[Path, Path]:
    """Ellipses of one colour for each category, five of each, on backgrounds of noise."""
    rng = np.random.default_rng(0)
    stamps, backgrounds = folder / "stamps", folder / "backgrounds"
    backgrounds.mkdir()
    for number in range(5):
        noise = rng.integers(0, 80, (100, 140, 3)).astype(np.uint8)
        Image.fromarray(noise).save(backgrounds / f"{number}.jpg")
        for category in CATEGORIES:
            (stamps / category / "some").mkdir(parents=True, exist_ok=True)
            rows, columns = np.mgrid[-1:1:40j, -1:1:60j]
            pixels = np.full((40, 60, 4), 255, np.uint8)
            pixels[..., 3] = 255 * (rows**2 + columns**2 < 1)
            Image.fromarray(pixels, "RGBA").save(stamps / category / "some" / f"{number}.png")
    return stamps, backgrounds


def test_stamps_hide_each_other_and_stay_partly_visible(tmp_path: Path) -> None:
    stamps, backgrounds = write_stamps(tmp_path)
    folders = ("--stamps", str(stamps), "--backgrounds", str(backgrounds))
    counts = ("--train-count", "12", "--held-out-count", "3", "--width", "96", "--height", "64")
    assert prepare.run(["stamps", str(tmp_path / "coco"), *folders, *counts]) == 0
    part = CocoPart(tmp_path / "coco", TRAIN)
    assert [len(CocoPart(tmp_path / "coco", name).images) for name in (TRAIN, HELD_OUT)] == [12, 3]
    assert tuple(part.category_names.values()) == CATEGORIES
    assert len({thing.category_id for image in part.images for thing in image.objects}) > 5
    for image in part.images:
        pixels = np.asarray(Image.open(image.path).convert("L"))
        masks = [mask_pixels(thing.segmentation, 64, 96, where="it") for thing in image.objects]
        assert 1 <= len(masks) <= 8
        assert np.sum(masks, axis=0).max() == 1, "a pixel belongs to one thing"
        assert pixels[np.sum(masks, axis=0) > 0].mean() > 180


def test_missing_stamps_are_named_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["stamps", str(tmp_path / "coco"), "--stamps", "/nowhere"]
    monkeypatch.setattr(sys, "argv", ["prepare", *arguments])
    assert run_command(prepare.run) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "error: /nowhere/animals has 0 .png files, too few to hold one in 5 out; apt-get install tux"
    )
