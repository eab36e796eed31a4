"""Learning rates of large-batch training: how a rate grows with the batch, and how it changes over the steps."""

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
    """The linear scaling rule, for SGD: ``base_learning_rate * batch / base_batch``.

    See Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017).

    Args:
      base_learning_rate: the learning rate that is right for ``base_batch``.
      batch, base_batch: examples in a batch of all workers together.

    Example:
      >>> from models.common.schedules import linear_scaling
      >>> linear_scaling(0.1, batch=8192, base_batch=256)
      3.2
    """
    return base_learning_rate * batch / base_batch


def sqrt_scaling(base_learning_rate: float, batch: int, base_batch: int) -> float:
    """The square root scaling rule, for LAMB: ``base_learning_rate * sqrt(batch / base_batch)``.

    It keeps the variance of an update. See You et al. (2020), after Krizhevsky, "One weird trick for parallelizing
    convolutional neural networks" (2014).

    Args:
      base_learning_rate: the learning rate that is right for ``base_batch``.
      batch, base_batch: examples in a batch of all workers together.

    Example:
      >>> from models.common.schedules import sqrt_scaling
      >>> sqrt_scaling(0.001, batch=1024, base_batch=256)
      0.002
    """
    return base_learning_rate * math.sqrt(batch / base_batch)


@dataclass(frozen=True)
class WarmupPoly:
    """A learning rate that grows linearly, then decays polynomially: a function of the step, for optax.

    The rate after the warm-up is::

        final + (peak - final) * (1 - progress) ** power

    Two schedules have this name, and differ in ``progress``. With ``decay_from="warmup_end"``, it is 0 at the end of
    the warm-up and 1 at ``total_steps``, so the rate goes down from ``peak``: AWS's and MLPerf's ResNet-50, AWS's BERT.
    With ``decay_from="step_zero"`` it is ``step / total_steps``, so the rate drops at the end of the warm-up to the
    rate of a schedule without warm-up: NVIDIA's BERT.

    Steps count from 0, as in optax, so the first update has the rate ``initial``. NVIDIA's PyTorch schedulers, unlike
    their TensorFlow ones, count from 1.

    Raises:
      ConfigError: ``warmup_steps`` is not in 0 to ``total_steps``, or ``decay_from`` is neither of the two.

    Example:
      >>> from models.common.schedules import WarmupPoly
      >>> schedule = WarmupPoly(peak=1.0, warmup_steps=2, total_steps=6, power=1.0, decay_from="warmup_end")
      >>> schedule(jnp.arange(7))
      Array([0.  , 0.5 , 1.  , 0.75, 0.5 , 0.25, 0.  ], dtype=float32)
    """

    peak: float
    """The learning rate at the end of the warm-up, just before a drop."""
    warmup_steps: float
    """The length of the warm-up. A fraction is allowed, because some recipes give a share of ``total_steps``."""
    total_steps: float
    """The rate is ``final`` from this step."""
    power: float
    """The exponent of the decay: 1 is linear, less than 1 decays late, more than 1 early."""
    decay_from: Literal["warmup_end", "step_zero"]
    """Where ``progress`` is 0. No default, because recipes that do not say it are often misread."""
    initial: float = 0.0
    """The rate at step 0, if there is a warm-up."""
    final: float = 0.0
    """The rate after the decay."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ConfigError(
                f"WarmupPoly: {self.warmup_steps} warmup_steps of {self.total_steps} total_steps; "
                "they must be at least 0 and fewer than all"
            )
        if self.decay_from not in ("warmup_end", "step_zero"):
            raise ConfigError(f"WarmupPoly: decay_from is {self.decay_from!r}; it must be 'warmup_end' or 'step_zero'")

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        """The learning rate of the update after ``step`` other updates: float32, of the shape of ``step``."""
        count = jnp.asarray(step, float)
        decay_begin = self.warmup_steps if self.decay_from == "warmup_end" else 0
        # The power of a number of steps, and not of 1 - progress. XLA may round 1 - total / total below 0, and the root
        # of that is NaN: optax.polynomial_schedule ends so with some of the schedules below.
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
"""The names of the published recipes that ``named_schedule`` knows."""


def named_schedule(name: str, *, steps_per_epoch: int | None = None) -> WarmupPoly:
    """The schedule of a published recipe, for its published batch.

    Args:
      name: one of ``SCHEDULE_NAMES``.
      steps_per_epoch: for the recipes that count in epochs, which are those of ResNet-50, and only for them.

    Raises:
      ConfigError: there is no such schedule, or ``steps_per_epoch`` is missing or out of place.

    Example:
      The recipe is for 65,536 examples in a batch. A batch of a quarter has half the rate by the square root rule:

      >>> import dataclasses
      >>> from models.common.schedules import named_schedule, sqrt_scaling
      >>> schedule = named_schedule("bert-large-phase1")
      >>> dataclasses.replace(schedule, peak=sqrt_scaling(schedule.peak, 16384, 65536)).peak
      0.003
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
