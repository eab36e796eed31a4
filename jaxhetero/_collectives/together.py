"""What keeps XLA from waiting for a part of a collective's results while other parts are still to be computed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxhetero._compat import lower_to_barrier, register_lowering

# The results of all buckets of a collective.
_together = Primitive("jaxhetero_together")


def together(results: Sequence[jax.Array]) -> list[jax.Array]:
    """The same results. On a GPU, none of them can be used before all are there.

    XLA schedules for the least memory. It would wait for a bucket of gradients as soon as it could update the weights
    with it, before the computation of other gradients.
    """
    outputs: list[jax.Array] = _together.bind(*results) if results else []
    return outputs


@jax.custom_vjp
def with_gradients_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, whose gradients are ``together``."""
    return arrays


def _forward(*arrays: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return arrays, None


def _backward(_: None, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(together(cotangents))


with_gradients_together.defvjp(_forward, _backward)


_together.multiple_results = True
_together.def_impl(lambda *results: list(results))
_together.def_abstract_eval(lambda *results: list(results))
batching.primitive_batchers[_together] = lambda results, dims: (together(results), dims)
ad.primitive_transposes[_together] = lambda cotangents, *results: list(cotangents)
ad.primitive_jvps[_together] = lambda results, tangents: (together(results), tangents)
register_lowering(_together, lambda ctx, *results: list(results))
register_lowering(_together, lambda ctx, *results: lower_to_barrier(results), platform="cuda")
