"""A transformer that guesses the next word: layers in a scan, remat, dropout, clipped gradients, padded sentences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax import lax

from lax_steps import AXIS, make_variables

WORDS, LENGTH, WIDTH, HEADS, LAYERS, ROWS = 32, 8, 16, 2, 2, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(1e-2, 0, 20)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        attention = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH)(hidden)), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        embedding = nn.Embed(WORDS, WIDTH)
        x = embedding(words) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = layers()(x, nn.make_causal_mask(words))
        return embedding.attend(nn.LayerNorm()(x))


def make_state() -> train_state.TrainState:
    model = Transformer()
    variables = make_variables(model, np.ones((1, LENGTH), np.int32))
    return train_state.TrainState.create(apply_fn=model.apply, tx=OPTIMIZER, **variables)


def make_batch(place: int, step: int) -> np.ndarray:
    """The sentences of the device at ``place`` among all; zeros pad them."""
    generator = np.random.default_rng([place, step])
    words = generator.integers(1, WORDS, (ROWS, LENGTH + 1))
    lengths = generator.integers(LENGTH // 2, LENGTH + 2, (ROWS, 1))
    return np.where(np.arange(LENGTH + 1) < lengths, words, 0).astype(np.int32)


def train_step(
    state: train_state.TrainState, words: jax.Array, *, is_typed: bool
) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
    """One step.

    Args:
      state: the same one on all devices.
      words: this device's sentences.
      is_typed: JAX itself sums the gradients of parameters that are the same on all devices.
    """
    inputs, targets = words[:, :-1], words[:, 1:]
    weights = (targets > 0).astype(jnp.float32)
    total = lax.psum(weights.sum(), AXIS)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), state.step), lax.axis_index(AXIS))

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, inputs, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        share = jnp.sum(losses * weights) / total
        return lax.psum(share, AXIS) if is_typed else share

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    if not is_typed:
        loss, grads = lax.psum((loss, grads), AXIS)
    return state.apply_gradients(grads=grads), {"loss": loss, "words": total, "norm": optax.tree.norm(grads)}


typed_train_step = functools.partial(train_step, is_typed=True)
untyped_train_step = functools.partial(train_step, is_typed=False)
