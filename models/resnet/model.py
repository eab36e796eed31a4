"""ResNet v1b as Flax NNX modules: the residual network of He et al. (2015), with the stride on the 3x3 of bottlenecks.

Images are NHWC. Weights and normalisation are float32; the convolutions compute in ``ModelConfig.dtype``. ``Features``
is the network without its classifier, for models that are built on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

he_fan_out = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes the network."""

    architecture: Literal["tiny", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet50"
    """The depth and the blocks of the network: a key of ARCHITECTURES."""
    class_count: int = 1000
    input_channels: int = 3
    stem_kernel: int = 7
    """Kernel size of the first convolution: 7 for photographs, 3 for small images."""
    stem_stride: int = 2
    """Stride of the first convolution."""
    stem_pool: bool = True
    """Add a 3x3 max-pool of stride 2 after the first convolution. Small images do without."""
    norm: Literal["batch", "group", "frozen"] = "batch"
    """Batch normalisation uses the statistics of one piece of the batch. Group normalisation uses those of one image,
    so the same global batch gives the same loss on any number of workers. Frozen normalisation is batch normalisation
    whose statistics, gammas and betas stay as they are loaded."""
    norm_decay: float = 0.9
    """Decay of the running statistics of batch normalisation (0.9 here is momentum 0.1 in torch)."""
    norm_epsilon: float = 1e-5
    group_count: int = 32
    """Groups of channels for group normalisation. It must divide the channels of every layer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the convolutions."""


class Frozen(nnx.Variable[jax.Array]):
    """A parameter or a statistic that training does not change. ``nnx.split`` separates it from ``nnx.Param``."""


def freeze(module: nnx.Module) -> None:
    """Make the parameters of the module ``Frozen``, in place."""
    for _, part in nnx.iter_modules(module):
        for name, variable in list(vars(part).items()):
            if isinstance(variable, nnx.Param):
                setattr(part, name, Frozen(variable[...]))


class FrozenNorm(nnx.Module):
    """Batch normalisation that never changes, in float32."""

    def __init__(self, channels: int, *, epsilon: float, zero_gamma: bool) -> None:
        self.epsilon = epsilon
        self.scale = Frozen(jnp.zeros(channels) if zero_gamma else jnp.ones(channels))
        self.bias = Frozen(jnp.zeros(channels))
        self.mean = Frozen(jnp.zeros(channels))
        self.var = Frozen(jnp.ones(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        factor = self.scale[...] * jax.lax.rsqrt(self.var[...] + self.epsilon)
        return x * factor + (self.bias[...] - self.mean[...] * factor)


def convolution(
    in_channels: int, out_channels: int, kernel: int, stride: int, *, config: ModelConfig, rngs: nnx.Rngs
) -> nnx.Conv:
    """A convolution without bias, because the normalisation after it has one."""
    return nnx.Conv(
        in_channels,
        out_channels,
        kernel_size=(kernel, kernel),
        strides=stride,
        padding=kernel // 2,  # explicit, because "SAME" pads a strided convolution on one side only
        use_bias=False,
        kernel_init=he_fan_out,
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def normalization(
    channels: int, *, config: ModelConfig, rngs: nnx.Rngs, zero_gamma: bool = False
) -> nnx.BatchNorm | nnx.GroupNorm | FrozenNorm:
    """Batch, group or frozen normalisation, in float32 also if the convolutions are not."""
    if config.norm == "frozen":
        return FrozenNorm(channels, epsilon=config.norm_epsilon, zero_gamma=zero_gamma)
    scale_init = nnx.initializers.zeros if zero_gamma else nnx.initializers.ones
    if config.norm == "group":
        return nnx.GroupNorm(
            channels,
            num_groups=config.group_count,
            epsilon=config.norm_epsilon,
            dtype=jnp.float32,
            scale_init=scale_init,
            rngs=rngs,
        )
    return nnx.BatchNorm(
        channels,
        momentum=config.norm_decay,
        epsilon=config.norm_epsilon,
        dtype=jnp.float32,
        scale_init=scale_init,
        rngs=rngs,
    )


class Shortcut(nnx.Module):
    """The identity where shapes allow it, else a strided 1x1 convolution and its normalisation."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, *, config: ModelConfig, rngs: nnx.Rngs
    ) -> None:
        self.is_identity = in_channels == out_channels and stride == 1
        if not self.is_identity:
            self.conv = convolution(in_channels, out_channels, 1, stride, config=config, rngs=rngs)
            self.norm = normalization(out_channels, config=config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x if self.is_identity else self.norm(self.conv(x))


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions; the first one has the stride."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int, *, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.conv1 = convolution(in_channels, channels, 3, stride, config=config, rngs=rngs)
        self.norm1 = normalization(channels, config=config, rngs=rngs)
        self.conv2 = convolution(channels, channels, 3, 1, config=config, rngs=rngs)
        # Gamma 0 makes the block start as the identity, which large batches need in their first epochs.
        self.norm2 = normalization(channels, config=config, rngs=rngs, zero_gamma=True)
        self.shortcut = Shortcut(in_channels, channels, stride, config=config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + self.shortcut(x))


class BottleneckBlock(nnx.Module):
    """1x1 down, 3x3 with the stride (this is the "b" of v1b), 1x1 up."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, *, config: ModelConfig, rngs: nnx.Rngs) -> None:
        out_channels = channels * self.expansion
        self.conv1 = convolution(in_channels, channels, 1, 1, config=config, rngs=rngs)
        self.norm1 = normalization(channels, config=config, rngs=rngs)
        self.conv2 = convolution(channels, channels, 3, stride, config=config, rngs=rngs)
        self.norm2 = normalization(channels, config=config, rngs=rngs)
        self.conv3 = convolution(channels, out_channels, 1, 1, config=config, rngs=rngs)
        self.norm3 = normalization(out_channels, config=config, rngs=rngs, zero_gamma=True)
        self.shortcut = Shortcut(in_channels, out_channels, stride, config=config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + self.shortcut(x))


@dataclass(frozen=True)
class Architecture:
    """The block, the number of blocks in each stage, and the channels of the first stage. Each stage doubles them."""

    block: type[BasicBlock] | type[BottleneckBlock]
    stage_sizes: tuple[int, ...]
    width: int


ARCHITECTURES = {
    "tiny": Architecture(BasicBlock, (1, 1, 1), width=16),
    "resnet18": Architecture(BasicBlock, (2, 2, 2, 2), width=64),
    "resnet34": Architecture(BasicBlock, (3, 4, 6, 3), width=64),
    "resnet50": Architecture(BottleneckBlock, (3, 4, 6, 3), width=64),
    "resnet101": Architecture(BottleneckBlock, (3, 4, 23, 3), width=64),
    "resnet152": Architecture(BottleneckBlock, (3, 8, 36, 3), width=64),
}


def stage_channels(config: ModelConfig) -> list[int]:
    """The channels of each stage's output."""
    architecture = ARCHITECTURES[config.architecture]
    first = architecture.width * architecture.block.expansion
    return [first * 2**stage for stage in range(len(architecture.stage_sizes))]


def stage_strides(config: ModelConfig) -> list[int]:
    """The pixels between two places of each stage's output."""
    first = config.stem_stride * (2 if config.stem_pool else 1)
    return [first * 2**stage for stage in range(len(ARCHITECTURES[config.architecture].stage_sizes))]


class Features(nnx.Module):
    """Stem and residual stages."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        architecture = ARCHITECTURES[config.architecture]
        width = architecture.width
        self.stem_conv = convolution(
            config.input_channels, width, config.stem_kernel, config.stem_stride, config=config, rngs=rngs
        )
        self.stem_norm = normalization(width, config=config, rngs=rngs)
        self.stem_pool = config.stem_pool

        blocks = []
        in_channels = width
        for stage, block_count in enumerate(architecture.stage_sizes):
            channels = width * 2**stage
            for index in range(block_count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(architecture.block(in_channels, channels, stride, config=config, rngs=rngs))
                in_channels = channels * architecture.block.expansion
        self.blocks = nnx.List(blocks)
        self.stage_sizes = architecture.stage_sizes

    def features(self, images: jax.Array) -> list[jax.Array]:
        """The output of each stage, ``[batch, rows, columns, channels]``: C2 to C5 of a network with four stages."""
        x = nnx.relu(self.stem_norm(self.stem_conv(images)))
        if self.stem_pool:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))  # type: ignore[no-untyped-call]
        outputs = []
        blocks = iter(self.blocks)
        for block_count in self.stage_sizes:
            for block in islice(blocks, block_count):
                x = block(x)
            outputs.append(x)
        return outputs


class ResNet(Features):
    """Stem, residual stages, global average, classifier. Returns float32 logits."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.classifier = nnx.Linear(stage_channels(config)[-1], config.class_count, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.classifier(jnp.mean(self.features(images)[-1], axis=(1, 2)))
