"""Dtypes: which ones reducers can sum, and in which ones arrays are sent. For those that only move, see ``moved``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero.errors import ConfigError

# Bits of exponent and of mantissa.
_WIRE_DTYPES = {"bfloat16": (8, 7), "float16": (5, 10)}
_SUPPORTED = frozenset(
    {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def check_dtype(leaf: Any, label: str) -> None:
    """Raise ``ConfigError`` for a leaf that reducers cannot sum."""
    dtype = jnp.result_type(leaf)
    if str(dtype) in _SUPPORTED:
        return
    found = f"{label}: a leaf is {describe_leaf(leaf)}, a dtype that reducers cannot sum; "
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise ConfigError(f"{found}leave it out; jaxhetero.broadcast and jaxhetero.all_gather take it")
    nearest = "float32" if jnp.issubdtype(dtype, jnp.floating) else "int32"
    raise ConfigError(f"{found}cast it first, x.astype({nearest!r}), or to one of: {' '.join(sorted(_SUPPORTED))}")


def is_float8(dtype: Any) -> bool:
    """Whether it is one of the floats of a byte. Primitives take them, as bytes or in float32; sums of the user not."""
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1)


def sum_dtype(dtype: Any) -> Any:
    """In which values of a floating dtype are added up where it is up to us: at least float32."""
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32)


def check_wire_dtype(wire_dtype: Any, label: str, more: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` for anything but None, the 16-bit floats, and ``more``."""
    known = (*_WIRE_DTYPES, *more)
    if wire_dtype is not None and str(jnp.dtype(wire_dtype)) not in known:
        raise ConfigError(
            f"{label}: wire_dtype is {jnp.dtype(wire_dtype)}; it can be {', '.join(known[:-1])} or {known[-1]}"
        )


def is_narrow_float(wire_dtype: Any) -> bool:
    """Whether it is one of the floats of 16 bits."""
    return wire_dtype is not None and str(jnp.dtype(wire_dtype)) in _WIRE_DTYPES


def describe_leaf(leaf: Any) -> str:
    """``float32[2,3]``."""
    return f"{jnp.result_type(leaf)}[{','.join(map(str, jnp.shape(leaf)))}]"


def round_for_wire(array: jax.Array, wire_dtype: Any) -> jax.Array:
    """``array`` rounded as on the wire, in its own dtype. XLA may drop a cast there and back, but not this."""
    if not _is_narrowed(array.dtype):
        return array
    rounded: jax.Array = jax.lax.reduce_precision(array, *_WIRE_DTYPES[str(jnp.dtype(wire_dtype))])
    return rounded


def bucket_dtype(dtype: Any, wire_dtype: Any) -> Any:
    """The dtype in which an array enters its bucket: XLA casts float64, the primitive itself casts float32."""
    return jnp.dtype(wire_dtype) if wire_dtype and dtype == jnp.float64 else dtype


def primitive_wire_dtype(dtype: Any, wire_dtype: Any) -> str:
    """The dtype to which the primitive itself casts a bucket; "" for none.

    A cast of the primitive runs beside the program. A cast by XLA would be one more step of the program.
    """
    return str(jnp.dtype(wire_dtype)) if wire_dtype and dtype == jnp.float32 else ""


def wire_bytes(arrays: Sequence[Any], wire_dtype: Any) -> int:
    """How many bytes arrays, or their avals, take on the wire."""
    dtypes = (wire_dtype if wire_dtype and _is_narrowed(array.dtype) else array.dtype for array in arrays)
    return sum(array.size * jnp.dtype(dtype).itemsize for array, dtype in zip(arrays, dtypes, strict=True))


def _is_narrowed(dtype: Any) -> bool:
    return dtype in (jnp.float32, jnp.float64)
