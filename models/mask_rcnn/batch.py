"""What the data hand to the model, and what the model hands to the evaluation: trees of arrays of fixed shapes.

Images lie at the top left of padded squares. A coordinate is in pixels of the square: pixel ``(row, column)`` covers
``[column, column + 1] x [row, row + 1]``, and a box is ``(x0, y0, x1, y1)``. Class 0 stands for padding and background.

In the shapes, B is the number of images, S the side of the square, G the most objects of an image, and D the most
detections of an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from numpy.typing import NDArray

# NumPy arrays are passed to a compiled program; inside of it they are JAX arrays.
Array: TypeAlias = jax.Array | NDArray[Any]

MASK_SIZE = 112
"""The side of an object's mask in a batch, in samples."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """B images and their objects.

    What is drawn at random for an image comes from ``image_keys``, so from ``epoch`` and ``number``: it depends neither
    on the worker nor on the images beside it.
    """

    image: Array
    """uint8 ``[B, S, S, 3]``: RGB, 0 outside of the real area. The model normalises it."""
    size: Array
    """float32 ``[B, 2]``: height and width of the real area."""
    boxes: Array
    """float32 ``[B, G, 4]``: the objects' boxes inside of the real area; 0 for padding."""
    classes: Array
    """int32 ``[B, G]``: 1 to C for an object, 0 for padding."""
    masks: Array
    """uint8 ``[B, G, MASK_SIZE, MASK_SIZE]``: 1 on the object, else 0. A mask spans exactly the object's box."""
    number: Array
    """int32 ``[B]``: the image's index in the data set."""
    epoch: Array
    """int32 ``[B]``: the epoch that the image is read for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Detections:
    """What the model finds in B images, the highest score first."""

    boxes: Array
    """float32 ``[B, D, 4]``: inside of the real area; 0 for padding."""
    scores: Array
    """float32 ``[B, D]``: 0 to 1; 0 for padding."""
    classes: Array
    """int32 ``[B, D]``: 1 to C for a detection, 0 for padding."""
    masks: Array
    """float32 ``[B, D, 28, 28]``: the probability that a sample is on the object. A mask spans exactly its box."""


def image_keys(seed: int, epoch: Array, number: Array) -> jax.Array:
    """A random key for each image of a batch: ``key[B]``.

    They are of threefry, because ``jax.vmap`` over keys of rbg, the trainers' default, draws from the first one alone.
    """

    def key(epoch: Array, number: Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), epoch), number)

    return jax.vmap(key)(epoch, number)
