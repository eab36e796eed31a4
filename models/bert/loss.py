"""The loss of pre-training: the masked-token loss plus the next-sentence loss."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from models.bert.model import Array


class Targets(NamedTuple):
    """The right answers for a batch."""

    positions: Array
    """int32 ``[batch, predictions]``: the masked positions, filled up with 0."""
    token_ids: Array
    """int32 ``[batch, predictions]``: the original tokens at these positions."""
    weights: Array
    """float32 ``[batch, predictions]``: 1 for a masked position, 0 for filling."""
    is_random: Array
    """int32 ``[batch]``: 1 if the second text does not follow the first."""


def pre_training_loss(
    token_logits: jax.Array, next_logits: jax.Array, targets: Targets, next_sentence_weight: float = 1.0
) -> jax.Array:
    """float32[]: the mean over the masked tokens plus the mean over the pairs times ``next_sentence_weight``."""
    token_losses = optax.softmax_cross_entropy_with_integer_labels(token_logits, targets.token_ids)
    masked_mean = jnp.sum(token_losses * targets.weights) / jnp.maximum(jnp.sum(targets.weights), 1)
    next_losses = optax.softmax_cross_entropy_with_integer_labels(next_logits, targets.is_random)
    return masked_mean + next_sentence_weight * jnp.mean(next_losses)


class PredictionCounts(NamedTuple):
    """Sums over a batch, to be added over batches and workers; float32[] each."""

    token_loss: jax.Array
    token_correct: jax.Array
    token_count: jax.Array
    next_correct: jax.Array
    next_count: jax.Array


def count_predictions(
    token_logits: jax.Array, next_logits: jax.Array, targets: Targets, is_real: Array
) -> PredictionCounts:
    """The losses and the correct predictions of a batch's real examples (``is_real``: bool ``[batch]``)."""
    weights = targets.weights * is_real[:, None]
    token_losses = optax.softmax_cross_entropy_with_integer_labels(token_logits, targets.token_ids)
    token_hits = jnp.argmax(token_logits, axis=-1) == targets.token_ids
    next_hits = jnp.argmax(next_logits, axis=-1) == targets.is_random
    return PredictionCounts(
        jnp.sum(token_losses * weights),
        jnp.sum(token_hits * weights),
        jnp.sum(weights),
        jnp.sum(next_hits * is_real).astype(jnp.float32),
        jnp.sum(is_real).astype(jnp.float32),
    )
