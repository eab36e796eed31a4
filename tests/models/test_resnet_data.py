"""Small images: how they are split, who sees which when, and how they change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.common.batches import BatchSplit
from models.resnet.arrays import (
    Dataset,
    held_out_batches,
    load_mnist_5k,
    normalize,
    stratified_split,
    train_batches,
)


def split_of(global_batch: int, *, rank: int = 0, worker_count: int = 1, micro_batch: int = 0) -> BatchSplit:
    return BatchSplit.make(global_batch, micro_batch, rank=rank, worker_count=worker_count)


@pytest.fixture(scope="module")
def digits() -> tuple[Dataset, Dataset]:
    return load_mnist_5k()


def test_split_is_stratified_disjoint_and_always_the_same(digits: tuple[Dataset, Dataset]) -> None:
    train, held_out = digits
    np.testing.assert_array_equal(np.bincount(train.labels), [400] * 10)
    np.testing.assert_array_equal(np.bincount(held_out.labels), [100] * 10)
    np.testing.assert_array_equal(np.bincount(train.labels[:50]), [5] * 10)
    both = np.concatenate([train.images, held_out.images]).reshape(5000, -1)
    assert len(np.unique(both, axis=0)) == 5000

    shuffled = np.random.default_rng(0).permutation(train.labels)
    train_index, held_out_index = stratified_split(shuffled)
    assert sorted([*train_index, *held_out_index]) == list(range(len(shuffled)))
    np.testing.assert_array_equal(np.bincount(shuffled[held_out_index]), [80] * 10)


def numbered_images(count: int) -> Dataset:
    """Images that carry their own number, so that a test can tell them apart."""
    numbers = np.arange(count, dtype=np.int32)
    images = np.zeros((count, 4, 4, 1), np.uint8)
    images[:, 1, 1, 0] = 255
    return Dataset(images, numbers)


def batches_of(dataset: Dataset, rank: int, worker_count: int, **changes: Any) -> list[tuple[Any, Any]]:
    settings: dict[str, Any] = {"seed": 3, "epoch": 0, "max_shift": 1, **changes}
    return list(train_batches(dataset, split_of(20, rank=rank, worker_count=worker_count), **settings))


@pytest.mark.parametrize("worker_count", [1, 2, 4, 5])
def test_epoch_is_shared_out_without_repeats(worker_count: int) -> None:
    dataset = numbered_images(100)
    shares = [batches_of(dataset, rank, worker_count) for rank in range(worker_count)]
    assert {len(share) for share in shares} == {5}
    assert {len(labels) for share in shares for _, labels in share} == {20 // worker_count}
    seen = [label for share in shares for _, labels in share for label in labels]
    assert sorted(seen) == list(range(100))


@pytest.mark.parametrize("worker_count", [2, 4, 5])
def test_global_batches_do_not_depend_on_the_worker_count(worker_count: int) -> None:
    dataset = numbered_images(103)  # three images are left over
    alone = batches_of(dataset, 0, 1)
    shares = [batches_of(dataset, rank, worker_count) for rank in range(worker_count)]
    for step, (images, labels) in enumerate(alone):
        np.testing.assert_array_equal(np.concatenate([share[step][0] for share in shares]), images)
        np.testing.assert_array_equal(np.concatenate([share[step][1] for share in shares]), labels)


def test_order_changes_with_epoch_and_seed_only() -> None:
    dataset = numbered_images(100)

    def order(**changes: Any) -> list[int]:
        return [label for _, labels in batches_of(dataset, 0, 1, **changes) for label in labels]

    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=4)


def test_shift_moves_an_image_and_fills_with_background() -> None:
    dataset = numbered_images(100)
    places = set()
    for images, _ in batches_of(dataset, 0, 1, max_shift=1):
        for image in images:
            ((row, column),) = np.argwhere(image[..., 0] > 0)
            places.add((int(row), int(column)))
    assert places == {(row, column) for row in range(3) for column in range(3)}

    ((images, labels), *_) = batches_of(dataset, 0, 1, max_shift=0)
    np.testing.assert_array_equal(images, normalize(dataset.images[labels]))


@pytest.mark.parametrize("worker_count", [1, 3, 4])
@pytest.mark.parametrize("batch", [7, 64])
def test_evaluation_sees_every_held_out_image_once(worker_count: int, batch: int) -> None:
    dataset = numbered_images(100)
    seen: list[int] = []
    for rank in range(worker_count):
        for images, labels, is_real in held_out_batches(dataset, batch=batch, rank=rank, worker_count=worker_count):
            assert len(images) == len(labels) == len(is_real) == batch
            seen += labels[is_real].tolist()
    assert sorted(seen) == list(range(100))
