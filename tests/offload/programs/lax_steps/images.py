"""A residual network of images: BatchNorm along the devices, momentum, weight decay, and float16 with a loss scale."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import dynamic_scale, train_state
from jax import lax

from lax_steps import AXIS, make_variables

SIZE, CHANNELS, CLASSES, ROWS = 8, 3, 10, 4
WEIGHT_DECAY = 1e-3
OPTIMIZER = optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 20), momentum=0.9, nesterov=True)


class Block(nn.Module):
    filters: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), (2, 2))(x)))
        y = self.norm()(self.conv(self.filters, (3, 3))(y))
        shortcut = self.norm(name="shortcut_norm")(self.conv(self.filters, (1, 1), (2, 2), name="shortcut")(x))
        return nn.relu(shortcut + y)


class Network(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = conv(4, (3, 3), name="stem")(x)
        # The statistics of this one are each device's own until the end of the step.
        x = nn.relu(norm(name="stem_norm")(x))
        x = Block(8, conv, functools.partial(norm, axis_name=AXIS))(x)
        return nn.Dense(CLASSES, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: dynamic_scale.DynamicScale | None


def make_state(dtype: Any) -> TrainState:
    model = Network(dtype)
    variables = make_variables(model, np.ones((1, SIZE, SIZE, CHANNELS), np.float32))
    # A scale that is too large at first, so that a step is left out, and that grows again.
    scale = dynamic_scale.DynamicScale(growth_interval=2, scale=2.0**19) if dtype == jnp.float16 else None
    return TrainState.create(apply_fn=model.apply, tx=OPTIMIZER, dynamic_scale=scale, **variables)


def make_batch(place: int, step: int) -> dict[str, np.ndarray]:
    """What the device at ``place`` among all learns from."""
    generator = np.random.default_rng([place, step])
    images = generator.normal(place / 4, 1, (ROWS, SIZE, SIZE, CHANNELS)).astype(np.float32)
    return {"image": images, "label": generator.integers(0, CLASSES, ROWS)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels))


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
        return cross_entropy(logits, batch["label"]) + 0.5 * WEIGHT_DECAY * squares, (updated["batch_stats"], logits)

    scale, is_finite = state.dynamic_scale, None
    if scale is None:
        (loss, (batch_stats, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = lax.pmean(grads, AXIS)
    else:
        grad_fn = scale.value_and_grad(loss_fn, has_aux=True, axis_name=AXIS)
        scale, is_finite, (loss, (batch_stats, logits)), grads = grad_fn(state.params)
    correct = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    metrics = lax.pmean({"loss": loss, "accuracy": correct}, AXIS)
    new = state.apply_gradients(grads=grads, batch_stats=lax.pmean(batch_stats, AXIS), dynamic_scale=scale)
    if is_finite is not None:
        keep = functools.partial(jax.tree.map, functools.partial(jnp.where, is_finite))
        new = new.replace(params=keep(new.params, state.params), opt_state=keep(new.opt_state, state.opt_state))
        metrics["scale"] = scale.scale
    return new, metrics


def evaluate(state: TrainState, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The logits of all devices, in their order, and a score of them."""
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, batch["image"], train=False)
    logits, labels = lax.all_gather((logits, batch["label"]), AXIS, tiled=True)
    return {"logits": logits, "loss": cross_entropy(logits, labels)}
