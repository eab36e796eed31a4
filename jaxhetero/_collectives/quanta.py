"""Floats as small whole numbers of a scale that all workers share, block by block: ``wire_dtype`` int8 and int4.

docs/how_to/eight_bits.md says what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxhetero._collectives.kinds import Kind

_BLOCK = 64
# The fields of a float32.
_MANTISSA_BITS = 23
_LARGEST_EXPONENT = 255
_MAGNITUDE = 0x7FFFFFFF


class Reduce(Protocol):
    """A collective of arrays over all workers."""

    def __call__(self, arrays: Sequence[jax.Array], kind: Kind, label: str) -> list[jax.Array]: ...


@dataclass(frozen=True)
class Quanta:
    """The whole numbers of one width, from -largest to largest.

    A scale is known by its *exponent*: that of the largest magnitude of its block, as float32 has it, or one more where
    the mantissa is too large. It is a byte, whose maximum over the workers is the exponent of all.
    """

    kind: Kind
    bits: int

    @property
    def largest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def _exponent_of_largest(self) -> int:
        return self.bits - 2

    def exponents(self, blocks: jax.Array) -> jax.Array:
        """Of each block on this worker; 255 where it has no scale."""
        bits = jax.lax.bitcast_convert_type(blocks, jnp.int32) & _MAGNITUDE
        most = jnp.max(bits, axis=1, initial=0)
        # Of `largest`, which is its upper bits of 1 and zeros.
        mantissa = (self.largest << (_MANTISSA_BITS - self._exponent_of_largest)) & ((1 << _MANTISSA_BITS) - 1)
        is_larger = (most & ((1 << _MANTISSA_BITS) - 1)) > mantissa
        exponents = (most >> _MANTISSA_BITS) + is_larger.astype(jnp.int32)
        # A scale is at least the least normal number.
        return jnp.clip(exponents, self._exponent_of_largest + 1, _LARGEST_EXPONENT).astype(jnp.uint8)

    def scales(self, exponents: jax.Array) -> jax.Array:
        """float32, a column; NaN where there is none."""
        shifted = exponents.astype(jnp.int32) - self._exponent_of_largest
        scales = jax.lax.bitcast_convert_type(shifted << _MANTISSA_BITS, jnp.float32)
        return jnp.where(exponents == _LARGEST_EXPONENT, jnp.nan, scales)[:, None]

    def rounded(self, blocks: jax.Array, exponents: jax.Array) -> jax.Array:
        """Whole numbers of scales, as float32; 0 where there is no scale."""
        whole = jnp.round(blocks / self.scales(exponents))
        return jnp.where(exponents[:, None] == _LARGEST_EXPONENT, 0, whole)

    def pack(self, whole: jax.Array) -> jax.Array:
        """As they are sent, int8: of 4 bits, those of the first half of a block are the lower ones."""
        numbers = whole.astype(jnp.int8)
        if self.bits == 8:
            return numbers
        lower, upper = jnp.split(numbers, 2, axis=1)
        return (lower & 15) | (upper << 4)

    def unpack(self, packed: jax.Array) -> jax.Array:
        if self.bits == 8:
            return packed
        return jnp.concatenate([(packed << 4) >> 4, packed >> 4], axis=1)


QUANTA = {"int8": Quanta(Kind.MEAN8, 8), "int4": Quanta(Kind.MEAN4, 4)}


def quanta_of(wire_dtype: Any) -> Quanta | None:
    """None if the wire has floats."""
    return None if wire_dtype is None else QUANTA.get(str(jnp.dtype(wire_dtype)))


def _is_rounded(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _blocks_of(array: jax.Array) -> jax.Array:
    flat = array.astype(jnp.float32).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % _BLOCK)).reshape(-1, _BLOCK)


def _like(blocks: jax.Array, array: jax.Array) -> jax.Array:
    return blocks.reshape(-1)[: array.size].reshape(array.shape).astype(array.dtype)


def round_to_quanta(arrays: Sequence[jax.Array], quanta: Quanta, reduce: Reduce, label: str) -> list[jax.Array]:
    """Floats as the workers will contribute them, in their own dtypes: whole numbers of the scales that all share."""
    blocks = [_blocks_of(array) for array in arrays]
    exponents = reduce([quanta.exponents(block) for block in blocks], Kind.MAX, f"{label} scales")
    values = [quanta.rounded(b, e) * quanta.scales(e) for b, e in zip(blocks, exponents, strict=True)]
    return [_like(value, array) for value, array in zip(values, arrays, strict=True)]


def sum_in_quanta(
    arrays: Sequence[jax.Array], quanta: Quanta, reduce: Reduce, label: str, worker_count: int
) -> list[jax.Array]:
    """The sum of each array over the workers: of floats in whole numbers of scales, of others as it is."""
    floats = [array for array in arrays if _is_rounded(array)]
    exact = [array for array in arrays if not _is_rounded(array)]
    others = iter(reduce(exact, Kind.SUM, label) if exact else [])

    @jax.custom_jvp
    def sum_floats(floats: list[jax.Array]) -> list[jax.Array]:
        blocks = [_blocks_of(array) for array in floats]
        exponents = reduce([quanta.exponents(block) for block in blocks], Kind.MAX, f"{label} scales")
        packed = [quanta.pack(quanta.rounded(b, e)) for b, e in zip(blocks, exponents, strict=True)]
        means = reduce(packed, quanta.kind, label)
        totals = []
        for mean, exponent, array in zip(means, exponents, floats, strict=True):
            # Exact: a whole number below 2^24 times a power of two.
            whole = quanta.unpack(mean).astype(jnp.float32) * worker_count
            totals.append(_like(whole * quanta.scales(exponent), array))
        return totals

    # Rounding has no derivative; that of the sum is meant.
    @sum_floats.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return sum_floats(*primals), reduce(tangents[0], Kind.SUM, f"{label} tangents")

    totals = iter(sum_floats(floats) if floats else [])
    return [next(totals) if _is_rounded(array) else next(others) for array in arrays]
