"""psum of every dtype and size against NumPy; prints what was wrong."""

import functools
import json
import sys
from typing import Any

import jax
import ml_dtypes
import numpy as np

jax.config.update("jax_enable_x64", True)

import jaxhetero  # noqa: E402

FLOATS = [np.dtype(ml_dtypes.bfloat16), *map(np.dtype, ("float16", "float32", "float64"))]
COMPLEX = [np.dtype("complex64"), np.dtype("complex128")]
WIDE = (np.dtype("float64"), np.dtype("complex128"))
INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


def contribution(rank: int, dtype: np.dtype, count: int) -> np.ndarray:
    generator = np.random.default_rng([rank, count])
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, count, dtype, endpoint=True)
    # As many digits as the dtype has: sums of fewer in float64 are exact, in whatever order.
    values = generator.standard_normal(count, np.float64 if dtype in WIDE else np.float32)
    if dtype in COMPLEX:
        return (values + 1j * values[::-1]).astype(dtype)
    return values.astype(dtype)


def expected_sum(dtype: np.dtype, count: int) -> np.ndarray:
    wide = np.dtype("float32") if dtype.itemsize == 2 and dtype in FLOATS else dtype
    parts = [contribution(rank, dtype, count).astype(wide) for rank in range(jaxhetero.size())]
    return functools.reduce(np.add, parts).astype(dtype)


def check(tree: dict[str, Any], expected: dict[str, np.ndarray]) -> list[str]:
    wrong = []
    for name, value in jax.jit(jaxhetero.psum)(tree).items():
        got = np.asarray(value)
        same = got.dtype == expected[name].dtype and got.tobytes() == expected[name].tobytes()
        if not same:
            wrong.append(name)
    return wrong


def main() -> None:
    jaxhetero.initialize()
    rank = jaxhetero.rank()
    wrong = []
    for count in map(int, sys.argv[1].split(",")):
        dtypes = [*FLOATS, *COMPLEX, *INTEGERS] if count <= 1_000_000 else [*FLOATS, *INTEGERS]
        for dtype in dtypes:
            name = f"{dtype.name}[{count}]"
            wrong += check({name: contribution(rank, dtype, count)}, {name: expected_sum(dtype, count)})
    mixed = {f"{dtype.name}[{count}]": (dtype, count) for dtype in FLOATS + INTEGERS for count in (0, 3, 1023)}
    wrong += check(
        {name: contribution(rank, *leaf) for name, leaf in mixed.items()},
        {name: expected_sum(*leaf) for name, leaf in mixed.items()},
    )
    jaxhetero.shutdown()
    print(json.dumps(wrong))


main()
