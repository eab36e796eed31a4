"""Proposals: the anchors that the network takes for objects, moved to them, with few that overlap much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.mask_rcnn.batch import Array
from models.mask_rcnn.boxes import are_larger, clip, decode
from models.mask_rcnn.nms import non_maximum_suppression

ANCHOR_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
_SMALLEST_SIDE = 1e-3


@dataclass(frozen=True)
class ProposalConfig:
    """How many proposals there are. The defaults are those of detection."""

    level_count: int = 1000
    """The best anchors of a level that take part."""
    image_count: int = 1000
    """The best proposals of an image that stay."""
    nms_overlap: float = 0.7
    """Of two boxes of a level that overlap more than this, the better one stays."""


class Proposals(NamedTuple):
    """N boxes of each image, the best first."""

    boxes: jax.Array
    """float32 ``[B, N, 4]``, inside of the real area."""
    is_real: jax.Array
    """bool ``[B, N]``: False for filling."""


def propose(
    logits: list[jax.Array], deltas: list[jax.Array], anchors: list[jax.Array], size: Array, config: ProposalConfig
) -> Proposals:
    """The proposals of B images, from each level's logits (``[B, anchors]``) and deltas (``[B, anchors, 4]``).

    They are constants for the gradient.
    """
    logits, deltas = jax.lax.stop_gradient((logits, deltas))
    slots = min(config.level_count, max(level.shape[1] for level in logits))

    def best_of_level(
        logits: jax.Array, deltas: jax.Array, anchors: jax.Array, size: Array
    ) -> tuple[jax.Array, jax.Array]:
        count = min(slots, len(anchors))
        scores, chosen = jax.lax.top_k(logits, count)
        boxes = clip(decode(deltas[chosen], anchors[chosen], ANCHOR_WEIGHTS), size)
        scores = jnp.where(are_larger(boxes, _SMALLEST_SIDE), scores, -jnp.inf)
        filling = slots - count
        return jnp.pad(boxes, ((0, filling), (0, 0))), jnp.pad(scores, (0, filling), constant_values=-jnp.inf)

    def suppress(boxes: jax.Array, scores: jax.Array) -> jax.Array:
        stays = non_maximum_suppression(boxes, scores > -jnp.inf, config.nms_overlap)
        return jnp.where(stays, scores, -jnp.inf)

    def best_of_image(logits: list[jax.Array], deltas: list[jax.Array], size: Array) -> Proposals:
        levels = [best_of_level(*level, size) for level in zip(logits, deltas, anchors, strict=True)]
        boxes, scores = (jnp.stack(parts) for parts in zip(*levels, strict=True))
        scores = jax.vmap(suppress)(boxes, scores)
        best, chosen = jax.lax.top_k(scores.reshape(-1), min(config.image_count, scores.size))
        return Proposals(boxes.reshape(-1, 4)[chosen], best > -jnp.inf)

    return jax.vmap(best_of_image)(logits, deltas, size)
