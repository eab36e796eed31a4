"""Error feedback: the rounding error of one step is added to the gradients of the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

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


def error_feedback(wire_dtype: Any) -> optax.GradientTransformation:
    """Round gradients to ``wire_dtype`` and add the rounding error to the gradients of the next step.

    Chain it in front of the all-reduce. Without error feedback, rounding loses the same small part of a gradient in
    every step. With it, these parts add up until they are large enough to be sent (Seide et al., "1-bit stochastic
    gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019).

    Args:
      wire_dtype: the ``wire_dtype`` of the all-reduce that follows, ``jnp.bfloat16`` or ``jnp.float16``.

    Returns:
      A transformation whose updates have the shapes and dtypes of the gradients, and values that ``wire_dtype`` can
      hold. Leaves that are not float32 or float64 pass as they are, and their residual stays zero.

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
    check_wire_dtype(wire_dtype, "error_feedback")

    def init(params: optax.Params) -> ErrorFeedbackState:
        return ErrorFeedbackState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: ErrorFeedbackState, params: optax.Params = None
    ) -> tuple[optax.Updates, ErrorFeedbackState]:
        del params
        wanted = jax.tree.map(jnp.add, updates, state.residual)
        sent = jax.tree.map(lambda leaf: round_for_wire(leaf, wire_dtype), wanted)
        residual = jax.tree.map(lambda all_, part: jnp.where(jnp.isfinite(part), all_ - part, 0), wanted, sent)
        return sent, ErrorFeedbackState(residual)

    return optax.GradientTransformation(init, update)
