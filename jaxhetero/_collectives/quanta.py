"""Floats as small numbers of a scale, block by block: ``wire_dtype`` int8, int4 and float8.

docs/how_to/eight_bits.md says what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero._collectives.kinds import Kind

_BLOCK = 64
# The fields of a float32.
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_EXPONENT_OF_ONE = 127
_LARGEST_EXPONENT = 255
_MAGNITUDE = 0x7FFFFFFF


class Reduce(Protocol):
    """A collective of arrays over all workers."""

    def __call__(self, arrays: Sequence[jax.Array], kind: Kind, label: str) -> list[jax.Array]: ...


@dataclass(frozen=True)
class Quanta:
    """The numbers that are sent, from -largest to largest: here whole ones of 8 bits.

    A scale is known by its *exponent*: that of the largest magnitude of its block, as float32 has it, or one more where
    the mantissa is too large. It is a byte, whose maximum over the workers is the exponent of all.
    """

    kind: Kind
    largest: int
    fraction_bits: int = 0
    """The least number above 0 is 2 to the power of minus this."""

    @property
    def _bits_of_largest(self) -> int:
        return int(np.float32(self.largest).view(np.int32))

    @property
    def _exponent_of_largest(self) -> int:
        return (self._bits_of_largest >> _MANTISSA_BITS) - _EXPONENT_OF_ONE

    def exponents(self, blocks: jax.Array) -> jax.Array:
        """Of each block on this worker; 255 where it has no scale."""
        bits = jax.lax.bitcast_convert_type(blocks, jnp.int32) & _MAGNITUDE
        most = jnp.max(bits, axis=1, initial=0)
        is_larger = (most & _MANTISSA) > (self._bits_of_largest & _MANTISSA)
        exponents = (most >> _MANTISSA_BITS) + is_larger.astype(jnp.int32)
        # The least number is at least the least normal one of float32.
        least = self._exponent_of_largest + 1 + self.fraction_bits
        return jnp.clip(exponents, least, _LARGEST_EXPONENT).astype(jnp.uint8)

    def scales(self, exponents: jax.Array) -> jax.Array:
        """float32, a column; NaN where there is none."""
        shifted = exponents.astype(jnp.int32) - self._exponent_of_largest
        scales = jax.lax.bitcast_convert_type(shifted << _MANTISSA_BITS, jnp.float32)
        return jnp.where(exponents == _LARGEST_EXPONENT, jnp.nan, scales)[:, None]

    def rounded(self, blocks: jax.Array, exponents: jax.Array) -> jax.Array:
        """Numbers of scales, as float32, none of them -0; 0 where there is no scale."""
        numbers = self.round(blocks / self.scales(exponents))
        return jnp.where((exponents[:, None] == _LARGEST_EXPONENT) | (numbers == 0), 0, numbers)

    def round(self, values: jax.Array) -> jax.Array:
        """To the nearest number, ties to even."""
        return jnp.round(values)

    def pack(self, numbers: jax.Array) -> jax.Array:
        """As they are sent, int8."""
        return numbers.astype(jnp.int8)

    def unpack(self, packed: jax.Array) -> jax.Array:
        """What ``pack`` took, as float32."""
        return packed.astype(jnp.float32)


class _FourBits(Quanta):
    """Two whole numbers in a byte: those of the first half of a block are the lower ones."""

    def pack(self, numbers: jax.Array) -> jax.Array:
        lower, upper = jnp.split(super().pack(numbers), 2, axis=1)
        return (lower & 15) | (upper << 4)

    def unpack(self, packed: jax.Array) -> jax.Array:
        return super().unpack(jnp.concatenate([(packed << 4) >> 4, packed >> 4], axis=1))


class _Floats(Quanta):
    """Floats of a byte."""

    def round(self, values: jax.Array) -> jax.Array:
        return values.astype(jnp.float8_e4m3fn).astype(jnp.float32)

    def pack(self, numbers: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(numbers.astype(jnp.float8_e4m3fn), jnp.int8)

    def unpack(self, packed: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(packed, jnp.float8_e4m3fn).astype(jnp.float32)


QUANTA = {
    "int8": Quanta(Kind.MEAN8, 127),
    "int4": _FourBits(Kind.MEAN4, 7),
    "float8_e4m3fn": _Floats(Kind.MEANFLOAT8, 448, fraction_bits=9),
}


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


def round_to_quanta(
    arrays: Sequence[jax.Array], quanta: Quanta, reduce: Reduce | None = None, label: str = ""
) -> list[jax.Array]:
    """Floats in their own dtypes, rounded to numbers of the scales that all workers share; without ``reduce``, of their
    own.
    """
    blocks = [_blocks_of(array) for array in arrays]
    exponents = [quanta.exponents(block) for block in blocks]
    if reduce is not None:
        exponents = reduce(exponents, Kind.MAX, f"{label} scales")
    values = [quanta.rounded(b, e) * quanta.scales(e) for b, e in zip(blocks, exponents, strict=True)]
    return [_like(value, array) for value, array in zip(values, arrays, strict=True)]


def sum_in_quanta(
    arrays: Sequence[jax.Array],
    quanta: Quanta,
    reduce: Reduce,
    label: str,
    worker_count: int,
    *,
    are_means: bool = False,
) -> list[jax.Array]:
    """The sum of each array over the workers: of floats in numbers of scales, of others as it is.

    ``are_means``: of floats the mean in its place. A sum that is divided again would have another last bit.
    """
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
            # Exact: of the number, its few bits; of the scale, none.
            numbers = quanta.unpack(mean) * (1 if are_means else worker_count)
            totals.append(_like(numbers * quanta.scales(exponent), array))
        return totals

    # Rounding has no derivative; that of the sum is meant.
    @sum_floats.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        sums = reduce(tangents[0], Kind.SUM, f"{label} tangents")
        return sum_floats(*primals), [tangent / worker_count for tangent in sums] if are_means else sums

    totals = iter(sum_floats(floats) if floats else [])
    return [next(totals) if _is_rounded(array) else next(others) for array in arrays]
