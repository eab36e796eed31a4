"""BERT as Flax NNX modules: the encoder of Devlin et al. (2019) and one model for each task.

Weights, softmax and layer norms are float32; the matrix products compute in ``ModelConfig.dtype``. ``rngs`` turns
dropout on: ``nnx.Rngs(dropout=key)`` in training, None otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from numpy.typing import NDArray

from models.common.errors import require

# NumPy arrays are passed to a compiled program; inside of it they are JAX arrays.
Array: TypeAlias = jax.Array | NDArray[Any]

# Far below any real score, and finite in float32.
MASKED_SCORE = -1e9


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes the network. The defaults are those of BERT-large."""

    vocabulary_size: int = 30522
    hidden_size: int = 1024
    layer_count: int = 24
    head_count: int = 16
    intermediate_size: int = 4096
    position_count: int = 512
    """The longest sequence."""
    segment_count: int = 2
    dropout: float = 0.1
    """The dropout rate of the embeddings and of each sub-layer's output."""
    attention_dropout: float = 0.1
    """The dropout rate of the attention probabilities."""
    norm_epsilon: float = 1e-12
    initial_std: float = 0.02
    """Standard deviation of the initial weights. Small networks learn sooner with a larger one."""
    position_init: Literal["normal", "sinusoid"] = "normal"
    """The initial values of the learned position vectors. With sinusoids (Vaswani et al., 2017) the step from one
    position to the next is the same rotation everywhere."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the matrix products."""
    remat: bool = False
    """Recompute each layer in the backward pass: about a third more work for a fraction of the memory."""

    def __post_init__(self) -> None:
        require(
            self.hidden_size % self.head_count == 0,
            f"head_count is {self.head_count}; it must divide hidden_size ({self.hidden_size})",
        )


class Batch(NamedTuple):
    """The input of the encoder; int32 ``[batch, length]`` each."""

    token_ids: Array
    segment_ids: Array
    """0 for the first text of a pair, 1 for the second."""
    mask: Array
    """1 for tokens, 0 for padding."""


def weight_init(config: ModelConfig) -> nnx.Initializer:
    return nnx.initializers.truncated_normal(config.initial_std)


def sinusoids(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
    """An initializer, float32 ``[positions, size]``: sines and cosines of wavelengths from 2 pi to 20,000 pi."""
    del key, out_sharding
    position_count, size = shape
    rates = 10_000.0 ** (-jnp.arange(size // 2) / (size // 2))
    angles = jnp.arange(position_count)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1).astype(dtype)


def position_init(config: ModelConfig) -> nnx.Initializer:
    """The initializer of the position vectors, scaled like the other embeddings."""
    if config.position_init == "normal":
        return weight_init(config)
    root_mean_square = 0.5**0.5
    return lambda *arguments, **more: sinusoids(*arguments, **more) * (config.initial_std / root_mean_square)


def linear(inputs: int, outputs: int, *, config: ModelConfig, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, kernel_init=weight_init(config), dtype=jnp.dtype(config.dtype), rngs=rngs)


def layer_norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.hidden_size, epsilon=config.norm_epsilon, dtype=jnp.float32, rngs=rngs)


def dropout(x: jax.Array, rate: float, rngs: nnx.Rngs | None) -> jax.Array:
    return x if rngs is None or rate == 0 else nnx.Dropout(rate)(x, rngs=rngs)


def gelu(x: jax.Array) -> jax.Array:
    return nnx.gelu(x, approximate=False)


class Embeddings(nnx.Module):
    """The sum of a token's, its position's and its segment's vector, normalised."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config

        def table(rows: int, init: nnx.Initializer) -> nnx.Embed:
            return nnx.Embed(rows, config.hidden_size, embedding_init=init, rngs=rngs)

        self.token = table(config.vocabulary_size, weight_init(config))
        self.position = table(config.position_count, position_init(config))
        self.segment = table(config.segment_count, weight_init(config))
        self.norm = layer_norm(config, rngs)

    def __call__(self, batch: Batch, *, rngs: nnx.Rngs | None) -> jax.Array:
        positions = jnp.arange(batch.token_ids.shape[1])
        x = (
            self.token(jnp.asarray(batch.token_ids))
            + self.segment(jnp.asarray(batch.segment_ids))
            + self.position(positions)
        )
        return dropout(self.norm(x), self.config.dropout, rngs)


class SelfAttention(nnx.Module):
    """Multi-head attention from every token to all tokens of its sequence."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        size = config.hidden_size
        # Not nnx.MultiHeadAttention, because its biases are matrices. An optimizer that recognises biases by their
        # shape would adapt and decay them.
        self.query = linear(size, size, config=config, rngs=rngs)
        self.key = linear(size, size, config=config, rngs=rngs)
        self.value = linear(size, size, config=config, rngs=rngs)
        self.output = linear(size, size, config=config, rngs=rngs)

    def __call__(self, x: jax.Array, mask: Array, *, rngs: nnx.Rngs | None) -> jax.Array:
        heads = (*x.shape[:2], self.config.head_count, -1)
        query, key, value = (layer(x).reshape(heads) for layer in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
        probabilities = jax.nn.softmax(jnp.where(mask[:, None, None, :] > 0, scores, MASKED_SCORE))
        probabilities = dropout(probabilities, self.config.attention_dropout, rngs)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities.astype(value.dtype), value)
        return self.output(mixed.reshape(x.shape))


class Layer(nnx.Module):
    """Attention, then a feed-forward network for each token. Each is added to its input, and the sum normalised."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention = SelfAttention(config, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs)
        self.intermediate = linear(config.hidden_size, config.intermediate_size, config=config, rngs=rngs)
        self.output = linear(config.intermediate_size, config.hidden_size, config=config, rngs=rngs)
        self.output_norm = layer_norm(config, rngs)

    def __call__(self, x: jax.Array, mask: Array, rngs: nnx.Rngs | None) -> jax.Array:
        attended = dropout(self.attention(x, mask, rngs=rngs), self.config.dropout, rngs)
        x = self.attention_norm(x + attended)
        transformed = dropout(self.output(gelu(self.intermediate(x))), self.config.dropout, rngs)
        output: jax.Array = self.output_norm(x + transformed)
        return output


class Encoder(nnx.Module):
    """Returns every token's vector, float32 ``[batch, length, hidden]``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embeddings = Embeddings(config, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.layer_count)])

    def __call__(self, batch: Batch, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.embeddings(batch, rngs=rngs)
        run = nnx.remat(Layer.__call__) if self.config.remat else Layer.__call__
        for layer in self.layers:
            x = run(layer, x, batch.mask, rngs)
        return x


class Pooler(nnx.Module):
    """The vector of a sequence, computed from the vector of its first token."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.dense = linear(config.hidden_size, config.hidden_size, config=config, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return jnp.tanh(self.dense(hidden[:, 0]).astype(jnp.float32))


class PreTrainingModel(nnx.Module):
    """Predicts the masked tokens, and whether the second text follows the first."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.pooler = Pooler(config, rngs=rngs)
        self.transform = linear(config.hidden_size, config.hidden_size, config=config, rngs=rngs)
        self.transform_norm = layer_norm(config, rngs)
        self.decoder_bias = nnx.Param(jnp.zeros(config.vocabulary_size))
        self.next_sentence = linear(config.hidden_size, 2, config=config, rngs=rngs)

    def __call__(self, batch: Batch, positions: Array, *, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, jax.Array]:
        """Logits of the tokens at ``positions`` (int32 ``[batch, predictions]``) and of [follows, is random].

        float32 ``[batch, predictions, vocabulary]`` and ``[batch, 2]``.
        """
        hidden = self.encoder(batch, rngs=rngs)
        masked = jnp.take_along_axis(hidden, positions[..., None], axis=1)
        transformed = self.transform_norm(gelu(self.transform(masked)))
        # The decoder shares the matrix of the token embeddings.
        table = self.encoder.embeddings.token.embedding[...]
        dtype = jnp.dtype(self.config.dtype)
        scores = jnp.einsum("bph,vh->bpv", transformed.astype(dtype), table.astype(dtype))
        token_logits = scores.astype(jnp.float32) + self.decoder_bias[...]
        return token_logits, self.next_sentence(self.pooler(hidden)).astype(jnp.float32)


class QuestionAnsweringModel(nnx.Module):
    """Predicts the first and the last token of an answer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.encoder = Encoder(config, rngs=rngs)
        self.span = linear(config.hidden_size, 2, config=config, rngs=rngs)

    def __call__(self, batch: Batch, *, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, jax.Array]:
        """Logits of the first and of the last token; float32 ``[batch, length]`` each, very low for padding."""
        logits = self.span(self.encoder(batch, rngs=rngs)).astype(jnp.float32)
        logits = jnp.where(batch.mask[..., None] > 0, logits, MASKED_SCORE)
        return logits[..., 0], logits[..., 1]


class ClassificationModel(nnx.Module):
    """Predicts the class of a text or of a pair of texts."""

    def __init__(self, config: ModelConfig, class_count: int, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.pooler = Pooler(config, rngs=rngs)
        self.classifier = linear(config.hidden_size, class_count, config=config, rngs=rngs)

    def __call__(self, batch: Batch, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Logits, float32 ``[batch, classes]``."""
        pooled = dropout(self.pooler(self.encoder(batch, rngs=rngs)), self.config.dropout, rngs)
        return self.classifier(pooled).astype(jnp.float32)
