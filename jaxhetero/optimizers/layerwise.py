"""LAMB and LARS as the reference recipes of large-batch training use them: biases and norms are not adapted.

Both scale the update of each layer by the *trust ratio*: the norm of the layer's weights over the norm of its update.
In the references neither the trust ratio nor the weight decay applies to biases and to the parameters of norms. A
*mask* says to which leaves both apply: a tree of bools like the parameters, or a function from the parameters to such
a tree. The default is the leaves with more than one axis. That is right for dense, convolution and embedding layers,
but it includes the biases of flax's attention layers (``[heads, head_dim]``) and of layers that are stacked for
``jax.lax.scan``.

Parameters are float32, also where a model computes in float16: norms of float16 would overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

Mask: TypeAlias = Callable[[optax.Params], Any] | optax.Params


def _matrices(params: optax.Params) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def lamb(
    learning_rate: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    *,
    max_grad_norm: float | None = 1.0,
    mask: Mask | None = None,
) -> optax.GradientTransformation:
    """LAMB of You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020).

    Args:
      learning_rate: a number, or a function of the step, int32[], which counts from 0.
      b1, b2, eps: as in Adam, with bias correction; ``eps`` is added outside of the square root.
      weight_decay: times the parameter, added to Adam's update before the trust ratio is taken.
      max_grad_norm: gradients with a larger norm, over all leaves, are scaled down to it first. ``None``: they are not.
      mask: true for the leaves that get weight decay and trust ratio. Default: those with more than one axis.

    ``optax.lamb`` has a mask for the weight decay only, applies the trust ratio to every leaf, and does not clip. Chain
    the all-reduce in front of ``lamb``, so that it clips the norm of the mean gradient.

    Example:
      The kernel moves by a part of its own norm, and the bias by the learning rate:

      >>> import optax
      >>> from jaxhetero.optimizers import lamb
      >>> optimizer = optax.chain(jaxhetero.all_reduce_gradients(), lamb(0.5, weight_decay=0.0))
      >>> params = {"kernel": jnp.full((2, 2), 8.0), "bias": jnp.full(2, 8.0)}
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
      >>> jax.tree.map(lambda leaf: jnp.round(leaf, 3), updates)
      {'bias': Array([-0.5, -0.5], dtype=float32), 'kernel': Array([[-4., -4.],
             [-4., -4.]], dtype=float32)}
    """
    mask = _matrices if mask is None else mask
    return optax.chain(
        optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.masked(optax.scale_by_trust_ratio(), mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def lars(
    learning_rate: float | optax.Schedule,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    *,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    nesterov: bool = False,
    mask: Mask | None = None,
) -> optax.GradientTransformation:
    """LARS of You et al., "Large Batch Training of Convolutional Networks" (2017), as in MLPerf's ResNet-50.

    The update of a leaf ``w`` with gradient ``g``, where the mask is true, is ``ratio * (g + weight_decay * w)``, with
    ``ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``, or 1 where ``|w|`` or ``|g|`` is 0. The
    update of the other leaves is ``g``. The learning rate is applied before the momentum: a change of the rate leaves
    the momentum of earlier steps as it is.

    Args:
      learning_rate: a number, or a function of the step, int32[], which counts from 0.
      momentum: the share of the update before that a step keeps.
      weight_decay, trust_coefficient, eps: see above.
      nesterov: ``True`` is Nesterov's momentum.
      mask: true for the leaves that get weight decay and trust ratio. Default: those with more than one axis.

    ``optax.lars`` divides by the norm of the sum, ``|g + weight_decay * w|``. The paper and MLPerf divide by the sum
    of the norms.

    Raises:
      ValueError: ``update`` is called without the parameters.

    Example:
      The kernel moves by a thousandth of its own norm whatever the gradient's size; the bias by its gradient:

      >>> import optax
      >>> from jaxhetero.optimizers import lars
      >>> optimizer = optax.chain(jaxhetero.all_reduce_gradients(), lars(1.0, weight_decay=0.0))
      >>> params = {"kernel": jnp.full((1, 2), 8.0), "bias": jnp.full(2, 8.0)}
      >>> grads = jax.tree.map(lambda leaf: 100 * leaf, params)
      >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
      >>> print(updates["bias"], jnp.round(updates["kernel"], 3))
      [-800. -800.] [[-0.008 -0.008]]
    """
    return optax.chain(
        optax.masked(_adapt(weight_decay, trust_coefficient, eps), _matrices if mask is None else mask),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(momentum, nesterov),
    )


def _adapt(weight_decay: float, trust_coefficient: float, eps: float) -> optax.GradientTransformation:
    """Weight decay and trust ratio of LARS together: the ratio needs the norm of the gradient without decay."""

    def adapt(gradient: jax.Array, param: jax.Array) -> jax.Array:
        param_norm, gradient_norm = jnp.linalg.norm(param), jnp.linalg.norm(gradient)
        ratio = trust_coefficient * param_norm / (gradient_norm + weight_decay * param_norm + eps)
        ratio = jnp.where((param_norm > 0) & (gradient_norm > 0), ratio, 1)
        return ratio * (gradient + weight_decay * param)

    def update(updates: optax.Updates, state: optax.EmptyState, params: optax.Params = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("lars: give the parameters: optimizer.update(gradients, state, params)")
        return jax.tree.map(adapt, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
