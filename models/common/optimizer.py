"""Parts of every trainer's optimizer: which parameters are weights, and the order of the wrappers around it."""

from __future__ import annotations

from typing import Any, Literal

import jax
import optax

import jaxhetero
from jaxhetero.optimizers import (
    ErrorFeedbackState,
    accumulate_gradients,
    dynamic_loss_scale,
    error_feedback,
    static_loss_scale,
)

LossScaling = Literal["none", "static", "dynamic"]

_WEIGHT_NAMES = frozenset({"kernel", "embedding"})


def weights_mask(params: optax.Params) -> Any:
    """A tree of bools: True for kernels and embeddings, False for biases and norms.

    Only kernels and embeddings decay, and only they are adapted layer by layer. The name of a parameter decides, not
    its shape, because the biases of some layers are matrices.
    """

    def is_weight(path: tuple[Any, ...], leaf: Any) -> bool:
        del leaf
        return any(getattr(key, "key", None) in _WEIGHT_NAMES for key in path)

    return jax.tree_util.tree_map_with_path(is_weight, params)


def distributed(
    optimizer: optax.GradientTransformation,
    *,
    accumulate_every: int = 1,
    loss_scaling: LossScaling = "none",
    loss_scale: float = 1024.0,
    wire_dtype: str | None = None,
    with_error_feedback: bool = False,
    instead: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Put the mean over the workers' gradients in front of ``optimizer``; every worker then computes the same update.

    ``instead`` takes the place of the mean, where gradients are reduced already. The other arguments add a loss scale
    inside, and gradient accumulation outside.
    """
    if loss_scaling == "static":
        optimizer = static_loss_scale(optimizer, loss_scale)
    elif loss_scaling == "dynamic":
        optimizer = dynamic_loss_scale(optimizer, loss_scale)
    reduction = instead or jaxhetero.all_reduce_gradients(wire_dtype=wire_dtype)
    if wire_dtype is not None and with_error_feedback:
        reduction = optax.chain(error_feedback(wire_dtype), reduction)
    optimizer = optax.chain(reduction, optimizer)
    return optimizer if accumulate_every == 1 else accumulate_gradients(optimizer, accumulate_every)


def scaled(loss: jax.Array, opt_state: optax.OptState) -> jax.Array:
    """The loss times the optimizer's loss scale, if it has one: the optimizer expects the gradient of this."""
    scale = optax.tree.get(opt_state, "loss_scale")
    return loss if scale is None else loss * scale


def init_state(optimizer: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """The optimizer's initial state. Every leaf has memory of its own, so a train step may donate the state."""
    return jax.jit(optimizer.init)(params)


def share_residuals(opt_state: optax.OptState) -> optax.OptState:
    """Give every worker the mean of all workers' residuals of error feedback.

    The next gradients are averaged too, so their mean is the same as with each worker's own residual. All workers then
    have the same state, so a checkpoint of one worker serves any number of workers.
    """

    def share(node: Any) -> Any:
        return jaxhetero.pmean(node) if isinstance(node, ErrorFeedbackState) else node

    return jax.tree.map(share, opt_state, is_leaf=lambda node: isinstance(node, ErrorFeedbackState))
