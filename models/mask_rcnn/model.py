"""Mask R-CNN (He et al., 2017) as Flax NNX modules: a ResNet, a feature pyramid, a region proposal network, two heads.

Images are NHWC. The layers compute in the backbone's ``dtype``; weights, normalisation, RoIAlign and the last layer of
every head are float32. In the shapes, B is the number of images, N that of boxes of an image, and C that of classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.common.errors import require
from models.mask_rcnn.batch import Array
from models.mask_rcnn.boxes import Weights, anchors
from models.mask_rcnn.roi_align import pyramid_levels, roi_align
from models.resnet.model import (
    ARCHITECTURES,
    Features,
    freeze,
    he_fan_out,
    stage_channels,
    stage_strides,
)
from models.resnet.model import ModelConfig as BackboneConfig

BOX_BINS, MASK_BINS = 7, 14
"""What RoIAlign makes of a box for the box head and for the mask head; masks are twice as large."""

CHANNEL_MEAN, CHANNEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's photographs, for values from 0 to 1."""

glorot_fan_in = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes the network. The defaults are those of Detectron's ResNet-50 with a feature pyramid."""

    class_count: int = 80
    """Classes of objects, without the background."""
    backbone: BackboneConfig = field(default_factory=lambda: BackboneConfig(norm="frozen"))
    """Its ``class_count`` is not used."""
    frozen_parts: int = 2
    """How much of the backbone keeps its loaded weights: 0 nothing, 1 the stem, 2 also the first stage, and so on."""
    pyramid_channels: int = 256
    anchor_sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Side in pixels of the square anchor of each level: one level per stage of the backbone, and a coarser one."""
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Height to width of the anchors at each place."""
    aligned: bool = False
    """RoIAlign's convention: see ``roi_align``."""
    hidden_size: int = 1024
    """Units of the box head's layers."""
    mask_channels: int = 256
    mask_layers: int = 4
    box_weights: Weights = (10.0, 10.0, 5.0, 5.0)
    """Factors of what the box head predicts: see ``boxes.encode``."""

    def __post_init__(self) -> None:
        stage_count = len(ARCHITECTURES[self.backbone.architecture].stage_sizes)
        require(
            len(self.anchor_sizes) == stage_count + 1,
            f"anchor_sizes has {len(self.anchor_sizes)} levels; the {self.backbone.architecture} pyramid has "
            f"{stage_count + 1}, one per stage and a coarser one",
        )
        require(
            0 <= self.frozen_parts <= stage_count + 1,
            f"frozen_parts is {self.frozen_parts}; it must be 0 to {stage_count + 1}, the stem and the stages",
        )
        require(
            self.backbone.norm != "batch",
            "norm is batch; detectors train on a few images at a time, so it must be frozen or group",
        )
        require(self.class_count >= 1, f"class_count is {self.class_count}; it must be at least 1")

    @property
    def strides(self) -> list[int]:
        """Pixels between two places of each level. The side of the images must be a multiple of the last one."""
        strides = stage_strides(self.backbone)
        return [*strides, 2 * strides[-1]]


SMALL = ModelConfig(
    class_count=1,
    backbone=BackboneConfig(
        architecture="tiny", stem_kernel=5, stem_stride=2, stem_pool=True, norm="group", group_count=8
    ),
    frozen_parts=0,
    pyramid_channels=64,
    anchor_sizes=(16, 32, 64, 128),
    aligned=True,
    hidden_size=256,
    mask_channels=64,
)
"""Small enough to learn one class from nothing, on two CPU cores, in minutes."""


def normalize(images: Array, size: Array) -> jax.Array:
    """uint8 ``[B, S, S, 3]`` to float32, with 0 outside of the real area (``size``: float32 ``[B, 2]``)."""
    pixels = (images / jnp.float32(255) - jnp.asarray(CHANNEL_MEAN)) / jnp.asarray(CHANNEL_STD)
    places = jnp.arange(images.shape[1])
    is_real = (places[:, None] < size[:, None, None, 0]) & (places[None] < size[:, None, None, 1])
    return jnp.where(is_real[..., None], pixels, 0)


class Layers:
    """Makes the layers of a detector, which share dtype and random generator."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.dtype, self.rngs = jnp.dtype(config.backbone.dtype), rngs

    def conv(self, inputs: int, outputs: int, kernel: int, init: Any) -> nnx.Conv:
        """A convolution that keeps the size of the map."""
        return nnx.Conv(inputs, outputs, (kernel, kernel), kernel_init=init, dtype=self.dtype, rngs=self.rngs)

    def linear(self, inputs: int, outputs: int) -> nnx.Linear:
        return nnx.Linear(inputs, outputs, kernel_init=glorot_fan_in, dtype=self.dtype, rngs=self.rngs)

    def last(self, inputs: int, outputs: int, deviation: float) -> nnx.Linear:
        """The last layer of a head, for each box or each place of a map: float32."""
        return nnx.Linear(
            inputs, outputs, kernel_init=nnx.initializers.normal(deviation), dtype=jnp.float32, rngs=self.rngs
        )


def double(x: jax.Array) -> jax.Array:
    """Each place four times: ``[B, rows, columns, channels]`` to ``[B, 2 * rows, 2 * columns, channels]``."""
    batch, rows, columns, channels = x.shape
    repeated = jnp.broadcast_to(x[:, :, None, :, None], (batch, rows, 2, columns, 2, channels))
    return repeated.reshape(batch, 2 * rows, 2 * columns, channels)


class FeaturePyramid(nnx.Module):
    """Gives the fine maps what the coarse ones know (Lin et al., 2017), and adds a coarser map."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        layers, channels = Layers(config, rngs), config.pyramid_channels
        stages = stage_channels(config.backbone)
        self.inner = nnx.List([layers.conv(inputs, channels, 1, glorot_fan_in) for inputs in stages])
        self.outer = nnx.List([layers.conv(channels, channels, 3, glorot_fan_in) for _ in stages])

    def __call__(self, stages: list[jax.Array]) -> list[jax.Array]:
        """From the outputs of the stages, C2 to C5, to the levels P2 to P6."""
        inner = [layer(stage) for layer, stage in zip(self.inner, stages, strict=True)]
        for level in reversed(range(len(inner) - 1)):
            inner[level] += double(inner[level + 1])
        levels = [layer(x) for layer, x in zip(self.outer, inner, strict=True)]
        return [*levels, levels[-1][:, ::2, ::2]]


class ProposalHead(nnx.Module):
    """Scores each anchor of a level as object or background, and moves it to the object."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        layers, channels = Layers(config, rngs), config.pyramid_channels
        anchor_count = len(config.anchor_ratios)
        self.conv = layers.conv(channels, channels, 3, nnx.initializers.normal(0.01))
        self.logits = layers.last(channels, anchor_count, 0.01)
        self.deltas = layers.last(channels, 4 * anchor_count, 0.01)

    def __call__(self, level: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits ``[B, anchors]`` and deltas ``[B, anchors, 4]``, in the order of ``boxes.anchors``."""
        x = nnx.relu(self.conv(level))
        batch = len(level)
        return self.logits(x).reshape(batch, -1), self.deltas(x).reshape(batch, -1, 4)


class BoxHead(nnx.Module):
    """Names the class of a box, and moves the box to the object, for each class in its own way."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        layers, hidden = Layers(config, rngs), config.hidden_size
        self.hidden1 = layers.linear(BOX_BINS**2 * config.pyramid_channels, hidden)
        self.hidden2 = layers.linear(hidden, hidden)
        self.logits = layers.last(hidden, config.class_count + 1, 0.01)
        self.deltas = layers.last(hidden, 4 * (config.class_count + 1), 0.001)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """From ``[boxes, 7, 7, channels]`` to logits ``[boxes, C + 1]`` and deltas ``[boxes, C + 1, 4]``."""
        x = nnx.relu(self.hidden1(x.reshape(len(x), -1)))
        x = nnx.relu(self.hidden2(x))
        return self.logits(x), self.deltas(x).reshape(len(x), -1, 4)


class Upsampling(nnx.Module):
    """A transposed convolution, 2x2 of stride 2: each place becomes four by a matrix product, and none overlap."""

    def __init__(self, channels: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.dtype = dtype
        self.kernel = nnx.Param(he_fan_out(rngs.params(), (2, 2, channels, channels), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum("nhwc,abcd->nhawbd", x.astype(self.dtype), self.kernel[...].astype(self.dtype))
        batch, rows, _, columns, _, channels = y.shape
        return y.reshape(batch, 2 * rows, 2 * columns, channels) + self.bias[...].astype(self.dtype)


class MaskHead(nnx.Module):
    """Draws the mask of an object inside of its box, for each class."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        layers, channels = Layers(config, rngs), config.mask_channels
        inputs = [config.pyramid_channels, *[channels] * (config.mask_layers - 1)]
        self.convs = nnx.List([layers.conv(before, channels, 3, he_fan_out) for before in inputs])
        self.upsampling = Upsampling(channels, dtype=layers.dtype, rngs=rngs)
        self.logits = layers.last(channels, config.class_count + 1, 0.001)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From ``[boxes, 14, 14, channels]`` to logits ``[boxes, 28, 28, C + 1]``."""
        for conv in self.convs:
            x = nnx.relu(conv(x))
        return self.logits(nnx.relu(self.upsampling(x)))


class MaskRCNN(nnx.Module):
    """The whole network. Training and detection call its parts: see ``loss`` and ``detect``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.backbone = Features(config.backbone, rngs=rngs)
        self.pyramid = FeaturePyramid(config, rngs=rngs)
        self.proposal_head = ProposalHead(config, rngs=rngs)
        self.box_head = BoxHead(config, rngs=rngs)
        self.mask_head = MaskHead(config, rngs=rngs)
        self._freeze()

    def _freeze(self) -> None:
        parts = self.config.frozen_parts
        if parts > 0:
            freeze(self.backbone.stem_conv)
            freeze(self.backbone.stem_norm)
        frozen_blocks = sum(self.backbone.stage_sizes[: max(parts - 1, 0)])
        for block in self.backbone.blocks[:frozen_blocks]:
            freeze(block)

    def levels(self, images: Array, size: Array) -> list[jax.Array]:
        """The feature pyramid, finest first: ``[B, rows, columns, channels]`` each."""
        return self.pyramid(self.backbone.features(normalize(images, size)))

    def anchors(self, levels: list[jax.Array]) -> list[jax.Array]:
        """The anchors of each level: float32 ``[anchors, 4]``."""
        config = self.config
        return [
            anchors((level.shape[1], level.shape[2]), stride, side, config.anchor_ratios)
            for level, stride, side in zip(levels, config.strides, config.anchor_sizes, strict=True)
        ]

    def score_anchors(self, levels: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Each level's logits, ``[B, anchors]``, and deltas, ``[B, anchors, 4]``."""
        logits, deltas = zip(*map(self.proposal_head, levels), strict=True)
        return list(logits), list(deltas)

    def classify(self, levels: list[jax.Array], boxes: Array) -> tuple[jax.Array, jax.Array]:
        """For boxes ``[B, N, 4]``: logits ``[B, N, C + 1]`` with the background first, deltas ``[B, N, C + 1, 4]``."""
        logits, deltas = self.box_head(self._align(levels, boxes, BOX_BINS))
        return logits.reshape(*boxes.shape[:2], -1), deltas.reshape(*boxes.shape[:2], -1, 4)

    def segment(self, levels: list[jax.Array], boxes: Array) -> jax.Array:
        """The masks' logits for boxes ``[B, N, 4]``, of every class: ``[B, N, 28, 28, C + 1]``."""
        logits = self.mask_head(self._align(levels, boxes, MASK_BINS))
        return logits.reshape(*boxes.shape[:2], *logits.shape[1:])

    def _align(self, levels: list[jax.Array], boxes: Array, size: int) -> jax.Array:
        """The features of all boxes, ``[B * N, size, size, channels]``. The coarsest level is for anchors only."""
        pyramid, strides = levels[:-1], self.config.strides[:-1]
        images = jnp.repeat(jnp.arange(boxes.shape[0]), boxes.shape[1])
        flat = boxes.reshape(-1, 4)
        chosen = pyramid_levels(flat, len(pyramid))
        return roi_align(pyramid, strides, flat, images, chosen, size=size, aligned=self.config.aligned)
