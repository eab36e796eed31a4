"""The learning rates and the updates of Mask R-CNN's recipes: SGD or NovoGrad, with the all-reduce in front."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from models.common.errors import require
from models.common.optimizer import GradientConfig, Optimizer, WeightsDtype, distributed, weights_mask


@dataclass(frozen=True)
class Schedule:
    """A learning rate that rises linearly to its peak, then falls: a function of the step."""

    peak: float
    """The highest learning rate."""
    warmup_steps: int
    initial: float
    """The learning rate at step 0, if there is a warm-up."""
    step_count: int
    """Updates of the parameters in the whole run."""
    decay: Literal["drops", "cosine"] = "drops"
    """After the warm-up: drops at drop_steps, or half a cosine from peak at the end of the warm-up to final at
    step_count."""
    drop_steps: tuple[int, ...] = ()
    """From each of these steps on, the learning rate is multiplied by drop_factor. They count from step 0."""
    drop_factor: float = 0.1
    final: float = 0.0
    """The learning rate at the end of the cosine."""

    def __post_init__(self) -> None:
        require(self.step_count >= 1, f"step_count is {self.step_count}; it must be at least 1")
        require(
            0 <= self.warmup_steps <= self.step_count,
            f"warmup_steps is {self.warmup_steps}; it must be 0 to step_count ({self.step_count})",
        )

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        """The learning rate of the update after ``step`` other updates: float32, of the shape of ``step``."""
        count = jnp.asarray(step, jnp.float32)
        warmup = self.initial + (self.peak - self.initial) * count / max(self.warmup_steps, 1)
        return jnp.where(count < self.warmup_steps, warmup, self._after_warmup(count))

    def _after_warmup(self, count: jax.Array) -> jax.Array:
        if self.decay == "drops":
            drop_count = sum(((count >= step).astype(jnp.float32) for step in self.drop_steps), start=jnp.float32(0))
            return self.peak * self.drop_factor**drop_count
        progress = jnp.clip((count - self.warmup_steps) / max(self.step_count - self.warmup_steps, 1), 0, 1)
        return self.final + (self.peak - self.final) * (1 + jnp.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class OptimizerConfig(GradientConfig):
    """The hyperparameters of an update; the defaults are Detectron's."""

    algorithm: Literal["sgd", "novograd"] = "sgd"
    momentum: float = 0.9
    """The share of the update before that a step keeps; beta 1 of NovoGrad."""
    b2: float = 0.25
    """NovoGrad's decay of the norm of each layer's gradient."""
    epsilon: float = 1e-7
    """NovoGrad adds it to the norm."""
    weight_decay: float = 1e-4
    """Of kernels only. Biases do not decay, and the normalisation is frozen."""
    bias_rate: float = 1.0
    """SGD multiplies the learning rate of biases by this number."""
    max_grad_norm: float = 0.0
    """Gradients with a larger norm, over all parameters, are scaled down to it. 0: they are not."""


def make_optimizer(
    config: OptimizerConfig,
    learning_rate: optax.Schedule,
    *,
    accumulate_every: int = 1,
    is_reduced: bool = False,
    clip_instead: Callable[[float], optax.GradientTransformation] | None = None,
    weights_from_reducers: WeightsDtype | None = None,
    is_across_steps: bool = False,
) -> Optimizer:
    """The whole chain: accumulation, all-reduce, loss scale, clipping, update.

    ``is_reduced``: gradients are reduced already. ``clip_instead`` makes what clips them where they lie on several
    workers.
    """
    max_norm = config.max_grad_norm
    return distributed(
        optax.chain(
            optax.clip_by_global_norm(max_norm) if max_norm and not clip_instead else optax.identity(),
            _novograd(config, learning_rate) if config.algorithm == "novograd" else _sgd(config, learning_rate),
        ),
        config,
        accumulate_every=accumulate_every,
        instead=clip_instead(max_norm) if clip_instead and max_norm else optax.identity() if is_reduced else None,
        weights_from_reducers=weights_from_reducers,
        is_across_steps=is_across_steps,
    )


def _sgd(config: OptimizerConfig, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=weights_mask),
        optax.masked(optax.scale(config.bias_rate), _others_mask),
        optax.sgd(learning_rate, momentum=config.momentum),
    )


def _novograd(config: OptimizerConfig, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """NovoGrad of Ginsburg et al. (2019). Its weight decay is a part of the momentum, so it is not chained to it."""

    def scale(weight_decay: float) -> optax.GradientTransformation:
        return optax.scale_by_novograd(config.momentum, config.b2, config.epsilon, weight_decay=weight_decay)

    return optax.chain(
        optax.masked(scale(config.weight_decay), weights_mask),
        optax.masked(scale(0.0), _others_mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _others_mask(params: optax.Params) -> Any:
    """The opposite of ``weights_mask``."""
    return jax.tree.map(lambda is_weight: not is_weight, weights_mask(params))
