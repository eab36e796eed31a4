"""Mask R-CNN against torchvision: the same weights give the same features, answers, losses, gradients, detections."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.common.errors import CheckpointError
from models.mask_rcnn.batch import MASK_SIZE, Batch
from models.mask_rcnn.detect import DetectionConfig, detect
from models.mask_rcnn.loss import (
    LossConfig,
    Losses,
    anchor_losses,
    compare_masks,
    draw_samples,
    losses,
    roi_losses,
)
from models.mask_rcnn.model import CHANNEL_MEAN, CHANNEL_STD, MASK_BINS, MaskRCNN, ModelConfig
from models.mask_rcnn.proposals import ProposalConfig, propose
from models.mask_rcnn.targets import SampleConfig, mask_targets
from models.mask_rcnn.torch_weights import from_torch_layout, load_torch_weights, torch_name
from models.resnet.model import Frozen
from tests.models.torchvision_import import require_torchvision

torchvision = require_torchvision()
torch = pytest.importorskip("torch")
detection = torchvision.models.detection

# Of a gradient, the whole array: rounding puts single units to the other side of ReLU's kink. Pixels that change by a
# ten-millionth change our own gradient of one convolution by 1.5e-3 of its norm, and others by 1e-6.
TOLERANCE, LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-4, 4e-3
SIDE, CLASSES = 128, 81
SIZES = np.float32([[128, 128], [104, 120]])
CONFIG = ModelConfig()
LOSS = LossConfig(
    ProposalConfig(level_count=300, image_count=100),
    SampleConfig(anchor_count=64, roi_count=16, roi_positive_share=0.25),
    box_beta=1 / 9,
)
DETECTION = DetectionConfig(ProposalConfig(level_count=200, image_count=100), candidate_count=2000, count=30)
# Each program runs once or twice, so time spent on optimizing it would be lost.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module", autouse=True)
def torch_operators() -> Iterator[None]:
    """Plain Python in place of torchvision's operators in C++, which need not be there."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torchvision.ops.boxes, "nms", nms)
    # Their RoIAlign in Python, without the compiler that it calls.
    module = importlib.import_module("torchvision.ops.roi_align")
    patch.setattr(module, "_roi_align", module._roi_align.__wrapped__)
    yield
    patch.undo()


def nms(boxes: Any, scores: Any, threshold: float) -> Any:
    """One box after the other."""
    table = torchvision.ops.box_iou(boxes, boxes)
    kept: list[int] = []
    for box in torch.argsort(scores, descending=True, stable=True).tolist():
        if not kept or table[kept, box].max() <= threshold:
            kept.append(box)
    return torch.tensor(kept, dtype=torch.int64)


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, SIDE, SIDE, 3)).astype(np.uint8)
    # Large spots, so that features differ from place to place.
    images = (images // 4 + rng.integers(0, 192, (2, 8, 8, 3)).repeat(16, 1).repeat(16, 2)).astype(np.uint8)
    for image, (height, width) in zip(images, SIZES.astype(int), strict=True):
        image[height:], image[:, width:] = 0, 0
    boxes = np.zeros((2, 4, 4), np.float32)
    boxes[0, :3] = [[8, 8, 64, 64], [60, 20, 116, 48], [30, 70, 86, 126]]
    boxes[1, :2] = [[10, 40, 66, 96], [90, 10, 118, 66]]
    classes = np.int32([[3, 80, 17, 0], [17, 1, 0, 0]])
    masks = (rng.uniform(size=(2, 4, 8, 8)) < 0.6).repeat(MASK_SIZE // 8, 2).repeat(MASK_SIZE // 8, 3)
    return Batch(images, SIZES, boxes, classes, masks.astype(np.uint8), np.int32([0, 1]), np.int32([0, 0]))


def torch_images(batch: Batch) -> Any:
    """What torchvision's own transformation makes of the images, without its scaling."""
    pixels = (np.asarray(batch.image) / np.float32(255) - np.float32(CHANNEL_MEAN)) / np.float32(CHANNEL_STD)
    for image, (height, width) in zip(pixels, SIZES.astype(int), strict=True):
        image[height:], image[:, width:] = 0, 0
    tensors = torch.tensor(pixels.transpose(0, 3, 1, 2), dtype=torch.float32)
    return detection.image_list.ImageList(tensors, [tuple(size) for size in SIZES.astype(int).tolist()])


@pytest.fixture(scope="module")
def theirs(batch: Batch) -> Any:
    """Their network with random weights, conditioned: blocks that add little, units that are rarely near the kink of
    ReLU, as in the tests of ResNet-50; and heads that are sure of their answers."""
    torch.manual_seed(0)
    model = detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=CLASSES)
    body = model.backbone.body
    with torch.no_grad():
        for name, value in body.state_dict().items():
            if name.endswith("bn3.weight"):
                value.fill_(0.2)
            elif name.endswith(("bn1.bias", "bn2.bias")):
                value.fill_(3.0)
        for module in body.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        body.train()(torch_images(batch).tensors)
        for layer in model.roi_heads.mask_head:
            layer[0].bias.fill_(1.0)
        model.rpn.head.cls_logits.weight.mul_(20)
        model.rpn.head.bbox_pred.weight.mul_(5)
        model.roi_heads.box_predictor.cls_score.weight.mul_(30)
    return model.eval()


@pytest.fixture(scope="module")
def ours(theirs: Any) -> Any:
    """The graph of our network, its trained and its frozen weights."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MaskRCNN(CONFIG, rngs=nnx.Rngs(0))))
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state))
    load_torch_weights(model, weights_of(theirs))
    return nnx.split(model, nnx.Param, Frozen)


def weights_of(model: Any) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def assert_near(actual: Any, wanted: Any, tolerance: float = TOLERANCE, what: str = "") -> None:
    """To a share of the largest value."""
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(actual, wanted, atol=tolerance * np.abs(wanted).max(), rtol=0, err_msg=what)


def last_axis(tensor: Any) -> Any:
    """From torch's layout of maps to ours."""
    return np.moveaxis(tensor.detach().numpy(), 1, -1)


def test_features_answers_and_anchors(ours: Any, theirs: Any, batch: Batch) -> None:
    rng = np.random.default_rng(1)
    starts = rng.uniform(0, 90, (2, 12, 2))
    boxes = np.concatenate([starts, np.minimum(starts + rng.uniform(5, 100, (2, 12, 2)), 104)], -1).astype(np.float32)
    boxes[0, :2] = [[0, 0, 128, 128], [0, 0, 104, 104]]

    @partial(jax.jit, compiler_options=QUICK)
    def run(trained: Any, frozen: Any) -> Any:
        model = nnx.merge(ours[0], trained, frozen)
        levels = model.levels(batch.image, batch.size)
        return (
            levels,
            model.score_anchors(levels),
            model.anchors(levels),
            model.classify(levels, boxes),
            model.segment(levels, boxes),
        )

    levels, (logits, deltas), anchors, (classes, box_deltas), masks = run(*ours[1:])
    images = torch_images(batch)
    with torch.no_grad():
        features = theirs.backbone(images.tensors)
        head = theirs.rpn.head(list(features.values()))
        shapes = [tuple(size) for size in images.image_sizes]
        given = [torch.tensor(image) for image in boxes]
        pooled = theirs.roi_heads.box_head(theirs.roi_heads.box_roi_pool(features, given, shapes))
        predicted = theirs.roi_heads.box_predictor(pooled)
        drawn = theirs.roi_heads.mask_predictor(
            theirs.roi_heads.mask_head(theirs.roi_heads.mask_roi_pool(features, given, shapes))
        )
    for level, feature in zip(levels, features.values(), strict=True):
        assert_near(level, last_axis(feature))
    assert_near(jnp.concatenate(anchors), theirs.rpn.anchor_generator(images, list(features.values()))[0], 0)
    for level in range(5):
        assert_near(logits[level], last_axis(head[0][level]).reshape(2, -1))
        assert_near(deltas[level], last_axis(head[1][level]).reshape(2, -1, 4))
    assert_near(classes, predicted[0].reshape(2, 12, CLASSES))
    assert_near(box_deltas, predicted[1].reshape(2, 12, CLASSES, 4))
    assert_near(masks, last_axis(drawn).reshape(2, 12, 28, 28, CLASSES))


def torch_losses(theirs: Any, batch: Batch, anchors: Any, rois: Any, targets: Any) -> Any:
    """The mean over the images of torchvision's five losses, for the samples that we drew."""
    images = torch_images(batch)
    features = theirs.backbone(images.tensors)
    heads, rpn = theirs.roi_heads, theirs.rpn
    as_torch = partial(jax.tree.map, lambda array: torch.tensor(np.asarray(array)))
    anchors, rois, targets = as_torch(anchors), as_torch(rois), as_torch(targets)
    logits, deltas = detection.rpn.concat_box_prediction_layers(*rpn.head(list(features.values())))
    logits, deltas = logits.reshape(2, -1), deltas.reshape(2, -1, 4)
    all_anchors = rpn.anchor_generator(images, list(features.values()))
    truth = [
        {"boxes": torch.tensor(boxes[classes > 0]), "labels": torch.tensor(classes[classes > 0]).long()}
        for boxes, classes in zip(batch.boxes, batch.classes, strict=True)
    ]
    labels, matched = rpn.assign_targets_to_anchors(all_anchors, truth)

    def of_image(image: int) -> Any:
        wanted = rpn.box_coder.encode([matched[image]], [all_anchors[image]])
        chosen = torch.zeros_like(labels[image]).index_fill(0, anchors.indices[image].long(), 1)
        assert (labels[image][anchors.indices[image].long()] == (anchors.classes[image] > 0)).all(), "the matches agree"
        rpn.fg_bg_sampler = lambda labels: (
            [(chosen > 0) & (labels[0] == 1)],
            [(chosen > 0) & (labels[0] == 0)],
        )
        rpn_losses = rpn.compute_loss(logits[image][:, None], deltas[image], [labels[image]], wanted)

        boxes, classes = rois.boxes[image], rois.classes[image].long()
        shape = [images.image_sizes[image]]
        mine = {name: feature[image : image + 1] for name, feature in features.items()}
        answers = heads.box_predictor(heads.box_head(heads.box_roi_pool(mine, [boxes], shape)))
        coded = heads.box_coder.encode([rois.object_boxes[image]], [boxes])
        box_losses = detection.roi_heads.fastrcnn_loss(*answers, [classes], list(coded))

        first = classes[: targets.shape[1]] > 0
        shown = boxes[: targets.shape[1]][first]
        drawn = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(mine, [shown], shape)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(detection.roi_heads, "project_masks_on_boxes", lambda *_: targets[image][first])
            numbers = torch.arange(int(first.sum()))
            mask_loss = detection.roi_heads.maskrcnn_loss(
                drawn, [shown], [None], [classes[: len(first)][first]], [numbers]
            )
        return torch.stack([*rpn_losses, *box_losses, mask_loss])

    return (of_image(0) + of_image(1)) / 2


@pytest.mark.timeout(600)
def test_losses_and_gradients_for_given_samples(ours: Any, theirs: Any, batch: Batch) -> None:
    graphdef, trained, frozen = ours

    @partial(jax.jit, compiler_options=QUICK)
    @partial(jax.grad, has_aux=True)
    def run(trained: Any, frozen: Any) -> Any:
        model = nnx.merge(graphdef, trained, frozen)
        levels = model.levels(batch.image, batch.size)
        logits, deltas = model.score_anchors(levels)
        anchors = model.anchors(levels)
        proposals = propose(logits, deltas, anchors, batch.size, LOSS.proposals)
        samples, rois = draw_samples(batch, jnp.concatenate(anchors), proposals, LOSS.samples, 0)
        first = jax.tree.map(lambda array: array[:, : LOSS.samples.positive_roi_count], rois)
        targets = jax.vmap(partial(mask_targets, size=2 * MASK_BINS))(batch.masks, first)
        values = Losses(
            *anchor_losses(jnp.concatenate(logits, 1), jnp.concatenate(deltas, 1), samples, LOSS),
            *roi_losses(*model.classify(levels, rois.boxes), rois, CONFIG.box_weights, LOSS),
            compare_masks(model.segment(levels, first.boxes), targets, first),
        )
        return values.total, (values, losses(model, batch, LOSS, 0), samples, rois, targets)

    grads, (values, whole, samples, rois, targets) = run(trained, frozen)
    np.testing.assert_allclose(whole, values, rtol=1e-6, err_msg="the training's own loss is made of these parts")
    assert samples.is_real.all()
    assert rois.is_real.all()
    assert (rois.is_positive.sum(axis=1) > 1).all()

    for param in theirs.parameters():
        param.grad = None
    wanted = torch_losses(theirs, batch, samples, rois, targets)
    wanted.sum().backward()
    np.testing.assert_allclose(values, wanted.detach(), atol=LOSS_TOLERANCE)
    gradients = {name: value.grad.numpy() for name, value in theirs.named_parameters()}
    for path, gradient in nnx.to_flat_state(grads):
        name = torch_name(path, (3, 4, 6, 3))
        exact = from_torch_layout(name, gradients[name])
        assert np.linalg.norm(gradient[...] - exact) < GRADIENT_TOLERANCE * np.linalg.norm(exact), name


def test_detections(ours: Any, theirs: Any, batch: Batch) -> None:
    @partial(jax.jit, compiler_options=QUICK)
    def run(trained: Any, frozen: Any) -> Any:
        return detect(nnx.merge(ours[0], trained, frozen), batch.image, batch.size, DETECTION)

    found = run(*ours[1:])
    theirs.rpn._pre_nms_top_n = {"training": 0, "testing": DETECTION.proposals.level_count}
    theirs.rpn._post_nms_top_n = {"training": 0, "testing": DETECTION.proposals.image_count}
    theirs.roi_heads.detections_per_img = DETECTION.count
    images = torch_images(batch)
    with torch.no_grad():
        features = theirs.backbone(images.tensors)
        proposals, _ = theirs.rpn(images, features)
        wanted, _ = theirs.roi_heads(features, proposals, images.image_sizes)
    for image, theirs_found in enumerate(wanted):
        count = len(theirs_found["boxes"])
        assert count > 10
        assert (np.asarray(found.classes[image]) > 0).sum() == count
        np.testing.assert_array_equal(found.classes[image, :count], theirs_found["labels"])
        assert_near(found.boxes[image, :count], theirs_found["boxes"])
        assert_near(found.scores[image, :count], theirs_found["scores"])
        assert_near(found.masks[image, :count], theirs_found["masks"][:, 0])
        assert not found.scores[image, count:].any()


def test_weights_of_another_model_are_refused_before_anything_is_copied(ours: Any, theirs: Any) -> None:
    model = nnx.merge(*ours, copy=True)
    before = model.box_head.logits.kernel[...]
    weights = {name: 2 * value for name, value in weights_of(theirs).items()}
    del weights["roi_heads.mask_predictor.mask_fcn_logits.bias"]
    with pytest.raises(CheckpointError, match=r"have no roi_heads.mask_predictor.mask_fcn_logits.bias"):
        load_torch_weights(model, weights)
    weights = {"conv1.weight": np.zeros((64, 3, 3, 3))}
    with pytest.raises(CheckpointError, match=r"conv1.weight is \[3, 3, 3, 64\] in the weights and \[7, 7, 3, 64\]"):
        load_torch_weights(model, {**weights_of(theirs.backbone.body), **weights}, backbone_only=True)
    np.testing.assert_array_equal(model.box_head.logits.kernel[...], before)


def test_the_weights_of_a_resnet_are_enough_to_start_from(ours: Any, theirs: Any) -> None:
    model = nnx.merge(*ours, copy=True)
    head = model.box_head.logits.kernel[...]
    weights = {name: 2 * value for name, value in weights_of(theirs.backbone.body).items()}
    load_torch_weights(model, weights, backbone_only=True)
    np.testing.assert_array_equal(model.backbone.stem_conv.kernel[...], 2 * ours[2].backbone.stem_conv.kernel[...])
    np.testing.assert_array_equal(model.box_head.logits.kernel[...], head)
