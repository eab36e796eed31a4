"""COCO images as padded squares: read, scaled, perhaps mirrored, with their objects' boxes and masks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.common.batches import BatchSplit, Example, ExampleStream, evaluation_batches, read_pieces
from models.common.errors import DataError, require
from models.common.pictures import read_picture
from models.mask_rcnn.batch import MASK_SIZE, Batch
from models.mask_rcnn.coco import CocoImage, CocoObject, CocoPart
from models.mask_rcnn.masks import cropped_mask
from models.mask_rcnn.presets import ImageConfig, Preset

Pixels = NDArray[np.uint8]


class CocoData:
    """The training part and the held-out part of a COCO folder, for a preset.

    Training leaves out images without objects, and counts them. Evaluation takes all images of its part.
    """

    def __init__(self, folder: Path, preset: Preset) -> None:
        self._preset = preset
        self.train, self.held_out = CocoPart(folder, preset.train_part), CocoPart(folder, preset.held_out_part)
        differing = sorted(self.train.category_names.items() ^ self.held_out.category_names.items())
        if differing:
            raise DataError(
                f"{self.train.annotation_file} and {self.held_out.annotation_file} differ in categories: only one has "
                "the category {} with the name {!r}".format(*differing[0])
            )
        wanted, found = preset.model.class_count, len(self.train.category_names)
        if found != wanted:
            raise DataError(
                f"{self.train.annotation_file} has {found} categories; class_count is {wanted}: give --class-count "
                f"{found}"
            )
        self.train_images = [image for image in self.train.images if image.single_objects]
        require(
            len(self.train_images) >= preset.global_batch,
            f"{self.train.annotation_file} has {len(self.train_images)} images with objects, fewer than one global "
            f"batch ({preset.global_batch})",
        )

    def __str__(self) -> str:
        empty_count = len(self.train.images) - len(self.train_images)
        return f"training: {self.train}; {empty_count:,} images without objects are not used\nheld out: {self.held_out}"

    def load_train(self, index: int, epoch: int) -> Example:
        """One training image, augmented. The random numbers depend on the image and the epoch, not on the worker."""
        rng = np.random.default_rng((self._preset.seed, epoch, index))
        return self._load(self.train_images[index], index, epoch, *_Orientation.draw(self._preset.images, rng))

    def load_held_out(self, index: int) -> Example:
        """One held-out image, as it is."""
        return self._load(self.held_out.images[index], index, 0, _Orientation(), self._preset.images.test_short_side)

    def train_batches(self, split: BatchSplit, first_step: int) -> Iterator[tuple[Batch]]:
        """This worker's pieces from a step on, to the end of the run. In an epoch every image comes once."""
        preset, count = self._preset, len(self.train_images)
        stream = ExampleStream(count, count, preset.step_count * preset.global_batch, preset.seed)
        for piece in read_pieces(stream, lambda place: self.load_train(*place), split, first_step=first_step):
            yield (Batch(**piece),)

    def held_out_batches(self, split: BatchSplit) -> Iterator[tuple[Batch, NDArray[np.bool_]]]:
        """This worker's share of the held-out images, and a bool mask of the real ones."""
        batches = evaluation_batches(
            len(self.held_out.images),
            self.load_held_out,
            batch=split.micro_batch,
            rank=split.rank,
            worker_count=split.worker_count,
        )
        for piece, is_real in batches:
            yield Batch(**piece), is_real

    def _load(self, image: CocoImage, number: int, epoch: int, orientation: _Orientation, short_side: int) -> Example:
        config = self._preset.images
        photo = read_photo(image)
        width, height = scaled_size(photo.size, short_side, config)
        pixels = np.asarray(photo.resize((width, height), Image.Resampling.BILINEAR))
        boxes, classes, masks = self._targets(image, (width / photo.width, height / photo.height))
        pixels, boxes, masks = orientation.apply(pixels, boxes, masks)
        square = np.zeros((config.size, config.size, 3), np.uint8)
        square[: pixels.shape[0], : pixels.shape[1]] = pixels
        return {
            "image": square,
            "size": np.array(pixels.shape[:2], np.float32),
            "boxes": boxes,
            "classes": classes,
            "masks": masks,
            "number": np.array(number, np.int32),
            "epoch": np.array(epoch, np.int32),
        }

    def _targets(
        self, image: CocoImage, scale: tuple[float, float]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.uint8]]:
        """Boxes, classes and masks, filled up with zeros. Of too many objects the largest are taken."""
        count = self._preset.images.object_count
        chosen = sorted(image.single_objects, key=_box_area, reverse=True)[:count]
        boxes = np.zeros((count, 4), np.float32)
        classes = np.zeros(count, np.int32)
        masks = np.zeros((count, MASK_SIZE, MASK_SIZE), np.uint8)
        for place, thing in enumerate(chosen):
            boxes[place] = np.array(thing.box) * (*scale, *scale)
            classes[place] = self.train.class_of[thing.category_id]
            where = f"annotation {thing.id} on {image.path}"
            masks[place] = cropped_mask(thing.segmentation, thing.box, MASK_SIZE, where=where)
        return boxes, classes, masks


def _box_area(thing: CocoObject) -> float:
    left, top, right, bottom = thing.box
    return (right - left) * (bottom - top)


class _Orientation:
    """One of the eight ways to put an image: quarter turns against the clock, then perhaps a mirror."""

    def __init__(self, turns: int = 0, is_mirrored: bool = False) -> None:
        self._turns, self._is_mirrored = turns, is_mirrored

    @classmethod
    def draw(cls, config: ImageConfig, rng: np.random.Generator) -> tuple[_Orientation, int]:
        """What training does to an image: its orientation, and its short side."""
        turns = int(rng.integers(4)) if config.turn else 0
        is_mirrored = config.flip and rng.random() < 0.5
        lowest, highest = config.short_sides
        return cls(turns, is_mirrored), int(rng.integers(lowest, highest + 1))

    def apply(
        self, pixels: Pixels, boxes: NDArray[np.float32], masks: NDArray[np.uint8]
    ) -> tuple[Pixels, NDArray[np.float32], NDArray[np.uint8]]:
        """The image ``[height, width, 3]``, boxes ``[n, 4]`` and masks ``[n, size, size]`` in this orientation."""
        is_real = boxes.any(axis=1, keepdims=True)
        for _ in range(self._turns):
            left, top, right, bottom = boxes.T
            width = pixels.shape[1]
            boxes = np.stack([top, width - right, bottom, width - left], axis=1)
            pixels, masks = np.rot90(pixels), np.rot90(masks, axes=(1, 2))
        if self._is_mirrored:
            left, top, right, bottom = boxes.T
            width = pixels.shape[1]
            boxes = np.stack([width - right, top, width - left, bottom], axis=1)
            pixels, masks = pixels[:, ::-1], masks[:, :, ::-1]
        return pixels, np.where(is_real, boxes, np.float32(0)), np.ascontiguousarray(masks)


def scaled_size(size: tuple[int, int], short_side: int, config: ImageConfig) -> tuple[int, int]:
    """Width and height of an image whose short side becomes ``short_side``, or its long side ``long_side`` if less."""
    scale = min(short_side / min(size), config.long_side / max(size))
    return max(round(size[0] * scale), 1), max(round(size[1] * scale), 1)


def read_photo(image: CocoImage) -> Image.Image:
    """The image in RGB.

    Raises:
      DataError: it cannot be read, or is of another size than the annotation file says.
    """
    return read_picture(image.path, where=str(image.path), size=(image.width, image.height))
