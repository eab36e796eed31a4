"""Error feedback: the rounding error of one step is added to the gradients of the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES
from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.mesh_axes import AxisName, classify
from jaxhetero._collectives.quanta import QUANTA, Quanta, quanta_of, round_to_quanta
from jaxhetero._collectives.reduce_tree import reduce_tree
from jaxhetero._collectives.wire_dtypes import check_wire_dtype, round_for_wire


class ErrorFeedbackState(NamedTuple):
    """State of ``error_feedback``.

    Example:
      >>> from jaxhetero.optimizers import error_feedback
      >>> error_feedback(jnp.bfloat16).init({"w": jnp.ones(2)}).residual
      {'w': Array([0., 0.], dtype=float32)}
    """

    residual: optax.Updates
    """The sum of the gradients less all that was sent: shapes and dtypes of the parameters. Each worker has its own."""


def error_feedback(wire_dtype: Any, axis_name: AxisName = None) -> optax.GradientTransformation:
    """Round gradients to ``wire_dtype`` and add the rounding error to the gradients of the next step.

    Chain it in front of the all-reduce. Without error feedback, rounding loses the same small part of a gradient in
    every step. With it, these parts add up until they are large enough to be sent (Seide et al., "1-bit stochastic
    gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019).

    Args:
      wire_dtype: the ``wire_dtype`` of the all-reduce that follows: ``jnp.bfloat16``, ``jnp.float16``, ``jnp.int8``,
        ``jnp.float8_e4m3fn`` or ``jnp.int4``.
      axis_name: that of the all-reduce, which 8 and 4 bits need: workers agree on scales.

    Returns:
      A transformation whose updates have the shapes and dtypes of the gradients, and values that ``wire_dtype`` can
      hold. Leaves that are not float32 or float64 (not floats, with 8 and 4 bits) pass as they are, and
      their residual stays zero.

    The residual has the rounding of this worker's gradients alone. It has neither the rounding of the total by the
    reducers nor, with several devices in a worker, the rounding of their sum. A gradient that is not finite leaves no
    residual. Under ``jax.shard_map`` the residual is one more value that varies over the workers' axis: return it with
    ``check_vma=False``, or with an ``out_specs`` that says so.

    Raises:
      ConfigError: ``wire_dtype`` is another dtype.

    Example:
      bfloat16 has 1 and 1.0078125 and nothing between them. A gradient of 1.002 is sent as 1 until the error has
      added up:

      >>> import optax
      >>> from jaxhetero.optimizers import error_feedback
      >>> reduced = optax.chain(error_feedback(jnp.bfloat16), jaxhetero.all_reduce_gradients(wire_dtype=jnp.bfloat16))
      >>> state = reduced.init(jnp.float32(0))
      >>> for _ in range(4):
      ...     update, state = reduced.update(jnp.float32(1.002), state)
      ...     print(update)
      1.0
      1.0078125
      1.0
      1.0
    """
    check_wire_dtype(wire_dtype, "error_feedback", tuple(QUANTA))
    quanta = quanta_of(wire_dtype)

    def init(params: optax.Params) -> ErrorFeedbackState:
        return ErrorFeedbackState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: ErrorFeedbackState, params: optax.Params = None
    ) -> tuple[optax.Updates, ErrorFeedbackState]:
        del params
        wanted = jax.tree.map(jnp.add, updates, state.residual)
        if quanta is None:
            sent = jax.tree.map(lambda leaf: round_for_wire(leaf, wire_dtype), wanted)
        else:
            sent = _rounded(wanted, quanta, axis_name)
        residual = jax.tree.map(lambda all_, part: jnp.where(jnp.isfinite(part), all_ - part, 0), wanted, sent)
        return sent, ErrorFeedbackState(residual)

    return optax.GradientTransformation(init, update)


def _rounded(updates: optax.Updates, quanta: Quanta, axis_name: AxisName) -> optax.Updates:
    axes = classify(axis_name, "error_feedback")

    def reduce(arrays: Sequence[jax.Array], kind: Kind, label: str) -> list[jax.Array]:
        reduced: list[jax.Array] = reduce_tree(arrays, axes, kind, label=label, bucket_bytes=DEFAULT_BUCKET_BYTES)
        return reduced

    leaves, structure = jax.tree.flatten(updates)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    rounded = iter(round_to_quanta(floats, quanta, reduce, "error_feedback"))
    sent = [next(rounded) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, sent)
