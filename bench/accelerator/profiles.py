"""The parameters of the layers of real models, and the time that a V100 takes for a step.

The times of a step are NVIDIA's own measurements with mixed precision on one V100 (32 GB) of a DGX-1, in
github.com/NVIDIA/DeepLearningExamples at commit 729963d: PyTorch/Classification/ConvNets/resnet50v1.5/README.md, 1156
images/s (with a batch of 256), and PyTorch/LanguageModeling/BERT/README.md, pre-training with sequences of 128 tokens,
224 sequences/s (4096 sequences in 64 micro-batches, so 64 at a time); and, at commit d29920a,
PyTorch/Segmentation/MaskRCNN/README.md, 13.14 images/s (with a batch of 4). The backward pass takes two thirds of a
step, because it has twice the products of the forward pass. Its time is divided among the layers in proportion to their
multiply-adds.
"""

from __future__ import annotations

from dataclasses import dataclass

_BERT_WIDTH = 1024
_PYRAMID_WIDTH = 256
# Places of the maps C2 to C5 and P6 of an image of 800 x 1333 pixels, padded to multiples of 32.
_PYRAMID_PLACES = (200 * 336, 100 * 168, 50 * 84, 25 * 42, 13 * 21)
_BERT_TOKENS = 128


@dataclass(frozen=True)
class Layer:
    name: str
    parameter_counts: tuple[int, ...]
    """The elements of each array of the layer."""
    multiply_adds: float
    """The multiply-adds of the forward pass for one sample."""


@dataclass(frozen=True)
class Profile:
    """A model's layers in the order of the forward pass."""

    name: str
    layers: tuple[Layer, ...]
    batch_count: int
    """Samples of one worker in a step."""
    samples_per_s: float
    tied: tuple[int, ...] = ()
    """Two layers, of which the second uses the parameters of the first as well."""

    @property
    def step_s(self) -> float:
        return self.batch_count / self.samples_per_s

    @property
    def parameter_count(self) -> int:
        return sum(sum(layer.parameter_counts) for layer in self.layers)


def _resnet50() -> Profile:
    layers = [_convolution("stem", 3, 64, 7, 112)]
    channels = 64
    for stage, (width, block_count, size) in enumerate(((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7))):
        for block in range(block_count):
            name = f"stage {stage} block {block}"
            # Version 1.5: the 3x3 convolution has the stride, so the first one still sees the larger image.
            entry_size = size * 2 if block == 0 and stage > 0 else size
            layers.append(_convolution(f"{name} 1x1", channels, width, 1, entry_size))
            layers.append(_convolution(f"{name} 3x3", width, width, 3, size))
            layers.append(_convolution(f"{name} 1x1 out", width, 4 * width, 1, size))
            if block == 0:
                layers.append(_convolution(f"{name} shortcut", channels, 4 * width, 1, size))
            channels = 4 * width
    layers.append(Layer("classifier", (2048 * 1000, 1000), 2048 * 1000))
    return Profile("resnet50", tuple(layers), batch_count=256, samples_per_s=1156)


def _convolution(name: str, inputs: int, outputs: int, kernel: int, size: int) -> Layer:
    """A convolution, and the scale and bias of the batch normalisation after it."""
    weight_count = inputs * outputs * kernel**2
    return Layer(name, (weight_count, outputs, outputs), weight_count * size**2)


def _bert_large() -> Profile:
    h, vocabulary, positions, tokens, predictions = _BERT_WIDTH, 30522, 512, _BERT_TOKENS, 20
    layers = [Layer("embeddings", (vocabulary * h, positions * h, 2 * h, h, h), tokens * h)]
    for index in range(24):
        layers += _encoder(f"encoder {index}")
    layers.append(Layer("pooler", (h * h, h, 2 * h, 2), h * h))
    layers.append(Layer("masked words", (h * h, h, h, h), predictions * h * h))
    # The decoder shares the matrix of the embeddings. Its gradient is complete only at the end of the backward pass.
    layers.append(Layer("decoder", (vocabulary,), predictions * vocabulary * h))
    tied = (0, len(layers) - 1)
    return Profile("bert-large", tuple(layers), batch_count=64, samples_per_s=224, tied=tied)


def _encoder(name: str) -> list[Layer]:
    h, f, tokens = _BERT_WIDTH, 4 * _BERT_WIDTH, _BERT_TOKENS
    normalisation = (h, h)
    return [
        *(Layer(f"{name} {part}", (h * h, h), tokens * h * h) for part in ("query", "key", "value")),
        Layer(f"{name} attention", (), 2 * tokens**2 * h),
        Layer(f"{name} attention out", (h * h, h, *normalisation), tokens * h * h),
        Layer(f"{name} feed-forward in", (h * f, f), tokens * h * f),
        Layer(f"{name} feed-forward out", (f * h, h, *normalisation), tokens * f * h),
    ]


def _mask_rcnn() -> Profile:
    """``models.mask_rcnn`` with its defaults. The stem and the first stage are frozen, and have no backward pass."""
    layers: list[Layer] = []
    channels = 256
    for stage, (width, block_count) in enumerate(((128, 4), (256, 6), (512, 3)), start=1):
        places = _PYRAMID_PLACES[stage]
        for block in range(block_count):
            name = f"stage {stage} block {block}"
            entry_places = _PYRAMID_PLACES[stage - 1] if block == 0 else places
            layers.append(_product(f"{name} 1x1", channels * width, entry_places))
            layers.append(_product(f"{name} 3x3", 9 * width * width, places))
            layers.append(_product(f"{name} 1x1 out", width * 4 * width, places))
            if block == 0:
                layers.append(_product(f"{name} shortcut", channels * 4 * width, places))
            channels = 4 * width
    w, classes = _PYRAMID_WIDTH, 81
    for level, inputs in enumerate((256, 512, 1024, 2048)):
        layers.append(_product(f"pyramid inner {level}", inputs * w, _PYRAMID_PLACES[level], biases=w))
        layers.append(_product(f"pyramid outer {level}", 9 * w * w, _PYRAMID_PLACES[level], biases=w))
    anchors, places = 3, sum(_PYRAMID_PLACES)
    layers.append(_product("proposals", 9 * w * w, places, biases=w))
    layers.append(_product("proposals logits", w * anchors, places, biases=anchors))
    layers.append(_product("proposals deltas", w * 4 * anchors, places, biases=4 * anchors))
    boxes, hidden = 512, 1024
    layers.append(_product("boxes hidden 1", 49 * w * hidden, boxes, biases=hidden))
    layers.append(_product("boxes hidden 2", hidden * hidden, boxes, biases=hidden))
    layers.append(_product("boxes logits", hidden * classes, boxes, biases=classes))
    layers.append(_product("boxes deltas", hidden * 4 * classes, boxes, biases=4 * classes))
    mask_places = boxes // 4 * 14 * 14  # a quarter of the boxes are on objects
    layers += [_product(f"masks {index}", 9 * w * w, mask_places, biases=w) for index in range(4)]
    layers.append(_product("masks upsampling", 4 * w * w, mask_places, biases=w))
    layers.append(_product("masks logits", w * classes, 4 * mask_places, biases=classes))
    return Profile("mask-rcnn", tuple(layers), batch_count=4, samples_per_s=13.14)


def _product(name: str, weight_count: int, places: int, biases: int = 0) -> Layer:
    """A matrix product, or a convolution, at each of so many places."""
    return Layer(name, (weight_count, biases) if biases else (weight_count,), weight_count * places)


PROFILES = {profile.name: profile for profile in (_resnet50(), _bert_large(), _mask_rcnn())}
