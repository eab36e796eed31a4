"""Photographs from records or from a folder per class, augmented as in ImageNet's training recipes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.common.batches import BatchSplit, Example, ExampleStream, evaluation_batches, read_pieces
from models.common.errors import DataError
from models.common.pictures import read_picture
from models.common.records import Records, find_records
from models.common.tf_example import decode_example
from models.resnet.presets import PhotoConfig, Preset

TRAIN, VALIDATION = "train", "validation"
ENCODED, LABEL = "image/encoded", "image/class/label"
PHOTO_SUFFIXES = frozenset({".jpeg", ".jpg", ".png"})

# Mean and standard deviation of ImageNet's pixels, 0 to 255.
CHANNEL_MEAN = np.array([123.68, 116.779, 103.939], np.float32)
CHANNEL_STD = np.array([58.393, 57.12, 57.375], np.float32)
# The principal components of ImageNet's colours, 0 to 255 (Krizhevsky et al., 2012).
COLOR_VALUES = np.array([55.46, 4.794, 1.148], np.float32)
COLOR_VECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]], np.float32
)
# Weights of red, green and blue in brightness.
BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)
CROP_ATTEMPTS = 10

Pixels = NDArray[np.float32]


class Photos(Protocol):
    """Encoded photographs with their labels, 0 for the first class."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes, int, str]:
        """The file's bytes, the label, and a name for error messages."""
        ...


class FolderPhotos:
    """One folder per class, with a file per photograph. The classes are in the order of the folders' names."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self._files = [
            (path, label)
            for label, of_class in enumerate(classes)
            for path in sorted(of_class.iterdir())
            if path.suffix.lower() in PHOTO_SUFFIXES
        ]
        if not self._files:
            raise DataError(f"{folder} has no folder with JPEG or PNG files in it, one folder per class")

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> tuple[bytes, int, str]:
        path, label = self._files[index]
        return path.read_bytes(), label, str(path)


class RecordPhotos:
    """Records with ``image/encoded`` and ``image/class/label``, the features of the usual ImageNet TFRecords."""

    def __init__(self, records: Records, first_label: int) -> None:
        self._records, self._first_label = records, first_label

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int) -> tuple[bytes, int, str]:
        where = self._records.where(index)
        found = decode_example(self._records[index], (ENCODED, LABEL), where=where)
        return found[ENCODED][0], int(found[LABEL][0]) - self._first_label, where


def find_photos(folder: Path, part: str, first_label: int) -> Photos:
    """The photographs in the folder ``part`` of ``folder``, or else in the record files whose names begin with it."""
    if (folder / part).is_dir():
        return FolderPhotos(folder / part)
    return RecordPhotos(find_records(folder, part), first_label)


class PhotoData:
    """Training and validation photographs for a preset."""

    def __init__(self, folder: Path, preset: Preset) -> None:
        self._preset = preset
        self.train = find_photos(folder, TRAIN, preset.photos.first_label)
        self.held_out = find_photos(folder, VALIDATION, preset.photos.first_label)
        if len(self.train) < preset.train_image_count:
            raise DataError(
                f"{folder} has {len(self.train)} training images; train_image_count is {preset.train_image_count}: "
                f"give --train-image-count {len(self.train)} or less"
            )

    @property
    def held_out_count(self) -> int:
        return len(self.held_out)

    def train_batches(self, split: BatchSplit, first_step: int) -> Iterator[tuple[Any, ...]]:
        """This worker's pieces from a step on: float32 ``[micro_batch, size, size, 3]``, int32 ``[micro_batch]``."""
        preset = self._preset
        epoch_size = preset.steps_per_epoch * split.global_batch
        stream = ExampleStream(preset.train_image_count, epoch_size, preset.epochs * epoch_size, preset.seed)
        for piece in read_pieces(stream, lambda place: self._load_train(*place), split, first_step=first_step):
            yield piece["image"], piece["label"]

    def held_out_batches(self, split: BatchSplit) -> Iterator[tuple[Any, ...]]:
        """This worker's share of the validation photographs: images, labels, and a bool mask of the real ones."""
        batches = evaluation_batches(
            len(self.held_out),
            self._load_held_out,
            batch=split.micro_batch,
            rank=split.rank,
            worker_count=split.worker_count,
        )
        for piece, is_real in batches:
            yield piece["image"], piece["label"], is_real

    def _load_train(self, index: int, epoch: int) -> Example:
        photo, label = self._read(self.train, index)
        # The seed depends on the photograph and not on the worker: any number of workers sees the same images.
        rng = np.random.default_rng((self._preset.seed, epoch, index))
        return {"image": augment(photo, self._preset.photos, self._preset.flip, rng), "label": label}

    def _load_held_out(self, index: int) -> Example:
        photo, label = self._read(self.held_out, index)
        return {"image": center(photo, self._preset.photos), "label": label}

    def _read(self, photos: Photos, index: int) -> tuple[Image.Image, NDArray[np.int32]]:
        encoded, label, where = photos.read(index)
        class_count = self._preset.model.class_count
        if not 0 <= label < class_count:
            raise DataError(
                f"{where}: the label is {label} counted from 0; class_count is {class_count}, "
                f"and first_label {self._preset.photos.first_label}"
            )
        return read_picture(io.BytesIO(encoded), where=where), np.array(label, np.int32)


def augment(photo: Image.Image, config: PhotoConfig, flip: bool, rng: np.random.Generator) -> Pixels:
    """A random part of the photograph, scaled, perhaps mirrored, recoloured and normalised."""
    size = (config.image_size, config.image_size)
    part = photo.resize(size, Image.Resampling.BILINEAR, box=random_crop(photo.size, config, rng))
    pixels = np.asarray(part, np.float32)
    if flip and rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    if config.color_jitter:
        pixels = jitter_colors(pixels, config.color_jitter, rng)
    if config.lighting_noise:
        shift = COLOR_VECTORS @ (rng.normal(0, config.lighting_noise, 3).astype(np.float32) * COLOR_VALUES)
        pixels = pixels + shift
    return normalize_photo(pixels)


def random_crop(size: tuple[int, int], config: PhotoConfig, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a part with random area and aspect, or of the central square if none fits."""
    width, height = size
    for _ in range(CROP_ATTEMPTS):
        area = width * height * rng.uniform(config.smallest_area, 1)
        limit = math.log(config.widest_aspect)
        aspect = math.exp(rng.uniform(-limit, limit))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int(rng.integers(width - crop_width + 1)), int(rng.integers(height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    side = min(size)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def jitter_colors(pixels: Pixels, strength: float, rng: np.random.Generator) -> Pixels:
    """Change brightness, contrast and saturation, in random order.

    Each is a mixture with another image: with black, with the mean grey, and with the grey image.
    """
    for kind in rng.permutation(3):
        gray = pixels @ BRIGHTNESS
        other = (np.float32(0), gray.mean(), gray[..., None])[kind]
        share = np.float32(1 + rng.uniform(-strength, strength))
        pixels = share * pixels + (1 - share) * other
    return np.clip(pixels, 0, 255)


def center(photo: Image.Image, config: PhotoConfig) -> Pixels:
    """The central square of ``image_size`` of a photograph whose shorter side is scaled to ``resize``."""
    width, height = photo.size
    scale = config.resize / min(width, height)
    scaled = photo.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    left, top = (scaled.width - config.image_size) // 2, (scaled.height - config.image_size) // 2
    part = scaled.crop((left, top, left + config.image_size, top + config.image_size))
    return normalize_photo(np.asarray(part, np.float32))


def normalize_photo(pixels: Pixels) -> Pixels:
    """Pixels with zero mean and unit variance per channel, over ImageNet."""
    return (pixels - CHANNEL_MEAN) / CHANNEL_STD
