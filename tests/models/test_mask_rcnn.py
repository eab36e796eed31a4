"""Mask R-CNN's network, samples, losses and detections against their definitions. Parity: test_mask_rcnn_parity.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.common.errors import SettingsError
from models.mask_rcnn.batch import MASK_SIZE, Batch
from models.mask_rcnn.detect import DetectionConfig, best_boxes, detect
from models.mask_rcnn.loss import LossConfig, compare_boxes, losses, roi_losses, smooth_l1
from models.mask_rcnn.model import SMALL, MaskRCNN, ModelConfig, normalize
from models.mask_rcnn.paste import paste_mask
from models.mask_rcnn.proposals import ProposalConfig, Proposals, propose
from models.mask_rcnn.targets import (
    Objects,
    SampleConfig,
    Samples,
    draw,
    mask_targets,
    match,
    sample_anchors,
    sample_rois,
)
from models.resnet.model import Frozen
from models.resnet.model import ModelConfig as BackboneConfig

SIDE = 64
BATCH, STEPS = 8, 120
TINY = replace(SMALL, class_count=2, pyramid_channels=16, hidden_size=32, mask_channels=16, mask_layers=2)
LOSS = LossConfig(ProposalConfig(100, 50), SampleConfig(anchor_count=32, roi_count=16))
DETECTION = DetectionConfig(ProposalConfig(100, 50), candidate_count=60, count=20)


def make_batch(count: int, seed: int = 0) -> Batch:
    """Bright rectangles (class 1) and ellipses (class 2) on noise, two in an image, in real areas of 64 x 56 pixels."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 60, (count, SIDE, SIDE, 3)).astype(np.uint8)
    images[:, :, 56:] = 0
    boxes, classes = np.zeros((count, 4, 4), np.float32), np.zeros((count, 4), np.int32)
    masks = np.zeros((count, 4, MASK_SIZE, MASK_SIZE), np.uint8)
    middle = (np.arange(MASK_SIZE) + 0.5) / MASK_SIZE * 2 - 1
    for image in range(count):
        for number, top in enumerate((2, 34)):
            x, y = rng.integers(0, 28), top + rng.integers(0, 4)
            width, height = rng.integers(14, 27, 2)
            kind = int(rng.integers(1, 3))
            boxes[image, number], classes[image, number] = [x, y, x + width, y + height], kind
            masks[image, number] = 1 if kind == 1 else middle[:, None] ** 2 + middle**2 <= 1
            places = np.ix_(*((np.arange(side) * MASK_SIZE) // side for side in (height, width)))
            images[image, y : y + height, x : x + width] += 150 * masks[image, number][places][..., None]
    size = np.tile(np.float32([SIDE, 56]), (count, 1))
    return Batch(images, size, boxes, classes, masks, np.arange(count, dtype=np.int32), np.zeros(count, np.int32))


def take(batch: Batch, images: slice) -> Batch:
    return jax.tree.map(lambda array: array[images], batch)


def drawn(config: ModelConfig) -> MaskRCNN:
    """A network with initial weights, drawn by one program."""
    return nnx.jit(lambda: MaskRCNN(config, rngs=nnx.Rngs(jax.random.key(0, impl="rbg"))))()


def counts(config: ModelConfig) -> tuple[int, int]:
    """The trained parameters, and all values that come with the network."""
    model = nnx.eval_shape(lambda: MaskRCNN(config, rngs=nnx.Rngs(0)))
    trained, everything = nnx.state(model, nnx.Param), nnx.state(model)
    return tuple(sum(leaf.size for leaf in jax.tree.leaves(state)) for state in (trained, everything))


# --- network ---------------------------------------------------------------------------------------------------------


def test_parameter_count_is_that_of_the_published_network() -> None:
    """44.40 M with gammas and betas, of which 44.13 M are trained: 176.5 MB of gradients."""
    trained, everything = counts(ModelConfig())
    statistics = 2 * 26_560  # a mean and a variance per normalised channel
    assert trained == 44_125_173
    assert everything - statistics == 44_400_693
    assert counts(replace(ModelConfig(), frozen_parts=0))[0] == trained + 222_400
    assert counts(SMALL)[0] == 1_269_931


def test_frozen_parts_are_the_stem_and_the_first_stages() -> None:
    backbone = BackboneConfig(architecture="tiny", norm="group", group_count=8)
    for parts in range(4):
        config = replace(TINY, backbone=backbone, frozen_parts=parts)
        model = nnx.eval_shape(lambda config=config: MaskRCNN(config, rngs=nnx.Rngs(0)))
        frozen = {path[1:3] for path, _ in nnx.to_flat_state(nnx.state(model, Frozen))}
        wanted = [("stem_conv", "kernel"), ("stem_norm", "scale"), ("stem_norm", "bias")] if parts else []
        assert frozen == {*wanted, *(("blocks", block) for block in range(parts - 1))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchor_sizes": (32, 64)}, "anchor_sizes has 2 levels; the tiny pyramid has 4"),
        ({"frozen_parts": 5}, "frozen_parts is 5; it must be 0 to 4"),
        ({"backbone": BackboneConfig(architecture="tiny")}, "norm is batch"),
        ({"class_count": 0}, "class_count is 0"),
    ],
)
def test_impossible_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_float32_weights_answers_and_losses(dtype: Any) -> None:
    config = replace(TINY, backbone=replace(TINY.backbone, dtype=dtype))
    batch = make_batch(2)

    def run() -> Any:
        model = MaskRCNN(config, rngs=nnx.Rngs(0))
        levels = model.levels(batch.image, batch.size)
        boxes = jnp.zeros((2, 5, 4))
        answers = (model.score_anchors(levels), model.classify(levels, boxes), model.segment(levels, boxes))
        return levels, answers, losses(model, batch, LOSS, 0), nnx.state(model)

    levels, *rest = jax.eval_shape(run)
    assert {level.dtype for level in levels} == {jnp.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(rest)} == {jnp.dtype("float32")}


def test_padding_is_black_after_normalisation_whatever_it_holds() -> None:
    images = np.full((1, 4, 4, 3), 255, np.uint8)
    pixels = normalize(images, np.float32([[2, 3]]))
    np.testing.assert_allclose(pixels[0, :2, :3, 0], (1 - 0.485) / 0.229, rtol=1e-6)
    assert not pixels[0, 2:].any()
    assert not pixels[0, :, 3:].any()


# --- matches and samples ---------------------------------------------------------------------------------------------


def test_a_box_is_on_the_object_that_it_overlaps_most() -> None:
    boxes = np.float32([[0, 0, 10, 10], [0, 0, 10, 4], [50, 50, 60, 60], [100, 0, 110, 10]])
    objects = Objects(np.float32([[0, 0, 10, 10], [54, 50, 64, 60], [0, 0, 10, 10]]), np.int32([1, 2, 0]))
    matches = match(boxes, objects)
    assert matches.objects[:3].tolist() == [0, 0, 1]
    np.testing.assert_allclose(matches.overlaps, [1, 0.4, 6 / 14, 0], rtol=1e-6)
    assert matches.is_best.tolist() == [True, False, True, False]
    nothing = match(boxes, Objects(np.zeros((3, 4), np.float32), np.zeros(3, np.int32)))
    assert nothing.overlaps.tolist() == [-1] * 4
    assert not nothing.is_best.any()


@pytest.mark.parametrize(("positives", "negatives"), [(40, 60), (3, 97), (3, 4), (0, 100), (0, 0), (100, 0)])
def test_draw_takes_as_many_as_it_may(positives: int, negatives: int) -> None:
    is_positive = np.arange(100) < positives
    is_negative = (np.arange(100) >= positives) & (np.arange(100) < positives + negatives)
    indices, is_real = draw(jax.random.key(0), is_positive, is_negative, 20, 5)
    chosen = np.asarray(indices)[np.asarray(is_real)]
    assert len(set(chosen.tolist())) == len(chosen) == min(20, min(positives, 5) + negatives)
    assert is_positive[chosen].sum() == min(positives, 5)
    assert is_positive[chosen[: min(positives, 5)]].all(), "positive ones first"
    assert (is_positive | is_negative)[chosen].all()


def test_draw_is_fair() -> None:
    everything = np.ones(50, bool)
    keys = jax.random.split(jax.random.key(0), 2000)
    indices, _ = jax.vmap(lambda key: draw(key, everything, ~everything, 10, 10))(keys)
    times = np.bincount(np.asarray(indices).ravel(), minlength=50)
    assert abs(times - 400).max() < 5 * np.sqrt(400)


def test_anchors_between_the_two_overlaps_and_in_the_padding_are_left_out() -> None:
    anchors = np.float32([[0, 0, 10, 10], [0, 0, 10, 5], [0, 0, 10, 1], [40, 0, 50, 10], [200, 0, 210, 10]])
    objects = Objects(np.float32([[0, 0, 10, 9], [0, 0, 0, 0]]), np.int32([5, 0]))
    samples = sample_anchors(jax.random.key(0), anchors, np.float32([100, 100]), objects, SampleConfig(anchor_count=4))
    assert sorted(samples.indices[:3].tolist()) == [0, 2, 3]
    assert samples.classes.tolist() == [5, 0, 0, 0]
    assert samples.is_real.tolist() == [True, True, True, False]
    assert samples.object_boxes[0].tolist() == [0, 0, 10, 9]


def test_rois_are_proposals_and_the_objects_themselves() -> None:
    proposals = np.float32([[0, 0, 10, 10], [30, 30, 40, 40], [0, 0, 0, 0]])
    objects = Objects(np.float32([[0, 0, 10, 9], [60, 60, 70, 70], [0, 0, 0, 0]]), np.int32([5, 7, 0]))
    config = SampleConfig(roi_count=16, roi_positive_share=0.25)
    samples = sample_rois(jax.random.key(0), proposals, np.array([True, True, False]), objects, config)
    assert sorted(samples.classes.tolist()) == [0, 0, 0, 5, 5, 7]
    assert samples.is_real.tolist() == [True] * 4 + [False] * 2
    assert samples.boxes[samples.classes == 7].tolist() == [[60, 60, 70, 70]]
    assert samples.boxes[3].tolist() == [30, 30, 40, 40]


def samples_of(boxes: Any, object_boxes: Any, classes: Any, objects: Any = None) -> Samples:
    boxes, classes = jnp.asarray(boxes, jnp.float32), jnp.asarray(classes, jnp.int32)
    places = jnp.arange(len(boxes))
    number = jnp.zeros(len(boxes), int) if objects is None else jnp.asarray(objects)
    return Samples(places, boxes, places >= 0, classes, number, jnp.asarray(object_boxes, jnp.float32))


def test_mask_targets_are_what_a_box_sees_of_its_object() -> None:
    """A mask whose left half is on the object, seen by boxes that are shifted, larger, and somewhere else."""
    masks = np.zeros((2, MASK_SIZE, MASK_SIZE), np.uint8)
    masks[1, :, : MASK_SIZE // 2] = 1
    boxes = [[10, 10, 30, 50], [20, 10, 40, 50], [0, 10, 40, 50], [10, 10, 20, 20], [60, 60, 70, 70]]
    samples = samples_of(boxes, [[10, 10, 30, 50]] * 5, [1] * 5, [1] * 5)
    targets = mask_targets(masks, samples, 28)
    columns = [np.asarray(target).mean(axis=0) for target in targets]
    np.testing.assert_array_equal(columns[0], np.arange(28) < 14)
    np.testing.assert_array_equal(columns[1], np.zeros(28))
    np.testing.assert_array_equal(columns[2], (np.arange(28) >= 7) & (np.arange(28) < 14))
    np.testing.assert_array_equal(columns[3], np.ones(28))
    np.testing.assert_array_equal(columns[4], np.zeros(28))


# --- losses ----------------------------------------------------------------------------------------------------------


def test_smooth_l1_has_a_parabola_in_its_middle() -> None:
    x = np.float32([-2, -0.5, 0, 0.5, 2])
    np.testing.assert_allclose(smooth_l1(x, 1), [1.5, 0.125, 0, 0.125, 1.5])
    np.testing.assert_allclose(smooth_l1(x, 0.5), [1.75, 0.25, 0, 0.25, 1.75])
    np.testing.assert_array_equal(smooth_l1(x, 0), np.abs(x))


@pytest.mark.parametrize("kind", ["smooth_l1", "giou"])
def test_box_losses_are_least_at_the_object(kind: Any) -> None:
    boxes, wanted = [[[0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 0, 0]]], [[[5, 0, 15, 20], [0, 0, 10, 10], [0, 0, 0, 0]]]
    samples = jax.tree.map(lambda array: array[None], samples_of(boxes[0], wanted[0], [1, 0, 0]))
    weights = (10.0, 10.0, 5.0, 5.0)

    def total(deltas: jax.Array) -> jax.Array:
        return jnp.sum(compare_boxes(deltas, samples, weights, kind, 1.0))

    exact = jnp.zeros((1, 3, 4)).at[0, 0].set(jnp.array([5.0, 5, 0, 5 * np.log(2)]))
    value, gradient = jax.value_and_grad(total)(exact + 0.5)
    assert total(exact) == pytest.approx(0, abs=1e-6)
    assert value > 0.05
    assert jnp.isfinite(gradient).all()
    assert not gradient[0, 1:].any(), "background and filling have no box"


def test_label_smoothing_spreads_a_share_over_all_classes() -> None:
    samples = jax.tree.map(lambda array: array[None], samples_of(np.zeros((16, 4)), np.zeros((16, 4)), [0] * 16))
    logits, deltas = jnp.zeros((1, 16, 5)).at[..., 0].set(3.0), jnp.zeros((1, 16, 5, 4))
    smoothed, _ = roi_losses(logits, deltas, samples, (1, 1, 1, 1), replace(LOSS, label_smoothing=0.1))
    log_probabilities = jax.nn.log_softmax(logits[0, 0])
    np.testing.assert_allclose(smoothed, -0.9 * log_probabilities[0] - 0.1 * log_probabilities.mean(), rtol=1e-6)


@pytest.fixture(scope="module")
def split_model() -> Any:
    return nnx.split(drawn(TINY))


@pytest.fixture(scope="module")
def compute_losses(split_model: Any) -> Any:
    graphdef, _ = split_model
    return jax.jit(lambda state, batch: losses(nnx.merge(graphdef, state), batch, LOSS, 0))


@pytest.fixture(scope="module")
def compute_gradients(split_model: Any) -> Any:
    """From the network's state and a batch of BATCH images to the gradients and the losses."""
    graphdef, _ = split_model

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def run(state: Any, batch: Batch) -> Any:
        values = losses(nnx.merge(graphdef, state), batch, LOSS, 0)
        return values.total, values

    return run


def test_losses_are_means_over_images_on_any_number_of_workers(split_model: Any, compute_losses: Any) -> None:
    state, batch = split_model[1], make_batch(4)
    whole = compute_losses(state, batch)
    assert all(value > 0 for value in whole)
    halves = [compute_losses(state, take(batch, slice(first, first + 2))) for first in (0, 2)]
    np.testing.assert_allclose(np.mean(halves, axis=0), whole, rtol=1e-5)


def test_samples_depend_on_the_epoch(split_model: Any, compute_losses: Any) -> None:
    batch = make_batch(2)
    later = compute_losses(split_model[1], replace(batch, epoch=batch.epoch + 1))
    assert later.objectness != compute_losses(split_model[1], batch).objectness


def test_images_without_objects_have_losses_and_gradients(split_model: Any, compute_gradients: Any) -> None:
    batch = make_batch(BATCH)
    empty = replace(batch, classes=0 * batch.classes, boxes=0 * batch.boxes, masks=0 * batch.masks)
    grads, values = compute_gradients(split_model[1], empty)
    assert values.objectness > 0
    assert values.classes > 0
    assert values.anchors == values.boxes == values.masks == 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


# --- proposals and detections ----------------------------------------------------------------------------------------


def test_proposals_are_the_best_anchors_that_overlap_little() -> None:
    anchors = [
        jnp.float32([[0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30], [90, 90, 95, 95]]),
        jnp.float32([[0, 0, 10, 10]]),
    ]
    logits = [jnp.float32([[1.0, 2.0, 0.5, 9.0]]), jnp.float32([[3.0]])]
    deltas = [jnp.zeros((1, 4, 4)), jnp.zeros((1, 1, 4))]
    size = np.float32([[50, 50]])
    found = jax.jit(lambda *answers: propose(*answers, anchors, size, ProposalConfig(4, 4)))(logits, deltas)
    assert found.is_real.tolist() == [[True, True, True, False]]
    # The other level's box stays, though it overlaps; the one in the padding has no area left.
    assert found.boxes[0, :3].tolist() == [[0, 0, 10, 10], [1, 0, 11, 10], [20, 20, 30, 30]]


def test_a_detection_is_the_best_of_its_class_in_its_place() -> None:
    boxes = jnp.float32([[[0, 0, 10, 10], [1, 0, 11, 10], [40, 40, 60, 60], [0, 0, 10, 10]]])
    logits = jnp.log(jnp.float32([[[0.1, 0.8, 0.1], [0.05, 0.9, 0.05], [0.5, 0.01, 0.49], [0.01, 0.98, 0.01]]]))
    proposals = Proposals(boxes, jnp.array([[True, True, True, False]]))
    config, size = DetectionConfig(count=4), np.float32([[50, 50]])
    found, scores, classes = jax.jit(lambda *answers: best_boxes(*answers, size, (1, 1, 1, 1), config))(
        logits, jnp.zeros((1, 4, 3, 4)), proposals
    )
    assert classes.tolist() == [[1, 2, 2, 0]]
    np.testing.assert_allclose(scores, [[0.9, 0.49, 0.1, 0]], rtol=1e-5)
    assert found[0].tolist() == [[1, 0, 11, 10], [40, 40, 50, 50], [0, 0, 10, 10], [0, 0, 0, 0]]


@pytest.mark.timeout(300)
def test_a_small_network_learns_to_find_and_to_draw_objects(split_model: Any, compute_gradients: Any) -> None:
    """24 images by heart: the boxes, the classes, and the shapes, by which alone the classes differ."""
    graphdef, state = split_model
    data = make_batch(24)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(4e-3, STEPS)))

    @jax.jit
    def update(state: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state, state)
        return optax.apply_updates(state, updates), opt_state

    opt_state = optimizer.init(state)
    for step in range(STEPS):
        first = step * BATCH % len(data.number)
        epoch = step * BATCH // len(data.number)
        batch = replace(take(data, slice(first, first + BATCH)), epoch=np.full(BATCH, epoch, np.int32))
        grads, _ = compute_gradients(state, batch)
        state, opt_state = update(state, opt_state, grads)
    assert compute_gradients._cache_size() == 1, "all batches run the same program"

    shown = take(data, slice(0, 8))
    found = jax.jit(lambda state: detect(nnx.merge(graphdef, state), shown.image, shown.size, DETECTION))(state)
    right = 0
    for image in range(8):
        for number in range(2):
            wanted = paste_mask(shown.masks[image, number], shown.boxes[image, number], SIDE, SIDE)
            for box, kind, mask, score in zip(
                *(np.asarray(array[image]) for array in (found.boxes, found.classes, found.masks, found.scores)),
                strict=True,
            ):
                pasted = paste_mask(mask, box, SIDE, SIDE)
                overlap = (wanted & pasted).sum() / (wanted | pasted).sum()
                right += bool(score > 0.5 and kind == shown.classes[image, number] and overlap > 0.7)
    assert 13 <= right <= 16


# --- pasting ---------------------------------------------------------------------------------------------------------


def test_a_full_mask_is_the_pixels_of_its_box() -> None:
    for box, rows, columns in [
        ([3, 2, 9, 7], slice(2, 7), slice(3, 9)),
        ([2.6, 1.4, 9.4, 7.4], slice(1, 7), slice(3, 9)),
        ([-5, -5, 100, 4], slice(0, 4), slice(0, 12)),
        ([20, 20, 30, 30], slice(0, 0), slice(0, 0)),
        ([5, 5, 5, 5], slice(0, 0), slice(0, 0)),
    ]:
        wanted = np.zeros((10, 12), bool)
        wanted[rows, columns] = True
        np.testing.assert_array_equal(paste_mask(np.ones((28, 28)), np.float32(box), 10, 12), wanted)


def test_a_pasted_disc_has_its_area() -> None:
    middle = (np.arange(28) + 0.5) / 28 * 2 - 1
    disc = (middle[:, None] ** 2 + middle**2 <= 1).astype(np.float32)
    pasted = paste_mask(disc, np.float32([10, 20, 110, 70]), 100, 120)
    assert pasted.sum() == pytest.approx(np.pi * 50 * 25, rel=0.01)
    assert not pasted[:20].any()
    assert not pasted[:, 110:].any()
