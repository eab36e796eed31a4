"""Sums in 8 and 4 bits, compared with a transcription of docs/how_to/eight_bits.md; prints their bits."""

import functools
import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import all_reduce_gradients, error_feedback

LARGEST = {"int8": 127, "int4": 7, "float8_e4m3fn": 448}
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (63,), (64,), (65, 3), (1000,), (300, 171)]


def contribution(rank: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    random = np.random.default_rng([rank, *shape])
    scales = np.exp(random.normal(0, 4, shape))
    return np.asarray(random.standard_normal(shape) * scales).astype(dtype)


def rounded(values: np.ndarray, wire_dtype: str) -> np.ndarray:
    if wire_dtype == "float8_e4m3fn":
        return values.astype(jnp.float8_e4m3fn).astype(np.float64)
    return np.round(values)


def transcription(parts: list[np.ndarray], wire_dtype: str, block: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """The mean, and the largest error of each element."""
    largest, is_float = LARGEST[wire_dtype], wire_dtype == "float8_e4m3fn"
    size = parts[0].size
    mean, errors = np.zeros(size, np.float64), np.zeros(size)
    flats = [part.astype(np.float32).astype(np.float64).reshape(-1) for part in parts]
    for first in range(0, size, block):
        blocks = [flat[first : first + block] for flat in flats]
        most = max(np.abs(block).max() for block in blocks)
        scale = 2.0**-117 if is_float else 2.0**-126
        while largest * scale < most:
            scale *= 2
        total = sum(rounded(block / scale, wire_dtype) for block in blocks)
        mean[first : first + block] = rounded(total / len(parts), wire_dtype) * scale
        errors[first : first + block] = scale
        if is_float:  # half of the distance to the next float, at most 1/16 of it, in each of two roundings
            magnitudes = np.mean([np.abs(block) for block in blocks], axis=0)
            errors[first : first + block] = 1.07 * magnitudes / 8 + scale / 512
    return mean.reshape(parts[0].shape), errors.reshape(parts[0].shape)


def check(wire_dtype: str) -> list[str]:
    size, digests = jaxhetero.size(), []
    for dtype in (np.float32, jnp.bfloat16):
        trees = [{str(shape): contribution(rank, shape, dtype) for shape in SHAPES} for rank in range(size)]
        mine = trees[jaxhetero.rank()] | {"count": np.int32(3)}
        mean = jax.jit(functools.partial(jaxhetero.pmean, wire_dtype=wire_dtype))(mine)
        total = jax.jit(functools.partial(jaxhetero.psum, wire_dtype=wire_dtype, bucket_bytes=4096))(mine)
        assert total["count"] == 3 * size
        assert mean["count"] == 3
        for name in trees[0]:
            parts = [tree[name] for tree in trees]
            expected, errors = transcription(parts, wire_dtype)
            np.testing.assert_array_equal(mean[name], expected.astype(dtype))
            np.testing.assert_array_equal(total[name], (expected * size).astype(dtype))
            if dtype == np.float32:
                exact = np.mean(parts, axis=0, dtype=np.float64)
                assert (np.abs(np.asarray(mean[name], np.float64) - exact) <= errors).all()
            digests.append(hashlib.sha256(np.asarray(total[name]).tobytes()).hexdigest())
    return digests


def check_exact(wire_dtype: str) -> None:
    """What is such a number on every worker is its own mean, whatever their number."""
    numbers = np.unique(rounded(np.linspace(-LARGEST[wire_dtype], LARGEST[wire_dtype], 64), wire_dtype))
    tree = {"f": numbers.astype(np.float32), "i": np.int32(4)}
    for pmean in (jaxhetero.pmean, jax.jit(jaxhetero.pmean, static_argnames="wire_dtype")):
        mean = pmean(tree, wire_dtype=wire_dtype)
        np.testing.assert_array_equal(mean["f"], tree["f"])
        np.testing.assert_allclose(mean["i"], 4, rtol=1e-6)


def check_strange(wire_dtype: str) -> None:
    """Blocks with NaN, infinities, zeros and the smallest and largest numbers."""
    x = np.zeros(8 * 64, np.float32)
    is_first = jaxhetero.rank() == 0
    x[0], x[64], x[128] = np.nan, np.inf if is_first else 1, -np.inf
    x[3 * 64 :: 64] = [1e-45, 2e-38, 1e38, -1.1e38, 0.0]
    mean = np.asarray(jax.jit(functools.partial(jaxhetero.pmean, wire_dtype=wire_dtype))(x)).reshape(8, 64)
    assert np.isnan(mean[:3]).all()
    assert np.isfinite(mean[3:]).all()
    np.testing.assert_array_equal(mean[7], 0)
    np.testing.assert_allclose(mean[5:7, 0], [1e38, -1.1e38], rtol=0.02 if wire_dtype == "int8" else 0.3)


def check_feedback(wire_dtype: str) -> None:
    """What rounding takes comes back: the sum of many steps is that of the gradients."""
    gradient = {"w": contribution(jaxhetero.rank(), (1000,)) % 1, "n": np.int32(1)}
    sent = optax.chain(error_feedback(wire_dtype), all_reduce_gradients(wire_dtype=wire_dtype))
    state, total, update = sent.init(gradient), np.zeros(1000), jax.jit(sent.update)
    for _ in range(30):
        updates, state = update(gradient, state)
        total += np.asarray(updates["w"])
    exact = np.mean([contribution(rank, (1000,)) % 1 for rank in range(jaxhetero.size())], axis=0)
    alone = jax.jit(functools.partial(jaxhetero.pmean, wire_dtype=wire_dtype))(gradient)["w"]
    with_feedback, without = np.abs(total / 30 - exact).mean(), np.abs(np.asarray(alone) - exact).mean()
    assert with_feedback < 0.6 * without, (with_feedback, without)


def check_derivative(wire_dtype: str) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (jaxhetero.psum(x, wire_dtype=wire_dtype) ** 2).sum() / 2

    x = jnp.arange(100, dtype=jnp.float32)
    total = jaxhetero.psum(x, wire_dtype=wire_dtype)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), jaxhetero.size() * total)

    def hooked(x: jax.Array) -> jax.Array:
        return (jaxhetero.replicated(x, mean=True, wire_dtype=wire_dtype) * (1 + jaxhetero.rank())).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(hooked))(x), np.full(100, (1 + jaxhetero.size()) / 2, np.float32))


def check_offloaded(wire_dtype: str) -> None:
    x = {"a": contribution(jaxhetero.rank(), (1000,)), "b": contribution(jaxhetero.rank(), (7, 9))}
    offloaded = jaxhetero.offload(lambda x: jax.lax.pmean(x, "workers"), wire_dtype=wire_dtype)
    expected = jax.jit(functools.partial(jaxhetero.pmean, wire_dtype=wire_dtype))(x)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(offloaded)(x), expected)


def main() -> None:
    jaxhetero.initialize()
    digests = {}
    for wire_dtype in LARGEST:
        check_exact(wire_dtype)
        if sys.argv[1:] == ["exact"]:
            continue
        digests[wire_dtype] = check(wire_dtype)
        check_strange(wire_dtype)
        check_feedback(wire_dtype)
        check_derivative(wire_dtype)
        check_offloaded(wire_dtype)
    big = contribution(jaxhetero.rank(), (1 << 20,))
    parts = {}
    for wire_dtype in LARGEST:
        before = jaxhetero.metrics().sent_bytes
        jax.block_until_ready(jax.jit(functools.partial(jaxhetero.psum, wire_dtype=wire_dtype))(big))
        parts[wire_dtype] = (jaxhetero.metrics().sent_bytes - before) / big.nbytes
    jaxhetero.shutdown()
    print(json.dumps({"digests": digests, "parts": parts}))


if __name__ == "__main__":
    main()
