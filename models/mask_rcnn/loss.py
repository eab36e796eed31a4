"""The five losses of Mask R-CNN, and the way from a batch to them.

Each loss is a mean over images. What an image adds depends on that image alone: its sum is divided by the number of
samples that the configuration asks for, or, for masks, by the number of its own objects' samples. A loss is therefore
the same on any number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from models.mask_rcnn.batch import Batch, image_keys
from models.mask_rcnn.boxes import Weights, decode, encode, generalized_overlaps
from models.mask_rcnn.model import MASK_BINS, MaskRCNN
from models.mask_rcnn.proposals import ANCHOR_WEIGHTS, ProposalConfig, Proposals, propose
from models.mask_rcnn.targets import Objects, SampleConfig, Samples, mask_targets, sample_anchors, sample_rois

BoxLoss = Literal["smooth_l1", "giou"]


@dataclass(frozen=True)
class LossConfig:
    """What is learnt from, and how errors count. The defaults are those of Detectron."""

    proposals: ProposalConfig = field(default_factory=lambda: ProposalConfig(level_count=2000))
    samples: SampleConfig = field(default_factory=SampleConfig)
    anchor_loss: BoxLoss = "smooth_l1"
    """How the boxes of the proposal head are compared with those of the objects: their deltas or their overlap."""
    anchor_beta: float = 1 / 9
    """Where smooth L1 becomes linear, for the proposal head. 0: L1."""
    box_loss: BoxLoss = "smooth_l1"
    """The same for the box head."""
    box_beta: float = 1.0
    """The same for the box head."""
    label_smoothing: float = 0.0
    """The share of the box head's target that is spread over all classes."""


class Losses(NamedTuple):
    """float32[] each."""

    objectness: jax.Array
    """Proposal head: object or background, of the sampled anchors."""
    anchors: jax.Array
    """Proposal head: the boxes of the sampled anchors on objects."""
    classes: jax.Array
    """Box head: the class of the sampled boxes."""
    boxes: jax.Array
    """Box head: the boxes of those on objects."""
    masks: jax.Array
    """Mask head: the masks of those on objects."""

    @property
    def total(self) -> jax.Array:
        """What training minimises."""
        return jnp.sum(jnp.stack(self))


def losses(model: MaskRCNN, batch: Batch, config: LossConfig, seed: int) -> Losses:
    """Find proposals, draw samples, and compare the network's answers for them with the truth."""
    levels = model.levels(batch.image, batch.size)
    anchors = model.anchors(levels)
    logits, deltas = model.score_anchors(levels)
    proposals = propose(logits, deltas, anchors, batch.size, config.proposals)
    anchor_samples, roi_samples = draw_samples(batch, jnp.concatenate(anchors), proposals, config.samples, seed)
    return Losses(
        *anchor_losses(jnp.concatenate(logits, axis=1), jnp.concatenate(deltas, axis=1), anchor_samples, config),
        *roi_losses(*model.classify(levels, roi_samples.boxes), roi_samples, model.config.box_weights, config),
        masks_loss(model, levels, batch, roi_samples, config),
    )


def draw_samples(
    batch: Batch, anchors: jax.Array, proposals: Proposals, config: SampleConfig, seed: int
) -> tuple[Samples, Samples]:
    """The samples of the proposal head and those of the two other heads, ``[B, ...]``; constants for the gradient."""

    def draw(key: jax.Array, objects: Objects, size: jax.Array, proposals: Proposals) -> tuple[Samples, Samples]:
        anchor_key, roi_key = jax.random.split(key)
        return (
            sample_anchors(anchor_key, anchors, size, objects, config),
            sample_rois(roi_key, *proposals, objects, config),
        )

    keys = image_keys(seed, batch.epoch, batch.number)
    objects = Objects(batch.boxes, batch.classes)
    return jax.lax.stop_gradient(jax.vmap(draw)(keys, objects, jnp.asarray(batch.size), proposals))


def anchor_losses(
    logits: jax.Array, deltas: jax.Array, samples: Samples, config: LossConfig
) -> tuple[jax.Array, jax.Array]:
    """Objectness and boxes of the proposal head, from its answers for all anchors (``[B, A]``, ``[B, A, 4]``)."""
    count = len(logits) * config.samples.anchor_count
    chosen_logits = jnp.take_along_axis(logits, samples.indices, axis=1)
    chosen_deltas = jnp.take_along_axis(deltas, samples.indices[..., None], axis=1)
    errors = optax.sigmoid_binary_cross_entropy(chosen_logits, samples.is_positive.astype(jnp.float32))
    box_errors = compare_boxes(chosen_deltas, samples, ANCHOR_WEIGHTS, config.anchor_loss, config.anchor_beta)
    return jnp.sum(errors * samples.is_real) / count, jnp.sum(box_errors) / count


def roi_losses(
    logits: jax.Array, deltas: jax.Array, samples: Samples, box_weights: Weights, config: LossConfig
) -> tuple[jax.Array, jax.Array]:
    """Classes and boxes of the box head, from its answers for the samples (``[B, R, C + 1]``, ``[B, R, C + 1, 4]``)."""
    count = len(logits) * config.samples.roi_count
    targets = optax.smooth_labels(jax.nn.one_hot(samples.classes, logits.shape[-1]), config.label_smoothing)
    errors = optax.softmax_cross_entropy(logits, targets)
    own = jnp.take_along_axis(deltas, samples.classes[..., None, None], axis=2)[:, :, 0]
    box_errors = compare_boxes(own, samples, box_weights, config.box_loss, config.box_beta)
    return jnp.sum(errors * samples.is_real) / count, jnp.sum(box_errors) / count


def compare_boxes(deltas: jax.Array, samples: Samples, weights: Weights, kind: BoxLoss, beta: float) -> jax.Array:
    """The error of each sample's box (``deltas``: ``[B, R, 4]``), float32 ``[B, R]``; 0 for background and filling."""
    if kind == "giou":
        errors = 1 - generalized_overlaps(decode(deltas, samples.boxes, weights), samples.object_boxes)
    else:
        references = jnp.where(samples.is_positive[..., None], samples.boxes, jnp.array([0, 0, 1, 1]))
        wanted = jnp.where(samples.is_positive[..., None], samples.object_boxes, references)
        errors = jnp.sum(smooth_l1(deltas - encode(wanted, references, weights), beta), axis=-1)
    return jnp.where(samples.is_positive, errors, 0)


def smooth_l1(x: jax.Array, beta: float) -> jax.Array:
    """The absolute value, with a parabola of the same slope between ``-beta`` and ``beta``."""
    size = jnp.abs(x)
    return size if beta == 0 else jnp.where(size < beta, 0.5 * x**2 / beta, size - 0.5 * beta)


def masks_loss(
    model: MaskRCNN, levels: list[jax.Array], batch: Batch, samples: Samples, config: LossConfig
) -> jax.Array:
    """The loss of the mask head, which sees the samples on objects only: the first of each image."""
    first = jax.tree.map(lambda array: array[:, : config.samples.positive_roi_count], samples)
    targets = jax.vmap(lambda masks, samples: mask_targets(masks, samples, 2 * MASK_BINS))(batch.masks, first)
    return compare_masks(model.segment(levels, first.boxes), jax.lax.stop_gradient(targets), first)


def compare_masks(logits: jax.Array, targets: jax.Array, samples: Samples) -> jax.Array:
    """From logits (``[B, R, 28, 28, C + 1]``) and targets (``[B, R, 28, 28]``): float32[]."""
    own = jnp.take_along_axis(logits, samples.classes[..., None, None, None], axis=-1)[..., 0]
    errors = jnp.mean(optax.sigmoid_binary_cross_entropy(own, targets), axis=(2, 3))
    of_image = jnp.sum(errors * samples.is_positive, axis=1)
    return jnp.mean(of_image / jnp.maximum(jnp.sum(samples.is_positive, axis=1), 1))
