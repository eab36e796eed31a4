"""Parts of every trainer's optimizer: which parameters are weights, and the order of the wrappers around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxhetero
from jaxhetero.optimizers import (
    AccumulationState,
    AcrossSteps,
    AcrossStepsState,
    ErrorFeedbackState,
    ReducersOptimizer,
    accumulate_gradients,
    across_steps,
    dynamic_loss_scale,
    error_feedback,
    on_reducers,
    static_loss_scale,
)
from models.common.errors import require

LossScaling = Literal["none", "static", "dynamic"]
WeightsDtype = Literal["float32", "bfloat16"]

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


@dataclass(frozen=True)
class GradientConfig:
    """What happens to gradients on their way to the update. Every trainer's optimizer has these options."""

    loss_scaling: LossScaling = "none"
    """Gradients of a float16 model need it."""
    loss_scale: float = 1024.0
    """The constant of static scaling, or the initial scale of dynamic scaling."""
    wire_dtype: Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "int4"] = "float32"
    """The dtype in which the workers exchange gradients. The 16-bit dtypes send half the bytes, those of 8 bits a
    quarter, int4 an eighth."""
    error_feedback: bool = False
    """Add the rounding errors of wire_dtype to the gradients of the next step."""


class Optimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """What ``distributed`` gives: an optimizer that can say and take what a checkpoint has, wherever its state is.

    A train step calls ``weights`` first and ``step`` last. What these and the other methods call ``state`` is a
    NamedTuple with the fields ``params`` and ``opt_state``.
    """

    _reducers: ReducersOptimizer | None = None
    _weights_dtype: WeightsDtype = "float32"
    _across: AcrossSteps | None = None

    @cached_property
    def _pull(self) -> jax.stages.Wrapped:
        """Compiled once, for all checkpoints."""
        assert self._reducers is not None
        return jax.jit(self._reducers.pull)

    def weights(self, state: Any) -> Any:
        """The state with the weights of this step."""
        if self._across is None:
            return state
        params, flight = self._across.weights(_across_state(state))
        return _with_flight(state, params, flight)

    def step(self, state: Any, grads: Any) -> Any:
        """The state behind a step with these gradients of this worker; with rounds on their way across steps."""
        if self._across is None:
            updates, opt_state = self.update(grads, state.opt_state, state.params)
            return state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)
        return _with_flight(state, state.params, self._across.send(_across_state(state), grads))

    def begin(self, state: Any) -> Any:
        """The state to run steps with, from one without rounds on their way."""
        if self._across is None:
            return state
        flight = AcrossStepsState(state.params, _last_part(state.opt_state))
        return _with_flight(state, state.params, flight)

    def settle(self, state: Any) -> Any:
        """The opposite of ``begin``. Call it on every worker."""
        if self._across is None:
            return state
        params, kept = self._across.settle(_across_state(state))
        return state._replace(params=params, opt_state=_with_last_part(state.opt_state, kept))

    def pull(self, state: Any) -> Any:
        """The state of a training with the optimizer on workers: the weights in float32, and optax's state.

        Call it on every worker.
        """
        if self._reducers is None:
            return state
        params, kept = self._pull(_last_part(state.opt_state))
        return state._replace(params=params, opt_state=_with_last_part(state.opt_state, kept))

    def push(self, state: Any) -> Any:
        """The state to train with: the opposite of ``pull``. Call it on every worker."""
        if self._reducers is None:
            return state
        kept = jax.jit(self._reducers.push)(state.params, _last_part(state.opt_state))
        params = jax.tree.map(lambda leaf: leaf.astype(self._weights_dtype).astype(leaf.dtype), state.params)
        return state._replace(params=params, opt_state=_with_last_part(state.opt_state, kept))


def _last_part(opt_state: Any) -> Any:
    """Of the state of what ``distributed`` gives: that of the optimizer itself."""
    return _last_part(opt_state.inner_state) if isinstance(opt_state, AccumulationState) else opt_state[-1]


def _with_last_part(opt_state: Any, part: Any) -> Any:
    if isinstance(opt_state, AccumulationState):
        return opt_state._replace(inner_state=_with_last_part(opt_state.inner_state, part))
    return (*opt_state[:-1], part)


class _Flight(NamedTuple):
    """The last part of the state of an optimizer across steps."""

    opt_state: optax.OptState
    pending: Any


def _across_state(state: Any) -> AcrossStepsState:
    return AcrossStepsState(state.params, *_last_part(state.opt_state))


def _with_flight(state: Any, params: Any, of: AcrossStepsState) -> Any:
    part = _Flight(of.opt_state, of.pending)
    return state._replace(params=params, opt_state=_with_last_part(state.opt_state, part))


def distributed(
    optimizer: optax.GradientTransformation,
    config: GradientConfig,
    *,
    accumulate_every: int = 1,
    instead: optax.GradientTransformation | None = None,
    weights_from_reducers: WeightsDtype | None = None,
    is_across_steps: bool = False,
) -> Optimizer:
    """Put the mean over the workers' gradients in front of ``optimizer``; every worker then computes the same update.

    ``instead`` takes the place of the mean, where gradients are reduced already. With ``weights_from_reducers``, the
    reducers take the mean and run the optimizer, and send weights of this dtype. ``config`` adds a loss scale inside,
    and ``accumulate_every`` gradient accumulation outside. ``is_across_steps`` moves the update to the next step.
    """
    if is_across_steps:
        require(
            accumulate_every == 1,
            f"--across-steps starts the all-reduce once a step, and each worker has {accumulate_every} pieces of it: "
            "give a larger --micro-batch",
        )
        require(not config.error_feedback, "--error-feedback does not go with --across-steps")
    if config.loss_scaling == "static":
        optimizer = static_loss_scale(optimizer, config.loss_scale)
    elif config.loss_scaling == "dynamic":
        optimizer = dynamic_loss_scale(optimizer, config.loss_scale)
    inner = optimizer
    wire_dtype = None if config.wire_dtype == "float32" else config.wire_dtype
    reduction, reducers = instead or jaxhetero.all_reduce_gradients(wire_dtype=wire_dtype), None
    if weights_from_reducers:
        # What takes the place of the mean has no state either, so a state has the same parts in both places.
        reduction = optax.identity()
        optimizer = reducers = on_reducers(
            optimizer, weights_dtype=jnp.dtype(weights_from_reducers), wire_dtype=wire_dtype
        )
    if wire_dtype is not None and config.error_feedback:
        reduction = optax.chain(error_feedback(wire_dtype), reduction)
    optimizer = optax.chain(reduction, optimizer)
    if accumulate_every > 1:
        optimizer = accumulate_gradients(optimizer, accumulate_every)
    result = Optimizer(optimizer.init, optimizer.update)
    if is_across_steps:
        result._across = across_steps(reducers) if reducers else across_steps(inner, wire_dtype=wire_dtype)
    result._reducers, result._weights_dtype = reducers, weights_from_reducers or "float32"
    return result


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
