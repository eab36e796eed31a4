"""Error feedback: what rounding for the wire loses in one step is added to the gradients of the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxhetero._collectives.wire_dtypes import check_wire_dtype, round_for_wire


class ErrorFeedbackState(NamedTuple):
    """State of ``error_feedback``."""

    residual: optax.Updates
    """What has not been sent yet, of the shapes and dtypes of the parameters. Not the same on every worker."""


def error_feedback(wire_dtype: Any) -> optax.GradientTransformation:
    """Round gradients to ``wire_dtype`` and keep the remainder for the next step. Chain it in front of the all-reduce::

        optimizer = optax.chain(
            error_feedback(jnp.bfloat16), all_reduce_gradients(wire_dtype=jnp.bfloat16), optax.sgd(0.1)
        )

    Without it a gradient that is small beside its own rounding error is lost in every step; with it, it is sent once
    it has added up (Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback fixes
    SignSGD", 2019).

    Args:
      wire_dtype: that of the all-reduce after it, ``jnp.bfloat16`` or ``jnp.float16``.

    Returns:
      A transformation whose updates have the shapes and dtypes of the gradients, and values that ``wire_dtype`` can
      hold. Leaves that are not float32 or float64 pass as they are, and their residual stays zero.

    It knows what this worker rounds: not the rounding of the total by the reducers, nor, with several devices in a
    worker, that of their sum. A gradient that is not finite leaves no residual. Under ``jax.shard_map`` the residual is
    one more value that varies over the workers' axis: return it with ``check_vma=False``, or with an ``out_specs`` that
    says so.
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
