"""LAMB for pre-training and Adam for fine-tuning, with the all-reduce of the gradients in front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import optax

from jaxhetero.optimizers import lamb
from models.common.optimizer import GradientConfig, Optimizer, WeightsDtype, distributed, weights_mask


@dataclass(frozen=True)
class OptimizerConfig(GradientConfig):
    """The hyperparameters of an update; the defaults are those of LAMB in pre-training."""

    algorithm: Literal["lamb", "adam"] = "lamb"
    """``adam`` is AdamW: it decays the weights separately from the gradient."""
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    """Of kernels and embeddings only. Biases and norms do not decay, and LAMB does not adapt them."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm, over all parameters, are scaled down to it."""
    loss_scale: float = 65536.0
    """The constant of static scaling, or the initial scale of dynamic scaling."""


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
    """The whole chain: accumulation, all-reduce, loss scale, update.

    ``is_reduced``: gradients are reduced already. ``clip_instead`` makes what clips them where they lie on several
    workers.
    """
    arguments = (learning_rate, config.b1, config.b2, config.epsilon)
    max_norm = None if clip_instead else config.max_grad_norm
    if config.algorithm == "lamb":
        inner = lamb(*arguments, config.weight_decay, max_grad_norm=max_norm, mask=weights_mask)
    else:
        inner = optax.chain(
            optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm),
            optax.adamw(*arguments, weight_decay=config.weight_decay, mask=weights_mask),
        )
    return distributed(
        inner,
        config,
        accumulate_every=accumulate_every,
        instead=clip_instead(config.max_grad_norm) if clip_instead else optax.identity() if is_reduced else None,
        weights_from_reducers=weights_from_reducers,
        is_across_steps=is_across_steps,
    )
