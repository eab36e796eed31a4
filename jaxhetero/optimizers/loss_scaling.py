"""Loss scaling on which all workers agree, for gradients in float16.

A gradient below 6e-8 is zero in float16. So the loss is multiplied by a scale before the backward pass, and the
gradients are divided by the scale after the all-reduce, in float32 (Micikevicius et al., "Mixed Precision Training",
2018).

A step whose gradients are not finite is skipped: the optimizer inside does not see it. Workers judge the gradients
after the all-reduce, when all of them have the same numbers: an infinity or NaN of one worker is in every sum. So
``all_reduce_gradients`` must come before the loss scale and not inside it. Inside, each worker would judge its own
gradients, and a worker that skips a step would leave the others waiting.

Example:
  >>> import optax
  >>> from jaxhetero.optimizers import dynamic_loss_scale, scale_loss
  >>> optimizer = optax.chain(jaxhetero.all_reduce_gradients(), dynamic_loss_scale(optax.sgd(1.0)))
  >>> def scaled_loss_fn(params, opt_state):
  ...     loss = 1e-8 * params                      # its gradient is zero in float16
  ...     return scale_loss(loss, opt_state), loss
  >>> @jax.jit
  ... def train_step(params, opt_state):
  ...     grads, loss = jax.grad(scaled_loss_fn, has_aux=True)(params, opt_state)
  ...     grads = grads.astype(jnp.float16)         # as a model in float16 has them
  ...     updates, opt_state = optimizer.update(grads, opt_state, params)
  ...     return updates, opt_state
  >>> params = jnp.float32(1)
  >>> updates, _ = train_step(params, optimizer.init(params))
  >>> print(f"{updates:.2e}")
  -1.00e-08
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxhetero._collectives.wire_dtypes import sum_dtype
from jaxhetero.errors import ConfigError
from jaxhetero.optimizers._conditional import update_if


class LossScaleState(NamedTuple):
    """State of ``static_loss_scale`` and ``dynamic_loss_scale``; the same on every worker.

    Example:
      >>> import optax
      >>> from jaxhetero.optimizers import dynamic_loss_scale
      >>> state = dynamic_loss_scale(optax.sgd(0.1)).init(jnp.float32(1))
      >>> print(state.loss_scale, state.skipped_count)
      65536.0 0
    """

    loss_scale: jax.Array
    """float32[]: the scale of the next step's loss."""
    good_count: jax.Array
    """int32[]: steps with finite gradients since the scale last changed."""
    skipped_count: jax.Array
    """int32[]: steps skipped since the start."""
    inner_state: optax.OptState
    """The state of the optimizer inside."""


_Adjust = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def static_loss_scale(
    inner: optax.GradientTransformation, loss_scale: float = 1024.0
) -> optax.GradientTransformationExtraArgs:
    """Divide reduced gradients by a constant before ``inner``, and skip the steps in which they are not finite.

    Args:
      inner: an optimizer, which gets gradients in float32 or wider.
      loss_scale: the constant. A power of two divides without rounding.

    Raises:
      ConfigError: ``loss_scale`` is not positive.

    Example:
      The gradients of a scaled loss are 1024 times too large; an infinite one skips the step:

      >>> import optax
      >>> from jaxhetero.optimizers import static_loss_scale
      >>> optimizer = static_loss_scale(optax.sgd(1.0), 1024)
      >>> state = optimizer.init(jnp.float32(0))
      >>> for gradient in (jnp.float16(2048), jnp.float16(jnp.inf)):
      ...     update, state = optimizer.update(gradient, state)
      ...     print(update, state.skipped_count)
      -2.0 0
      0.0 1
    """

    def keep(finite: jax.Array, scale: jax.Array, good_count: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scale, jnp.where(finite, good_count + 1, 0)

    return _loss_scaling(inner, loss_scale, keep)


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    initial_scale: float = 2.0**16,
    *,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """As ``static_loss_scale``, but it finds the scale: as large as the range of the gradients allows.

    Args:
      inner: an optimizer, which gets gradients in float32 or wider.
      initial_scale: the scale of the first step.
      growth_interval: the scale grows after so many steps in a row with finite gradients.
      growth_factor: the scale is multiplied by this when it grows.
      backoff_factor: the scale is multiplied by this after each step that was skipped.
      min_scale, max_scale: limits of the scale.

    Raises:
      ConfigError: ``growth_interval`` is less than 1, or ``initial_scale`` is not positive.

    Example:
      The scale doubles after two good steps, and is halved after a step that was skipped:

      >>> import optax
      >>> from jaxhetero.optimizers import dynamic_loss_scale
      >>> optimizer = dynamic_loss_scale(optax.sgd(1.0), 1024, growth_interval=2)
      >>> state = optimizer.init(jnp.float32(0))
      >>> for gradient in (1.0, 1.0, jnp.inf):
      ...     _, state = optimizer.update(jnp.float16(gradient), state)
      ...     print(state.loss_scale)
      1024.0
      2048.0
      1024.0
    """
    if growth_interval < 1:
        raise ConfigError(f"dynamic_loss_scale: growth_interval is {growth_interval}; it must be at least 1")

    def adjust(finite: jax.Array, scale: jax.Array, good_count: jax.Array) -> tuple[jax.Array, jax.Array]:
        good_count = jnp.where(finite, good_count + 1, 0)
        grows = good_count == growth_interval
        larger = jnp.where(grows, jnp.minimum(scale * growth_factor, max_scale), scale)
        smaller = jnp.maximum(scale * backoff_factor, min_scale)
        return jnp.where(finite, larger, smaller), jnp.where(grows, 0, good_count)

    return _loss_scaling(inner, initial_scale, adjust)


def scale_loss(loss: jax.Array, opt_state: optax.OptState) -> jax.Array:
    """The loss to differentiate: ``loss`` times the scale in ``opt_state``.

    Args:
      loss: float32[]. The scale is the first factor of the backward pass; float16 has no scale above 65504.
      opt_state: the state of an optimizer with one of the loss scales anywhere inside.

    Returns:
      float32[].

    Raises:
      ConfigError: there is no loss scale in ``opt_state``.

    Example:
      >>> import optax
      >>> from jaxhetero.optimizers import scale_loss, static_loss_scale
      >>> opt_state = static_loss_scale(optax.sgd(0.1), 1024).init(jnp.ones(3))
      >>> print(scale_loss(jnp.float32(0.5), opt_state))
      512.0
    """
    scale = optax.tree.get(opt_state, "loss_scale")
    if scale is None:
        raise ConfigError("scale_loss: opt_state has no loss scale; use static_loss_scale or dynamic_loss_scale")
    scaled: jax.Array = loss * scale
    return scaled


def _loss_scaling(
    inner: optax.GradientTransformation, initial_scale: float, adjust: _Adjust
) -> optax.GradientTransformationExtraArgs:
    """``adjust(finite, scale, good_count)`` makes the next step's scale and count."""
    if initial_scale <= 0:
        raise ConfigError(f"the loss scale is {initial_scale}; it must be positive")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScaleState:
        # Each has memory of its own. A train step could not donate the state if two shared one array.
        return LossScaleState(
            jnp.array(initial_scale, jnp.float32),
            jnp.zeros([], jnp.int32),
            jnp.zeros([], jnp.int32),
            inner.init(params),
        )

    def update(
        updates: optax.Updates, state: LossScaleState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, LossScaleState]:
        finite = _all_finite(updates)
        gradients = jax.tree.map(lambda leaf: _unscale(leaf, state.loss_scale), updates)
        new_updates, inner_state = update_if(finite, inner, gradients, state.inner_state, params, extra)
        scale, good_count = adjust(finite, state.loss_scale, state.good_count)
        skipped_count = state.skipped_count + jnp.where(finite, 0, 1)
        return new_updates, LossScaleState(scale, good_count, skipped_count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _all_finite(tree: optax.Updates) -> jax.Array:
    """bool[]: no leaf holds an infinity or a NaN."""
    return jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree), jnp.array(True))


def _unscale(gradient: jax.Array, scale: jax.Array) -> jax.Array:
    """In float32 at least: a division in float16 would lose small gradients again."""
    return gradient.astype(sum_dtype(gradient.dtype)) / scale
