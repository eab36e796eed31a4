"""The operators of Mask R-CNN: against a table that torchvision's C++ made, and against their definitions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.mask_rcnn.boxes import anchors, clip, decode, encode, generalized_overlaps, overlaps
from models.mask_rcnn.nms import non_maximum_suppression
from models.mask_rcnn.roi_align import pyramid_levels, roi_align

VALUE_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-5


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """How it was made: tests/models/programs/torchvision_table.py."""
    with np.load(Path(__file__).with_name("torchvision_operators.npz")) as stored:
        return dict(stored)


def random_boxes(rng: np.random.Generator, count: int, side: float) -> np.ndarray[Any, Any]:
    corners = rng.uniform(0, side, (count, 2, 2))
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1).astype(np.float32)


# --- RoIAlign --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_against_torchvision(table: dict[str, Any], aligned: bool) -> None:
    features = jnp.asarray(table["features"].transpose(0, 2, 3, 1))
    weights = table["weights"].transpose(0, 2, 3, 1)

    def run(features: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = roi_align([features], [4], table["boxes"], table["images"], size=7, aligned=aligned)
        return jnp.sum(values * weights), values

    gradient, values = jax.jit(jax.grad(run, has_aux=True))(features)
    wanted = table[f"gradient_aligned_{aligned}"].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(
        values, table[f"values_aligned_{aligned}"].transpose(0, 2, 3, 1), atol=VALUE_TOLERANCE, rtol=0
    )
    np.testing.assert_allclose(gradient, wanted, atol=GRADIENT_TOLERANCE * np.abs(wanted).max(), rtol=0)


def test_roi_align_of_a_pyramid_is_that_of_each_box_on_its_own_level() -> None:
    rng = np.random.default_rng(0)
    pyramid = [jnp.asarray(rng.normal(size=(3, *shape, 5)), jnp.float32) for shape in ((16, 12), (8, 6), (4, 3))]
    strides, boxes = [4, 8, 16], random_boxes(rng, 20, 60)
    images, levels = rng.integers(0, 3, 20), rng.integers(0, 3, 20)
    align = partial(roi_align, size=3, aligned=True)
    together = align(pyramid, strides, boxes, images, levels)
    for box, image, level, values in zip(boxes, images, levels, together, strict=True):
        alone = align([pyramid[level][image : image + 1]], strides[level : level + 1], box[None], np.zeros(1, int))
        np.testing.assert_allclose(values, alone[0], atol=1e-6)


def test_aligned_samples_of_a_ramp_are_the_middles_of_its_pixels() -> None:
    ramp = jnp.broadcast_to(jnp.arange(16.0)[None, None, :, None], (1, 16, 16, 1))
    values = roi_align([ramp], [1], np.float32([[2, 2, 10, 10]]), np.zeros(1, int), size=4, aligned=True)
    np.testing.assert_allclose(values[0, 0, :, 0], [2.5, 4.5, 6.5, 8.5], atol=1e-6)


def test_roi_align_reads_half_precision_and_sums_in_float32() -> None:
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(1, 16, 16, 8)), jnp.bfloat16)
    boxes, images = random_boxes(rng, 5, 16), np.zeros(5, int)

    def total(features: jax.Array) -> jax.Array:
        values = roi_align([features], [1], boxes, images, size=7, aligned=True)
        assert values.dtype == jnp.float32
        return jnp.sum(values)

    gradient, exact = jax.grad(total)(features), jax.grad(total)(features.astype(jnp.float32))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient.astype(jnp.float32), exact, rtol=2**-8)


def test_levels_are_those_of_the_paper() -> None:
    """224 pixels at the third of four levels, and one level per doubling."""
    sides = np.array([1, 111, 112, 223, 224, 447, 448, 5000])
    boxes = np.float32([[0, 0, side, side] for side in sides])
    assert pyramid_levels(boxes, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# --- non-maximum suppression -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_nms_keeps_the_boxes_that_torchvision_keeps(table: dict[str, Any], threshold: float) -> None:
    order = np.argsort(-table["nms_scores"], kind="stable")
    stays = non_maximum_suppression(table["nms_boxes"][order], np.ones(len(order), bool), threshold)
    np.testing.assert_array_equal(order[np.asarray(stays)], table[f"kept_{threshold}"])


def kept_one_by_one(boxes: Any, is_real: Any, threshold: float, groups: Any) -> list[int]:
    """The plain version: float32 overlaps, one box after the other."""
    kept: list[int] = []
    table = np.asarray(overlaps(boxes, boxes))
    for box in range(len(boxes)):
        rivals = [other for other in kept if groups[other] == groups[box]]
        if is_real[box] and not any(table[rivals, box] > threshold):
            kept.append(box)
    return kept


def test_nms_with_groups_and_padding_in_a_batch() -> None:
    rng = np.random.default_rng(0)
    boxes = np.stack([random_boxes(rng, 60, 50) for _ in range(4)])
    is_real, groups = rng.uniform(size=(4, 60)) < 0.8, rng.integers(0, 3, (4, 60))
    stays = jax.jit(jax.vmap(lambda *image: non_maximum_suppression(*image[:2], 0.2, image[2])))(boxes, is_real, groups)
    for image in range(4):
        kept = kept_one_by_one(boxes[image], is_real[image], 0.2, groups[image])
        assert np.flatnonzero(stays[image]).tolist() == kept


def test_nms_of_a_chain_takes_as_many_rounds_as_it_needs() -> None:
    """Each box overlaps the next one only, so every second one stays, which is decided from the first to the last."""
    left = np.arange(50, dtype=np.float32)[:, None] * 5
    boxes = np.concatenate([left, left * 0, left + 10, left * 0 + 10], axis=1)
    stays = non_maximum_suppression(boxes, np.ones(50, bool), 0.3)
    assert np.flatnonzero(stays).tolist() == list(range(0, 50, 2))


def test_nms_of_nothing_real() -> None:
    assert not non_maximum_suppression(np.zeros((8, 4), np.float32), np.zeros(8, bool), 0.5).any()


# --- boxes -----------------------------------------------------------------------------------------------------------


def test_overlaps_of_known_boxes() -> None:
    a = np.float32([[0, 0, 10, 10], [0, 0, 0, 0]])
    b = np.float32([[0, 0, 10, 10], [5, 0, 15, 10], [10, 0, 20, 10], [0, 0, 0, 0]])
    np.testing.assert_allclose(overlaps(a, b), [[1, 1 / 3, 0, 0], [0, 0, 0, 0]], rtol=1e-6)


def test_generalized_overlap_falls_with_the_distance() -> None:
    box = np.float32([0, 0, 10, 10])
    others = np.float32([[0, 0, 10, 10], [5, 0, 15, 10], [10, 0, 20, 10], [90, 0, 100, 10]])
    np.testing.assert_allclose(generalized_overlaps(box, others), [1, 1 / 3, 0, -0.8], atol=1e-6)


def test_decode_is_the_inverse_of_encode() -> None:
    rng = np.random.default_rng(0)
    boxes, references = (random_boxes(rng, 50, 100) + np.float32([0, 0, 1, 1]) for _ in range(2))
    weights = (10.0, 10.0, 5.0, 5.0)
    np.testing.assert_allclose(decode(encode(boxes, references, weights), references, weights), boxes, atol=1e-3)
    grown = decode(np.float32([0, 0, 99, 99]), np.float32([0, 0, 16, 16]), (1.0, 1.0, 1.0, 1.0))
    np.testing.assert_allclose(grown, [-492, -492, 508, 508], rtol=1e-5)


def test_clip_keeps_boxes_inside_of_an_image() -> None:
    assert clip(np.float32([[-5, -5, 50, 50]]), np.float32([30, 40])).tolist() == [[0, 0, 40, 30]]


def test_anchors_are_those_of_the_published_code() -> None:
    """Detectron's and torchvision's three shapes of 32 pixels."""
    grid = anchors((2, 3), 4, 32, (0.5, 1.0, 2.0))
    assert grid.shape == (18, 4)
    assert grid[:3].tolist() == [[-23, -11, 23, 11], [-16, -16, 16, 16], [-11, -23, 11, 23]]
    np.testing.assert_array_equal(grid[3:6] - grid[:3], np.tile([4, 0, 4, 0], (3, 1)))
    np.testing.assert_array_equal(grid[9:12] - grid[:3], np.tile([0, 4, 0, 4], (3, 1)))
