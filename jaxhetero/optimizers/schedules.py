"""Learning rates of large-batch training: how they grow with the batch, and how they change over the steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp

from jaxhetero.errors import ConfigError


def linear_scaling(base_learning_rate: float, batch: int, base_batch: int) -> float:
    """The linear scaling rule: ``batch / base_batch`` times the learning rate that is right for ``base_batch``.

    For SGD: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017). Batches are global ones,
    in examples.
    """
    return base_learning_rate * batch / base_batch


def sqrt_scaling(base_learning_rate: float, batch: int, base_batch: int) -> float:
    """The square root scaling rule, which keeps the variance of an update: ``sqrt(batch / base_batch)`` times the rate.

    For LAMB: You et al. (2020), after Krizhevsky, "One weird trick for parallelizing convolutional neural networks"
    (2014). Batches are global ones, in examples.
    """
    return base_learning_rate * math.sqrt(batch / base_batch)


@dataclass(frozen=True)
class WarmupPoly:
    """A learning rate that grows linearly, then decays polynomially: a function of the step, for optax.

    Two schedules go by that name, which differ in what they are after the warm-up::

        final + (peak - final) * (1 - progress) ** power

    With ``decay_from="warmup_end"``, ``progress`` runs from 0 at the end of the warm-up to 1 at ``total_steps``, so the
    rate goes down from ``peak``: AWS's and MLPerf's ResNet-50, AWS's BERT. With ``decay_from="step_zero"`` it is
    ``step / total_steps``, so the rate drops at the end of the warm-up to what it would be without one: NVIDIA's BERT.

    Steps count from 0, as optax does, so the first update has the rate ``initial``. NVIDIA's PyTorch schedulers, unlike
    their TensorFlow ones, count from 1.
    """

    peak: float
    """The learning rate at the end of the warm-up, just before a drop."""
    warmup_steps: float
    """Need not be whole where the reference gives a share of ``total_steps``."""
    total_steps: float
    """From here on the rate is ``final``."""
    power: float
    """Of the decay: 1 is linear, less than 1 decays late, more than 1 early."""
    decay_from: Literal["warmup_end", "step_zero"]
    """Where the decay begins to count; no default, because recipes that do not say it are often misread."""
    initial: float = 0.0
    """At step 0, if there is a warm-up."""
    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ConfigError(
                f"WarmupPoly: {self.warmup_steps} warmup_steps of {self.total_steps} total_steps; "
                "they must be at least 0 and fewer than all"
            )
        if self.decay_from not in ("warmup_end", "step_zero"):
            raise ConfigError(f"WarmupPoly: decay_from is {self.decay_from!r}; it must be 'warmup_end' or 'step_zero'")

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        """The learning rate, float32, of the update after ``step`` others; both of shape ``[]``, or any other."""
        count = jnp.asarray(step, float)
        decay_begin = self.warmup_steps if self.decay_from == "warmup_end" else 0
        # Of a step count and not of a progress: XLA may round 1 - total / total below 0, where a root is NaN, which
        # is what optax.polynomial_schedule returns at the end of some of the schedules below.
        left = jnp.clip(self.total_steps - count, 0) / (self.total_steps - decay_begin)
        decay = self.final + (self.peak - self.final) * left**self.power
        warmup = self.initial + (self.peak - self.initial) * count / max(self.warmup_steps, 1)
        return jnp.where(count < self.warmup_steps, warmup, decay)


_IN_STEPS: Mapping[str, WarmupPoly] = MappingProxyType(
    {
        # NVIDIA DeepLearningExamples, PyTorch: the warm-up is a share of the steps.
        "bert-large-phase1": WarmupPoly(6e-3, 0.2843 * 7038, 7038, 0.5, "step_zero"),
        "bert-large-phase2": WarmupPoly(4e-3, 0.128 * 1563, 1563, 0.5, "step_zero"),
        # AWS deep-learning-models, TensorFlow 2.
        "bert-base-aws-phase1": WarmupPoly(5e-3, 2812, 14064, 0.5, "warmup_end", final=3e-4),
        "bert-base-aws-phase2": WarmupPoly(4e-3, 625, 6248, 0.5, "warmup_end", final=3e-4),
        # NVIDIA's submissions to MLPerf at batch 8192: 287 steps of warm-up that begin at step -76.
        "bert-mlperf-8k": WarmupPoly(0.00288293, 287 - 76, 600, 1.0, "step_zero", initial=0.00288293 * 76 / 287),
    }
)

_IN_EPOCHS: Mapping[str, WarmupPoly] = MappingProxyType(
    {
        # AWS deep-learning-models at batch 16384, MXNet and TensorFlow 1.
        "resnet50-aws-mxnet": WarmupPoly(6.4, 10, 90, 2.0, "warmup_end", initial=0.001),
        "resnet50-aws-tf": WarmupPoly(6.4, 10, 90, 2.0, "warmup_end", initial=0.001, final=1e-5),
        # MLPerf's reference at batch 2048. Its decay ends one step later.
        "resnet50-mlperf-lars": WarmupPoly(8.5, 5, 41, 2.0, "warmup_end", final=1e-4),
    }
)

SCHEDULE_NAMES = (*_IN_STEPS, *_IN_EPOCHS)
"""What ``named_schedule`` knows."""


def named_schedule(name: str, *, steps_per_epoch: int | None = None) -> WarmupPoly:
    """The schedule of a published recipe, at its published batch; for another one, ``dataclasses.replace`` its peak.

    Args:
      name: one of ``SCHEDULE_NAMES``.
      steps_per_epoch: for the recipes that count in epochs, which are those of ResNet-50, and only for them.

    Raises:
      ConfigError: there is no such schedule, or ``steps_per_epoch`` is missing or out of place.
    """
    if name in _IN_STEPS and steps_per_epoch is None:
        return _IN_STEPS[name]
    if name in _IN_EPOCHS and steps_per_epoch is not None:
        epochs = _IN_EPOCHS[name]
        warmup_steps, total_steps = epochs.warmup_steps * steps_per_epoch, epochs.total_steps * steps_per_epoch
        return dataclasses.replace(epochs, warmup_steps=warmup_steps, total_steps=total_steps)
    if name in SCHEDULE_NAMES:
        raise ConfigError(
            f"schedule {name!r} counts in {'steps: drop' if name in _IN_STEPS else 'epochs: give'} steps_per_epoch"
        )
    raise ConfigError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULE_NAMES)}")
