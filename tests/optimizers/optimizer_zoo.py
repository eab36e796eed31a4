"""Optimizers of optax and ours, with weights and gradients to run them on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxhetero import optimizers

Tree = dict[str, Any]

SHAPES = {"kernel": (9, 601), "bias": (601,), "scale": (), "one": (1,)}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 80)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)


def multi_steps(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.MultiSteps(tx, every_k_schedule=3).gradient_transformation()


OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.01),
    "adamw, scheduled and masked": optax.adamw(SCHEDULE, weight_decay=0.01, mask=matrices),
    "adamw, moments in bfloat16": optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "adamw, injected": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.02),
    "adamw, accumulated": multi_steps(optax.adamw(1e-2)),
    "adamw, clipped": optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(1e-2)),
    "nadamw": optax.nadamw(1e-2),
    "adamax": optax.adamax(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "adadelta": optax.adadelta(1.0),
    "adagrad": optax.adagrad(1e-2),
    "adan": optax.adan(1e-2),
    "lamb": optimizers.lamb(SCHEDULE),
    "lamb of optax": optax.lamb(1e-2),
    "lars": optimizers.lars(0.1),
    "lars of optax": optax.lars(0.1, momentum=0.9),
    "loss scaling": optimizers.dynamic_loss_scale(optimizers.lamb(SCHEDULE)),
    "novograd": optax.novograd(1e-2),
    "optimistic gradient descent": optax.optimistic_gradient_descent(1e-2),
    "prodigy": optax.contrib.prodigy(1e-2),
    "radam": optax.radam(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "yogi": optax.yogi(1e-2),
}
SIGNS = {"lion": optax.lion(1e-3), "rprop": optax.rprop(1e-3), "sign_sgd": optax.sign_sgd(1e-3)}


def weights(seed: int = 0) -> Tree:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def recorded(steps: int, seed: int = 1) -> list[Tree]:
    """Gradients of elements that differ in scale, which drift and are noisy."""
    random = np.random.default_rng(seed)
    scales = {name: 10.0 ** random.uniform(-4, 0, size=shape) for name, shape in SHAPES.items()}
    drift = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    return [
        {
            name: (scales[name] * (drift[name] + random.normal(size=shape))).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        for _ in range(steps)
    ]
