"""What the network should answer: which boxes are objects, a sample of them to learn from, and their masks.

The functions are for one image; ``jax.vmap`` makes them those of a batch. Everything random comes from a key of the
image, so the samples do not depend on the worker. In the shapes, G is the most objects of an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.mask_rcnn.batch import Array
from models.mask_rcnn.boxes import overlaps
from models.mask_rcnn.roi_align import roi_align

_SMALLEST_SIDE = 1e-3


@dataclass(frozen=True)
class SampleConfig:
    """Which boxes of an image are learnt from."""

    anchor_count: int = 256
    """Anchors of an image."""
    anchor_positive_share: float = 0.5
    """At most this share of them is on objects."""
    anchor_positive_overlap: float = 0.7
    """An anchor with this overlap with an object is on it. So is the best anchor of each object."""
    anchor_negative_overlap: float = 0.3
    """An anchor with less overlap than this is background. Anchors between the two are left out."""
    roi_count: int = 512
    """Boxes of an image for the box head."""
    roi_positive_share: float = 0.25
    """At most this share of them is on objects, and is learnt from by the mask head."""
    roi_overlap: float = 0.5
    """A box with this overlap with an object is on it; others are background."""

    @property
    def positive_anchor_count(self) -> int:
        """The most anchors of an image that are on objects."""
        return int(self.anchor_count * self.anchor_positive_share)

    @property
    def positive_roi_count(self) -> int:
        """The most boxes of an image that are on objects."""
        return int(self.roi_count * self.roi_positive_share)


class Objects(NamedTuple):
    """The objects of an image."""

    boxes: Array
    """float32 ``[G, 4]``"""
    classes: Array
    """int32 ``[G]``: 1 to C, or 0 for padding."""


class Samples(NamedTuple):
    """R boxes of an image to learn from. Those on objects come first, then background, then filling."""

    indices: jax.Array
    """int32 ``[R]``: the places of the boxes among those that were sampled from."""
    boxes: jax.Array
    """float32 ``[R, 4]``"""
    is_real: jax.Array
    """bool ``[R]``: False for filling."""
    classes: jax.Array
    """int32 ``[R]``: the class of the object, or 0 for background and filling."""
    objects: jax.Array
    """int32 ``[R]``: the number of the object that the box overlaps most."""
    object_boxes: jax.Array
    """float32 ``[R, 4]``: the box of that object; the box itself for background and filling."""

    @property
    def is_positive(self) -> jax.Array:
        """bool ``[R]``: whether a box is on an object."""
        return self.classes > 0


class Matches(NamedTuple):
    """How N boxes lie to the objects of an image."""

    objects: jax.Array
    """int32 ``[N]``: the object that the box overlaps most."""
    overlaps: jax.Array
    """float32 ``[N]``: that overlap; -1 in an image without objects."""
    is_best: jax.Array
    """bool ``[N]``: whether no other box overlaps some object more."""


def match(boxes: Array, objects: Objects) -> Matches:
    """Compare each of N boxes (float32 ``[N, 4]``) with each object."""
    table = jnp.where(objects.classes > 0, overlaps(boxes, objects.boxes), -1)
    best_of_object = jnp.max(table, axis=0)
    is_best = jnp.any((table == best_of_object) & (best_of_object > 0), axis=1)
    return Matches(jnp.argmax(table, axis=1), jnp.max(table, axis=1), is_best)


def draw(
    key: jax.Array, is_positive: jax.Array, is_negative: jax.Array, count: int, positive_count: int
) -> tuple[jax.Array, jax.Array]:
    """Draw ``count`` of N things, at most ``positive_count`` of them positive.

    Returns their indices, int32 ``[count]``, the positive ones first, and which of them are real, bool ``[count]``:
    if there are too few things, filling follows.
    """
    noise = jax.random.uniform(key, is_positive.shape)
    positive_noise = jnp.where(is_positive, noise, -1)
    least = jax.lax.top_k(positive_noise, min(positive_count, len(noise)))[0][-1]
    is_chosen = is_positive & (positive_noise >= least)
    priority = jnp.where(is_chosen, 1 + noise, jnp.where(is_negative, noise, -1))
    priority, indices = jax.lax.top_k(priority, min(count, len(noise)))
    return indices, priority >= 0


def take_samples(
    indices: jax.Array, is_real: jax.Array, boxes: Array, is_positive: jax.Array, matches: Matches, objects: Objects
) -> Samples:
    """The samples at ``indices`` of the boxes that have been matched."""
    is_on_object = is_positive[indices] & is_real
    chosen, number = jnp.asarray(boxes)[indices], matches.objects[indices]
    return Samples(
        indices,
        chosen,
        is_real,
        jnp.where(is_on_object, jnp.asarray(objects.classes)[number], 0),
        number,
        jnp.where(is_on_object[:, None], jnp.asarray(objects.boxes)[number], chosen),
    )


def sample_anchors(key: jax.Array, anchors: Array, size: Array, objects: Objects, config: SampleConfig) -> Samples:
    """Draw anchors for the proposal head. Those whose middle is outside of the real area are left out."""
    matches = match(anchors, objects)
    is_inside = jnp.all((anchors[:, :2] + anchors[:, 2:]) / 2 <= jnp.stack([size[1], size[0]]), axis=1)
    is_positive = (matches.overlaps >= config.anchor_positive_overlap) | matches.is_best
    is_negative = (matches.overlaps < config.anchor_negative_overlap) & ~is_positive & is_inside
    drawn = draw(key, is_positive, is_negative, config.anchor_count, config.positive_anchor_count)
    return take_samples(*drawn, anchors, is_positive, matches, objects)


def sample_rois(
    key: jax.Array, proposals: jax.Array, is_proposal: jax.Array, objects: Objects, config: SampleConfig
) -> Samples:
    """Draw boxes for the box head and the mask head, from N proposals (``[N, 4]``) and the objects' own boxes."""
    boxes = jnp.concatenate([proposals, jnp.asarray(objects.boxes)])
    is_candidate = jnp.concatenate([is_proposal, jnp.asarray(objects.classes > 0)])
    matches = match(boxes, objects)
    is_positive = is_candidate & (matches.overlaps >= config.roi_overlap)
    is_negative = is_candidate & (matches.overlaps < config.roi_overlap)
    drawn = draw(key, is_positive, is_negative, config.roi_count, config.positive_roi_count)
    return take_samples(*drawn, boxes, is_positive, matches, objects)


def mask_targets(masks: Array, samples: Samples, size: int) -> jax.Array:
    """The part of its object's mask that each sample sees: float32 ``[R, size, size]``, 0 or 1.

    ``masks`` are those of the image, ``[G, side, side]``, each of which spans the object's box.
    """
    side = masks.shape[-1]
    starts, ends = samples.object_boxes[:, :2], samples.object_boxes[:, 2:]
    sizes = jnp.maximum(ends - starts, _SMALLEST_SIDE)
    corners = (samples.boxes.reshape(-1, 2, 2) - starts[:, None]) / sizes[:, None] * side
    maps = jnp.asarray(masks, jnp.float32)[..., None]
    seen = roi_align([maps], [1], corners.reshape(-1, 4), samples.objects, size=size, aligned=True)
    return (seen[..., 0] >= 0.5).astype(jnp.float32)
