"""Decoders of the size of today's language models, as functions of shapes: nothing of them is ever computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


@dataclass(frozen=True)
class Decoder:
    """Rotary positions, grouped queries, gated linear units and RMS norms, in bfloat16."""

    layer_count: int
    width: int
    head_count: int
    key_head_count: int
    inner_width: int
    word_count: int
    is_tied: bool

    @property
    def head_width(self) -> int:
        return self.width // self.head_count

    def shapes(self) -> Params:
        """Of the parameters."""
        keys_width = self.key_head_count * self.head_width
        block = {
            "norm1": _shape(self.width),
            "q": _shape(self.width, self.width),
            "k": _shape(self.width, keys_width),
            "v": _shape(self.width, keys_width),
            "o": _shape(self.width, self.width),
            "norm2": _shape(self.width),
            "gate": _shape(self.width, self.inner_width),
            "up": _shape(self.width, self.inner_width),
            "down": _shape(self.inner_width, self.width),
        }
        params: Params = {"embed": _shape(self.word_count, self.width), "norm": _shape(self.width)}
        params["blocks"] = [block] * self.layer_count
        return params if self.is_tied else {**params, "head": _shape(self.width, self.word_count)}

    def parameter_count(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes()))

    def loss(self, params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """The mean cross-entropy over tokens of shape ``[rows, length]``."""
        h = params["embed"][tokens]
        angles = _angles(tokens.shape[1], self.head_width)
        for block in params["blocks"]:
            y = _norm(h, block["norm1"])
            h = h + self._attention(block, y, angles)
            y = _norm(h, block["norm2"])
            h = h + (jax.nn.silu(y @ block["gate"]) * (y @ block["up"])) @ block["down"]
        head = params["embed"].T if self.is_tied else params["head"]
        logits = (_norm(h, params["norm"]) @ head).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    def _attention(self, block: Params, y: jax.Array, angles: jax.Array) -> jax.Array:
        rows, length, _ = y.shape
        groups = self.head_count // self.key_head_count
        queries = _rotated((y @ block["q"]).reshape(rows, length, self.head_count, -1), angles)
        queries = queries.reshape(rows, length, self.key_head_count, groups, -1)
        keys = _rotated((y @ block["k"]).reshape(rows, length, self.key_head_count, -1), angles)
        values = (y @ block["v"]).reshape(rows, length, self.key_head_count, -1)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, keys).astype(jnp.float32) / math.sqrt(self.head_width)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(y.dtype)
        mixed: jax.Array = jnp.einsum("bhgqk,bkhd->bqhgd", weights, values).reshape(y.shape) @ block["o"]
        return mixed


DECODERS: dict[str, Decoder] = {
    "3 B": Decoder(36, 2048, 16, 2, 11_008, 151_936, is_tied=True),
    "100 B": Decoder(88, 10_240, 80, 8, 28_672, 128_256, is_tied=False),
}


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    scaled: jax.Array = normal.astype(x.dtype) * scale
    return scaled


def _angles(length: int, head_width: int) -> jax.Array:
    """Of each position and each pair of a head's elements."""
    half = head_width // 2
    angles: jax.Array = jnp.arange(length)[:, None] / 1e6 ** (jnp.arange(half) / half)
    return angles[None, :, None, :]


def _rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
