"""Nesterov SGD with the learning rate of large-batch training: linear scaling, linear warm-up, polynomial decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import optax

import jaxhetero
from jaxhetero import optimizers


@dataclass(frozen=True)
class OptimizerConfig:
    """The hyperparameters of the optimizer. Learning rates other than the base one are absolute."""

    base_learning_rate: float = 0.1
    """The peak for a global batch of 256; the real peak grows linearly with the global batch."""
    warmup_initial_learning_rate: float = 0.001
    """Where the warm-up starts."""
    warmup_epochs: float = 10.0
    final_learning_rate: float = 0.0
    """Where the decay ends, after the last epoch."""
    decay_power: float = 2.0
    """The decay is (1 - progress) ** decay_power, with progress counted from the end of the warm-up."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    """Added to the gradient before momentum. Kernels only: biases, gammas and betas do not decay."""
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """In what the workers exchange gradients; the 16-bit ones send half the bytes."""
    error_feedback: bool = False
    """Add what rounding to wire_dtype loses to the gradients of the next step."""


def peak_learning_rate(config: OptimizerConfig, global_batch: int) -> float:
    """The linear scaling rule of Goyal et al. (2017)."""
    return config.base_learning_rate * global_batch / 256


def learning_rate_schedule(
    config: OptimizerConfig, *, global_batch: int, steps_per_epoch: int, epochs: int
) -> optax.Schedule:
    """The learning rate as a function of the step."""
    step_count = steps_per_epoch * epochs
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    peak = peak_learning_rate(config, global_batch)
    warmup = optax.linear_schedule(config.warmup_initial_learning_rate, peak, warmup_steps)
    decay = optax.polynomial_schedule(peak, config.final_learning_rate, config.decay_power, step_count - warmup_steps)
    return optax.join_schedules([warmup, decay], boundaries=[warmup_steps])


def distributed_sgd(config: OptimizerConfig, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Mean of the workers' gradients first; from there on every worker computes the same update."""
    wire_dtype = None if config.wire_dtype == "float32" else config.wire_dtype
    return optax.chain(
        optimizers.error_feedback(wire_dtype) if wire_dtype and config.error_feedback else optax.identity(),
        jaxhetero.all_reduce_gradients(wire_dtype=wire_dtype),
        optax.add_decayed_weights(config.weight_decay, mask=_kernels),
        optax.sgd(learning_rate, momentum=config.momentum, nesterov=True),
    )


def _kernels(params: optax.Params) -> optax.Params:
    """True for the leaves that decay."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
