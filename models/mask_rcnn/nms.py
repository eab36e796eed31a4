"""Non-maximum suppression: of boxes that overlap much, only the best one stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.mask_rcnn.batch import Array
from models.mask_rcnn.boxes import overlaps


def non_maximum_suppression(boxes: Array, is_real: Array, threshold: float, groups: Array | None = None) -> jax.Array:
    """Which boxes stay: bool ``[N]``, for ``boxes`` (float32 ``[N, 4]``) in order of falling score.

    A box stays if no better box that stays overlaps it by more than ``threshold``. Boxes that are not ``is_real``
    (bool ``[N]``) neither stay nor suppress others. Boxes of different ``groups`` (int32 ``[N]``) ignore each other.

    The definition is applied to all boxes at once, first as if all better boxes stayed, until nothing changes. Each
    round decides at least the best undecided box; the boxes of a real image take 2 to 6 rounds of a few large
    operations. One box after the other takes N rounds of small ones, which on a GPU are kernels of their own. On a CPU
    that loop is somewhat faster.
    """
    places = jnp.arange(len(boxes))
    suppresses = (overlaps(boxes, boxes) > threshold) & (places[:, None] < places)
    if groups is not None:
        suppresses &= groups[:, None] == groups[None]

    first = jnp.asarray(is_real)

    def decide(stays: jax.Array) -> jax.Array:
        return first & ~jnp.any(suppresses & stays[:, None], axis=0)

    def has_changed(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        before, after = state
        return jnp.any(before != after)

    _, stays = jax.lax.while_loop(has_changed, lambda state: (state[1], decide(state[1])), (first, decide(first)))
    return stays
