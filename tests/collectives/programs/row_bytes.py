"""Scatters a sum and gathers it again; prints how many bytes that took, in parts of those of the whole array."""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxhetero

ROW_COUNT = 1 << 20
"""Elements of float32."""


def moved(run: Callable[[], jax.Array], whole_bytes: int) -> tuple[jax.Array, list[float]]:
    """The result, and what was sent and received."""
    before = jaxhetero.metrics()
    result = jax.block_until_ready(run())
    after = jaxhetero.metrics()
    return result, [
        (after.sent_bytes - before.sent_bytes) / whole_bytes,
        (after.received_bytes - before.received_bytes) / whole_bytes,
    ]


def main() -> None:
    jaxhetero.initialize()
    size = jaxhetero.size()
    # Numbers whose sums are exact.
    whole = (jnp.arange(size * ROW_COUNT, dtype=jnp.int32) % 4099).astype(jnp.float32).reshape(size, ROW_COUNT)
    scatter = jax.jit(jaxhetero.psum_scatter).lower(whole).compile()
    row, scattered = moved(lambda: scatter(whole), whole.nbytes)
    gather = jax.jit(jaxhetero.all_gather).lower(row).compile()
    gathered, of_gather = moved(lambda: gather(row), whole.nbytes)
    right = bool(jnp.array_equal(gathered, size * whole))
    jaxhetero.shutdown()
    print(json.dumps({"psum_scatter": scattered, "all_gather": of_gather, "right": right}))


main()
