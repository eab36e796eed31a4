"""``python -m models.mask_rcnn.prepare nuclei FOLDER``, or ``stamps FOLDER``: COCO folders from packages."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco_mask

from models.common.command import run_command
from models.common.errors import DataError, require
from models.common.pictures import read_picture
from models.common.records import new_folder
from models.mask_rcnn.coco import ANNOTATIONS
from models.mask_rcnn.masks import encode_mask

TRAIN, HELD_OUT = "train", "held-out"

Mask = NDArray[np.bool_]


class Shape(NamedTuple):
    """An object of an image."""

    mask: Mask
    """``[height, width]``"""
    category: int
    is_crowd: bool = False


class CocoWriter:
    """Writes a part of a COCO folder: images as they come, and at the end the annotation file."""

    def __init__(self, folder: Path, part: str, categories: Sequence[str]) -> None:
        self._folder, self._part = folder, part
        self._images: list[dict[str, Any]] = []
        self._annotations: list[dict[str, Any]] = []
        self._categories = [{"id": number, "name": name} for number, name in enumerate(categories, start=1)]
        for name in (part, ANNOTATIONS):
            (folder / name).mkdir(exist_ok=True)

    def add(self, photo: Image.Image, shapes: Sequence[Shape], suffix: str) -> None:
        """Write an image, in the format of ``suffix``, and keep its objects."""
        number = len(self._images) + 1
        name = f"{number:06d}{suffix}"
        photo.save(self._folder / self._part / name, quality=95)
        self._images.append({"id": number, "file_name": name, "width": photo.width, "height": photo.height})
        for shape in shapes:
            run_lengths = encode_mask(shape.mask)
            self._annotations.append(
                {
                    "id": len(self._annotations) + 1,
                    "image_id": number,
                    "category_id": shape.category,
                    "bbox": coco_mask.toBbox(run_lengths).tolist(),
                    "area": int(coco_mask.area(run_lengths)),
                    "segmentation": run_lengths,
                    "iscrowd": int(shape.is_crowd),
                }
            )

    def finish(self) -> str:
        """Write the annotation file. Returns a line about the part."""
        content = {"images": self._images, "annotations": self._annotations, "categories": self._categories}
        path = self._folder / ANNOTATIONS / f"instances_{self._part}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return f"{self._part}: {len(self._images):,} images, {len(self._annotations):,} objects"


# --- nuclei ----------------------------------------------------------------------------------------------------------

_STARDIST = "stardist==0.9.2"
_STARDIST_FILES = ("stardist/data/images/img2d.tif", "stardist/data/images/mask2d.tif")
# A wheel for a certain Python can be downloaded by any other.
_STARDIST_PYTHON = "3.11"


@dataclass(frozen=True)
class Nuclei:
    """Tiles of a microscope's image with 125 nuclei that people have outlined, of the package stardist.

    The left half of the image becomes the training part, in tiles that overlap. The right half is held out, in tiles
    that do not.
    """

    output: tyro.conf.Positional[Path]
    """A new folder."""
    wheel: Path | None = None
    """The wheel of stardist 0.9.2. By default pip downloads it."""
    tile: int = 128
    """The side of a tile in pixels."""
    stride: int = 16
    """Pixels from one training tile to the next."""
    smallest_area: int = 20
    """A part of a nucleus at the edge of a tile with fewer pixels is a crowd: neither learnt nor counted."""

    def __post_init__(self) -> None:
        for name in ("tile", "stride"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")

    def write(self, folder: Path) -> list[str]:
        """Write both parts. Returns a line about each."""
        with _stardist_wheel(self.wheel) as wheel:
            image, labels = (_read_from_zip(wheel, name) for name in _STARDIST_FILES)
        half = image.shape[1] // 2
        require(self.tile <= half, f"tile is {self.tile}; half of the image is {half} pixels wide")
        gray = _to_gray(image, darkest_and_brightest=np.percentile(image[:, :half], [1, 99.8]))
        lines = []
        for part, columns in ((TRAIN, slice(None, half)), (HELD_OUT, slice(half, None))):
            writer = CocoWriter(folder, part, ["nucleus"])
            stride = self.stride if part == TRAIN else self.tile
            for tile, tile_labels in self._tiles(gray[:, columns], labels[:, columns], stride):
                writer.add(Image.fromarray(tile), self._shapes(tile_labels), ".png")
            lines.append(writer.finish())
        return lines

    def _tiles(
        self, gray: NDArray[np.uint8], labels: NDArray[Any], stride: int
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[Any]]]:
        height, width = gray.shape
        for top in range(0, height - self.tile + 1, stride):
            for left in range(0, width - self.tile + 1, stride):
                window = slice(top, top + self.tile), slice(left, left + self.tile)
                yield gray[window], labels[window]

    def _shapes(self, labels: NDArray[Any]) -> list[Shape]:
        numbers, areas = np.unique(labels[labels > 0], return_counts=True)
        return [
            Shape(labels == number, 1, is_crowd=bool(area < self.smallest_area))
            for number, area in zip(numbers, areas, strict=True)
        ]


def _to_gray(image: NDArray[Any], darkest_and_brightest: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The square root of the brightness, because many nuclei are dim: 0 to 255."""
    darkest, brightest = darkest_and_brightest
    share = np.clip((image - darkest) / (brightest - darkest), 0, 1)
    gray: NDArray[np.uint8] = np.round(255 * np.sqrt(share)).astype(np.uint8)
    return gray


@contextmanager
def _stardist_wheel(given: Path | None) -> Iterator[Path]:
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        download = ["pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        command = [sys.executable, "-m", *download, "--python-version", _STARDIST_PYTHON, "--dest", folder, _STARDIST]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise DataError(f"pip could not download {_STARDIST}: {reason}; give its wheel with --wheel")
        yield wheels[0]


def _read_from_zip(path: Path, name: str) -> NDArray[Any]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            return np.asarray(Image.open(file))
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (zipfile.BadZipFile, zlib.error, KeyError, OSError, EOFError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} is not the wheel of {_STARDIST}: {error}") from None


# --- stamps ----------------------------------------------------------------------------------------------------------

CATEGORIES = ("animals", "clothes", "food", "hobbies", "household", "plants", "space", "sports", "vehicles")
_DRAWINGS = ("cartoon", "silo", "mirror", "flip")
# One stamp in five of each category, and one background in five, are held out.
_HELD_OUT_STRIDE = 5
# Larger than they ever become in an image.
_STAMP_SIDE, _BACKGROUND_SIDE = 400, 1600


@dataclass(frozen=True)
class Stamps:
    """Photographs of things in nine categories, put on photographs of landscapes, partly one over the other.

    The stamps are those of the Debian package tuxpaint-stamps-default, the backgrounds those of mate-backgrounds and
    lomiri-wallpapers-16.04. The held-out part has things and backgrounds that the training part has not.
    """

    output: tyro.conf.Positional[Path]
    """A new folder."""
    stamps: Path = Path("/usr/share/tuxpaint/stamps")
    """A folder with PNG files that have an alpha channel, in a folder for each category."""
    backgrounds: Path = Path("/usr/share/backgrounds")
    """A folder with JPEG files; the folders below it are searched as well."""
    train_count: int = 2000
    """Images for training."""
    held_out_count: int = 200
    """Images for evaluation."""
    width: int = 320
    height: int = 256
    most_stamps: int = 8
    """An image has 1 to this number of things."""
    smallest_side: float = 0.12
    """The longer side of a thing, as a share of the shorter side of the image."""
    largest_side: float = 0.6
    smallest_visible: float = 0.25
    """A thing that would leave less than this share of another one visible is not put there."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("train_count", "held_out_count", "width", "height", "most_stamps"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        require(
            0 < self.smallest_side <= self.largest_side <= 1,
            f"smallest_side and largest_side are {self.smallest_side} and {self.largest_side}; they must be shares of "
            "the image, in ascending order",
        )

    def write(self, folder: Path) -> list[str]:
        """Write both parts. Returns a line about each."""
        lines = []
        for number, (part, count) in enumerate(((TRAIN, self.train_count), (HELD_OUT, self.held_out_count))):
            writer = CocoWriter(folder, part, CATEGORIES)
            stamps = [_chosen(_find(self.stamps / name, ".png", without=_DRAWINGS), part) for name in CATEGORIES]
            backgrounds = _chosen(_find(self.backgrounds, ".jpg"), part)
            rng = np.random.default_rng((self.seed, number))
            for _ in range(count):
                writer.add(*self._compose(stamps, backgrounds, rng), ".jpg")
            lines.append(writer.finish())
        return lines

    def _compose(
        self, stamps: Sequence[Sequence[Path]], backgrounds: Sequence[Path], rng: np.random.Generator
    ) -> tuple[Image.Image, list[Shape]]:
        """An image and what is visible of its things."""
        photo = self._background(_pick(backgrounds, rng), rng)
        shapes: list[Shape] = []
        for _ in range(int(rng.integers(1, self.most_stamps + 1))):
            category = int(rng.integers(len(CATEGORIES)))
            stamp, corner = self._place(_pick(stamps[category], rng), rng)
            layer = Image.new("L", photo.size)
            layer.paste(stamp.getchannel("A"), corner)
            mask = np.asarray(layer) >= 128
            below = [shape._replace(mask=shape.mask & ~mask) for shape in shapes]
            is_hidden = any(
                after.mask.sum() < self.smallest_visible * before.mask.sum()
                for before, after in zip(shapes, below, strict=True)
            )
            if mask.any() and not is_hidden:
                photo.paste(stamp, corner, stamp)
                shapes = [*below, Shape(mask, category + 1)]
        return photo, shapes

    def _place(self, path: Path, rng: np.random.Generator) -> tuple[Image.Image, tuple[int, int]]:
        """A stamp in a random size and perhaps mirrored, and the place of its top left corner."""
        stamp = _load(path, "RGBA", _STAMP_SIDE)
        share = rng.uniform(self.smallest_side, self.largest_side)
        scale = share * min(self.width, self.height) / max(stamp.size)
        width, height = (max(round(side * scale), 1) for side in stamp.size)
        stamp = stamp.resize((width, height), Image.Resampling.BILINEAR)
        if rng.random() < 0.5:
            stamp = stamp.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        # Wholly inside of the image.
        left, top = int(rng.integers(self.width - width + 1)), int(rng.integers(self.height - height + 1))
        return stamp, (left, top)

    def _background(self, path: Path, rng: np.random.Generator) -> Image.Image:
        """A random part of a photograph, with the aspect of the image."""
        photo = _load(path, "RGB", _BACKGROUND_SIDE)
        largest = min(photo.width / self.width, photo.height / self.height)
        scale = rng.uniform(largest / 2, largest)
        width, height = self.width * scale, self.height * scale
        left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
        box = (left, top, left + width, top + height)
        return photo.resize((self.width, self.height), Image.Resampling.BILINEAR, box=box)


def _find(folder: Path, suffix: str, without: Sequence[str] = ()) -> list[Path]:
    """The files in a folder and below it, except those with one of the words ``without`` in their names."""
    names = sorted(path.relative_to(folder) for path in folder.rglob(f"*{suffix}")) if folder.is_dir() else []
    found = [folder / name for name in names if not any(word in str(name) for word in without)]
    if len(found) < _HELD_OUT_STRIDE:
        raise DataError(
            f"{folder} has {len(found)} {suffix} files, too few to hold one in {_HELD_OUT_STRIDE} out; apt-get install "
            "tuxpaint-stamps-default mate-backgrounds lomiri-wallpapers-16.04, or give --stamps and --backgrounds"
        )
    return found


def _chosen(paths: Sequence[Path], part: str) -> list[Path]:
    is_held_out = np.arange(len(paths)) % _HELD_OUT_STRIDE == _HELD_OUT_STRIDE - 1
    return [path for path, held_out in zip(paths, is_held_out, strict=True) if held_out == (part == HELD_OUT)]


def _pick(paths: Sequence[Path], rng: np.random.Generator) -> Path:
    return paths[int(rng.integers(len(paths)))]


@lru_cache(maxsize=1024)
def _load(path: Path, mode: str, longest_side: int) -> Image.Image:
    photo = read_picture(path, where=str(path), mode=mode)
    photo.thumbnail((longest_side, longest_side))
    return photo


def run(arguments: list[str]) -> int:
    """Prepare. Returns the exit code."""
    options: Nuclei | Stamps = tyro.extras.subcommand_cli_from_dict(
        {"nuclei": Nuclei, "stamps": Stamps}, prog="python -m models.mask_rcnn.prepare", args=arguments
    )
    with new_folder(options.output) as folder:
        lines = options.write(folder)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))
