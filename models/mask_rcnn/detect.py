"""Detection: from images to the objects in them, always the same number, filled up with padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from models.mask_rcnn.batch import Array, Detections
from models.mask_rcnn.boxes import Weights, are_larger, clip, decode
from models.mask_rcnn.model import MaskRCNN
from models.mask_rcnn.nms import non_maximum_suppression
from models.mask_rcnn.proposals import ProposalConfig, Proposals, propose

_SMALLEST_SIDE = 1e-2


@dataclass(frozen=True)
class DetectionConfig:
    """Which answers of the network are detections."""

    proposals: ProposalConfig = field(default_factory=ProposalConfig)
    score: float = 0.05
    """A detection has a higher score than this."""
    nms_overlap: float = 0.5
    """Of two detections of a class that overlap more than this, the better one stays."""
    candidate_count: int = 1000
    """The best pairs of a proposal and a class in an image, which are compared with each other. Worse ones could be
    detections only if fewer than ``count`` of these are."""
    count: int = 100
    """The most detections of an image."""


def detect(model: MaskRCNN, images: Array, size: Array, config: DetectionConfig) -> Detections:
    """Find the objects in ``images`` (uint8 ``[B, S, S, 3]``, real areas ``size``: float32 ``[B, 2]``)."""
    levels = model.levels(images, size)
    proposals = propose(*model.score_anchors(levels), model.anchors(levels), size, config.proposals)
    boxes, scores, classes = best_boxes(
        *model.classify(levels, proposals.boxes), proposals, size, model.config.box_weights, config
    )
    logits = model.segment(levels, boxes)
    own = jnp.take_along_axis(logits, classes[..., None, None, None], axis=-1)[..., 0]
    return Detections(boxes, scores, classes, jax.nn.sigmoid(own))


def best_boxes(
    logits: jax.Array, deltas: jax.Array, proposals: Proposals, size: Array, weights: Weights, config: DetectionConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The boxes, scores and classes of the detections, from the box head's answers for the proposals."""

    def of_image(
        logits: jax.Array, deltas: jax.Array, proposals: Proposals, size: Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = jax.nn.softmax(logits)[:, 1:]
        scores = jnp.where(proposals.is_real[:, None] & (scores > config.score), scores, 0)
        scores, pairs = jax.lax.top_k(scores.reshape(-1), min(config.candidate_count, scores.size))
        proposal, column = jnp.divmod(pairs, logits.shape[1] - 1)
        classes = column + 1
        boxes = clip(decode(deltas[proposal, classes], proposals.boxes[proposal], weights), size)
        is_real = (scores > 0) & are_larger(boxes, _SMALLEST_SIDE)
        stays = non_maximum_suppression(boxes, is_real, config.nms_overlap, classes)
        best, chosen = jax.lax.top_k(jnp.where(stays, scores, 0), min(config.count, len(scores)))
        is_detection = best > 0
        boxes = jnp.where(is_detection[:, None], boxes[chosen], 0)
        return (
            _fill(boxes, config.count),
            _fill(best, config.count),
            _fill(classes[chosen] * is_detection, config.count),
        )

    return jax.vmap(of_image)(logits, deltas, proposals, size)


def _fill(array: jax.Array, count: int) -> jax.Array:
    """Zeros at the end, up to ``count`` rows."""
    return jnp.pad(array, [(0, count - len(array)), *[(0, 0)] * (array.ndim - 1)])
