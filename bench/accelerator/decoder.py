"""A decoder in plain JAX, for its shapes: a pipeline is planned on them, and nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Params: TypeAlias = dict[str, Any]
_WORK_DTYPE = jnp.bfloat16


@dataclass(frozen=True)
class Decoder:
    """Its parameters are float32, and it computes in bfloat16."""

    layer_count: int = 32
    width: int = 2720
    head_count: int = 34
    vocabulary: int = 32128
    token_count: int = 1024

    def params(self) -> Params:
        """The shapes of all parameters."""
        d = self.width

        def shape(*axes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(axes, jnp.float32)

        def layer() -> Params:
            return {
                "scales": shape(2, d),
                "attention": shape(d, 3 * d),
                "attention out": shape(d, d),
                "in": shape(d, 4 * d),
                "out": shape(4 * d, d),
            }

        ends = {"words": shape(self.vocabulary, d), "scale": shape(d), "head": shape(d, self.vocabulary)}
        return ends | {"layers": [layer() for _ in range(self.layer_count)]}

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params()))

    def words(self, sequence_count: int) -> jax.ShapeDtypeStruct:
        """The shape of a batch: the words, and one more to be predicted."""
        return jax.ShapeDtypeStruct((sequence_count, self.token_count + 1), jnp.int32)

    def loss(self, params: Params, words: jax.Array) -> jax.Array:
        """The mean loss of the words that follow, a scalar."""
        x = params["words"].astype(_WORK_DTYPE)[words[:, :-1]]
        for layer in params["layers"]:
            x = x + self._attend(layer, _normalise(x, layer["scales"][0]))
            inner = jax.nn.gelu(_project(_normalise(x, layer["scales"][1]), layer["in"]))
            x = x + _project(inner, layer["out"])
        logits = _project(_normalise(x, params["scale"]), params["head"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], axis=-1)
        return -jnp.mean(chosen)

    def _attend(self, layer: Params, x: jax.Array) -> jax.Array:
        sequence_count, token_count, width = x.shape
        heads = _project(x, layer["attention"]).reshape(sequence_count, token_count, 3, self.head_count, -1)
        mixed = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        return _project(mixed.reshape(sequence_count, token_count, width), layer["attention out"])


def _project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel.astype(_WORK_DTYPE)


def _normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale.astype(_WORK_DTYPE)
