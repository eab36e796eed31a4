"""What JAX must know of every primitive here: how it runs outside ``jax.jit``, under ``jax.vmap``, and differentiated.

The primitives take a bucket, a sequence of arrays, and give one. They are linear, but for maximum and minimum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxhetero._compat import varying_axes
from jaxhetero._job import world

# Every parameter of any of the primitives.
_PARAMETERS = (
    *("label", "kind", "root", "worker_count", "axis_name", "devices_along", "in_groups"),
    *("wire_dtype", "call_bytes", "group", "invariant", "axes", "groups"),
)

Bucket = list[jax.Array]


def define(
    primitive: Primitive,
    abstract_eval: Callable[..., list[Any]],
    batch: Callable[..., tuple[Bucket, Sequence[Any]]],
) -> None:
    """Tell JAX what types the results have and how to batch; outside ``jax.jit`` a primitive is a program of its own.

    How to compile it is up to the caller: see ``register_lowering``.
    """

    primitive.multiple_results = True
    primitive.def_impl(as_program(primitive, _PARAMETERS))
    primitive.def_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = batch


def as_program(primitive: Primitive, static_argnames: Sequence[str]) -> Callable[..., Any]:
    """What runs a primitive outside ``jax.jit``: a program of its own, also where ``jax.disable_jit`` is on."""

    @functools.partial(jax.jit, static_argnames=static_argnames)
    def run_eagerly(*operands: Any, **params: Any) -> Any:
        return primitive.bind(*operands, **params)

    def run(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return run_eagerly(*operands, **params)

    return run


def define_linear(primitive: Primitive, apply: Callable[..., Bucket], transpose: Callable[..., list[Any]]) -> None:
    """Tell JAX how to differentiate: tangents go the way of the values. Leaves that do not vary take no part.

    Args:
      primitive: one that ``define`` has defined.
      apply: binds the primitive to a bucket.
      transpose: as JAX wants it, from the cotangents of the results to those of the operands.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Bucket, list[Any]]:
        outputs: Bucket = primitive.bind(*primals, **params)
        zeros = [ad.Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]
        return outputs, map_nonzero(apply, tangents, zeros, params, "tangents")

    def guarded_transpose(*arguments: Any, **params: Any) -> list[Any]:
        with jax.transfer_guard("allow"):  # for ranks and zeros
            return transpose(*arguments, **params)

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = guarded_transpose


def map_nonzero(
    function: Callable[..., Bucket],
    values: Sequence[Any],
    zeros: Sequence[Any],
    params: dict[str, Any],
    values_name: str,
) -> list[Any]:
    """``function`` of those ``values`` that are not symbolic zeros; the others become ``zeros``.

    ``params`` go to ``function``, with ``values_name`` added to the label.
    """
    chosen = [index for index, value in enumerate(values) if not isinstance(value, ad.Zero)]
    results = list(zeros)
    if chosen:
        label = f"{params['label']} {values_name}"
        outputs = function([values[index] for index in chosen], **{**params, "label": label})
        for index, output in zip(chosen, outputs, strict=True):
            results[index] = output
    return results


def zero_cotangents(bucket: Sequence[Any]) -> list[ad.Zero]:
    """Symbolic zeros for the operands of a transpose."""
    return [ad.Zero(operand.aval) for operand in bucket]


def varies(aval: Any, axis_name: str | None) -> bool:
    """Whether types say that a value differs along the workers' axis."""
    return axis_name is not None and axis_name in varying_axes(aval)


def own_index(axis_name: str | None) -> Any:
    """This worker's place along the workers' axis, which is its rank."""
    return own_rank() if axis_name is None else jax.lax.axis_index(axis_name)


def own_rank() -> jax.Array:
    """This worker's rank, of which XLA computes nothing while it compiles: it makes the same program on all workers.

    Calls that programs make in different orders may wait for each other.
    """
    rank: jax.Array = jax.lax.optimization_barrier(jnp.int32(world.rank()))
    return rank
