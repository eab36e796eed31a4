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
import optax

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
        """The learning rate, float32[], of the update after ``step`` others, int32[]."""
        begin = self.warmup_steps if self.decay_from == "warmup_end" else 0
        warmup = optax.linear_schedule(self.initial, self.peak, self.warmup_steps)
        decay = optax.polynomial_schedule(self.peak, self.final, self.power, self.total_steps - begin, begin)
        return jnp.where(jnp.asarray(step) < self.warmup_steps, warmup(step), decay(step))


_IN_STEPS = {
    # NVIDIA DeepLearningExamples, PyTorch: the warm-up is a share of the steps.
    "bert-large-phase1": WarmupPoly(6e-3, 0.2843 * 7038, 7038, 0.5, "step_zero"),
    "bert-large-phase2": WarmupPoly(4e-3, 0.128 * 1563, 1563, 0.5, "step_zero"),
    # AWS deep-learning-models, TensorFlow 2.
    "bert-base-aws-phase1": WarmupPoly(5e-3, 2812, 14064, 0.5, "warmup_end", final=3e-4),
    "bert-base-aws-phase2": WarmupPoly(4e-3, 625, 6248, 0.5, "warmup_end", final=3e-4),
    # NVIDIA's submissions to MLPerf at batch 8192: 287 steps of warm-up that start at step -76.
    "bert-mlperf-8k": WarmupPoly(0.00288293, 287 - 76, 600, 1, "step_zero", initial=0.00288293 * 76 / 287),
}

_IN_EPOCHS = {
    # AWS deep-learning-models at batch 16384, MXNet and TensorFlow 1.
    "resnet50-aws-mxnet": WarmupPoly(6.4, 10, 90, 2, "warmup_end", initial=0.001),
    "resnet50-aws-tf": WarmupPoly(6.4, 10, 90, 2, "warmup_end", initial=0.001, final=1e-5),
    # MLPerf's reference at batch 2048. It counts one step more until the end of the decay.
    "resnet50-mlperf-lars": WarmupPoly(8.5, 5, 41, 2, "warmup_end", final=1e-4),
}

SCHEDULE_NAMES = (*_IN_STEPS, *_IN_EPOCHS)
"""What ``named_schedule`` knows."""

_SCHEDULES: Mapping[str, WarmupPoly] = MappingProxyType({**_IN_STEPS, **_IN_EPOCHS})


def named_schedule(name: str, *, steps_per_epoch: int | None = None) -> WarmupPoly:
    """The schedule of a published recipe, at its published batch; for another one, ``dataclasses.replace`` its peak.

    Args:
      name: one of ``SCHEDULE_NAMES``.
      steps_per_epoch: for the recipes that count in epochs, which are those of ResNet-50, and only for them.

    Raises:
      ConfigError: there is no such schedule, or ``steps_per_epoch`` is missing or out of place.
    """
    if name not in _SCHEDULES:
        raise ConfigError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULE_NAMES)}")
    schedule = _SCHEDULES[name]
    if (name in _IN_EPOCHS) != (steps_per_epoch is not None):
        unit = "epochs: give" if name in _IN_EPOCHS else "steps: it takes no"
        raise ConfigError(f"schedule {name!r} counts in {unit} steps_per_epoch")
    if steps_per_epoch is None:
        return schedule
    return dataclasses.replace(
        schedule,
        warmup_steps=schedule.warmup_steps * steps_per_epoch,
        total_steps=schedule.total_steps * steps_per_epoch,
    )
