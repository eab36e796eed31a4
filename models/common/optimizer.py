"""What every recipe has in common: which parameters are weights, and the order of the wrappers around an optimizer."""

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
    """True for kernels and embeddings: what decays and is adapted layer by layer. False for biases and norms.

    By name and not by shape: the biases of some layers are matrices.
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
) -> optax.GradientTransformation:
    """Mean of the workers' gradients first; from there on every worker computes the same update."""
    if loss_scaling == "static":
        optimizer = static_loss_scale(optimizer, loss_scale)
    elif loss_scaling == "dynamic":
        optimizer = dynamic_loss_scale(optimizer, loss_scale)
    reduction = jaxhetero.all_reduce_gradients(wire_dtype=wire_dtype)
    if wire_dtype is not None and with_error_feedback:
        reduction = optax.chain(error_feedback(wire_dtype), reduction)
    optimizer = optax.chain(reduction, optimizer)
    return optimizer if accumulate_every == 1 else accumulate_gradients(optimizer, accumulate_every)


def scaled(loss: jax.Array, opt_state: optax.OptState) -> jax.Array:
    """The loss whose gradient the optimizer expects: times the loss scale, if there is one."""
    scale = optax.tree.get(opt_state, "loss_scale")
    return loss if scale is None else loss * scale


def init_state(optimizer: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """The optimizer's first state, with memory of its own for every leaf, so that a train step may donate it."""
    return jax.jit(optimizer.init)(params)


def share_residuals(opt_state: optax.OptState) -> optax.OptState:
    """Give every worker the mean of what error feedback has kept back; the workers' states are the same then.

    Nothing is lost: the next gradients are averaged as well, and their mean is that with each worker's own residual.
    So the state of one worker is a checkpoint of all, for any number of them.
    """

    def share(node: Any) -> Any:
        return jaxhetero.pmean(node) if isinstance(node, ErrorFeedbackState) else node

    return jax.tree.map(share, opt_state, is_leaf=lambda node: isinstance(node, ErrorFeedbackState))
