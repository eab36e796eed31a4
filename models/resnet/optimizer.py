"""SGD and LARS for large batches: the learning rate is scaled with the batch, warmed up, then lowered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import optax

from jaxhetero.optimizers import lars
from models.common.optimizer import GradientConfig, Optimizer, WeightsDtype, distributed, weights_mask
from models.common.schedules import WarmupPoly, linear_scaling


@dataclass(frozen=True)
class OptimizerConfig(GradientConfig):
    """The hyperparameters of the optimizer. Only base_learning_rate is scaled with the batch."""

    algorithm: Literal["sgd", "lars"] = "sgd"
    base_learning_rate: float = 0.1
    """The peak for a global batch of base_batch. The real peak grows linearly with the global batch."""
    base_batch: int = 256
    warmup_initial_learning_rate: float = 0.001
    """The learning rate at the start of the warm-up."""
    warmup_epochs: float = 10.0
    final_learning_rate: float = 0.0
    """The learning rate at the end of the decay, after the last epoch."""
    decay_power: float = 2.0
    """The decay is (1 - progress) ** decay_power, with progress counted from the end of the warm-up."""
    drop_epochs: tuple[int, ...] = ()
    """In place of the decay: after each of these epochs the learning rate is multiplied by drop_factor."""
    drop_factor: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    """Added to the gradient before momentum. Kernels only: biases, gammas and betas do not decay."""
    trust_coefficient: float = 0.001
    """The trust coefficient of LARS."""


def peak_learning_rate(config: OptimizerConfig, global_batch: int) -> float:
    """The linear scaling rule of Goyal et al. (2017)."""
    return linear_scaling(config.base_learning_rate, global_batch, config.base_batch)


def learning_rate_schedule(
    config: OptimizerConfig, *, global_batch: int, steps_per_epoch: int, epochs: int
) -> optax.Schedule:
    """The learning rate as a function of the step."""
    peak = peak_learning_rate(config, global_batch)
    warmup_steps = config.warmup_epochs * steps_per_epoch
    if not config.drop_epochs:
        return WarmupPoly(
            peak,
            warmup_steps,
            epochs * steps_per_epoch,
            config.decay_power,
            "warmup_end",
            initial=config.warmup_initial_learning_rate,
            final=config.final_learning_rate,
        )
    warmup = optax.linear_schedule(config.warmup_initial_learning_rate, peak, max(round(warmup_steps), 1))
    drops = {epoch * steps_per_epoch: config.drop_factor for epoch in config.drop_epochs}
    stairs = optax.piecewise_constant_schedule(peak, drops)
    return optax.join_schedules([warmup, lambda step: stairs(step + round(warmup_steps))], [round(warmup_steps)])


def make_optimizer(
    config: OptimizerConfig,
    learning_rate: optax.Schedule,
    *,
    accumulate_every: int = 1,
    is_reduced: bool = False,
    weights_from_reducers: WeightsDtype | None = None,
    is_across_steps: bool = False,
) -> Optimizer:
    """The whole chain: accumulation, all-reduce unless that is done already, loss scale, update."""
    if config.algorithm == "lars":
        inner = lars(
            learning_rate,
            config.momentum,
            config.weight_decay,
            trust_coefficient=config.trust_coefficient,
            nesterov=config.nesterov,
            mask=weights_mask,
        )
    else:
        inner = optax.chain(
            optax.add_decayed_weights(config.weight_decay, mask=weights_mask),
            optax.sgd(learning_rate, momentum=config.momentum, nesterov=config.nesterov),
        )
    return distributed(
        inner,
        config,
        accumulate_every=accumulate_every,
        instead=optax.identity() if is_reduced else None,
        weights_from_reducers=weights_from_reducers,
        is_across_steps=is_across_steps,
    )
