"""Optimizers whose gradients are reduced across the end of a step: under the forward pass of the next one as well."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import optax

from jaxhetero._collectives import api
from jaxhetero._collectives.mesh_axes import AxisName
from jaxhetero._collectives.pending import Pending, priorities_of, psum_done, psum_start
from jaxhetero.errors import ConfigError
from jaxhetero.optimizers.at_reducers import ReducersOptimizer, StartedUpdate

_LABEL = "across_steps"


class AcrossStepsState(NamedTuple):
    """The state of a training whose gradients are reduced across steps.

    Attributes:
      params: the weights before the update that is on its way.
      opt_state: the state of the optimizer before it, as optax has it.
      pending: the gradients on their way; None before the first step, and between ``weights`` and ``send``.

    Example:
      >>> import optax
      >>> state = jaxhetero.optimizers.across_steps(optax.sgd(0.5)).init(jnp.ones(2))
      >>> state.pending is None
      True
    """

    params: Any
    opt_state: optax.OptState
    pending: Pending | StartedUpdate | None = None


@dataclass(frozen=True, eq=False)
class AcrossSteps:
    """What ``across_steps`` gives. Its methods may be called inside ``jax.jit`` or outside.

    Example:
      >>> import optax
      >>> optimizer = jaxhetero.optimizers.across_steps(optax.sgd(0.5))
      >>> state = optimizer.init(jnp.ones(2))
      >>> params, state = optimizer.weights(state)
      >>> state = optimizer.send(state, jnp.array([1.0, 2.0]))
      >>> params, opt_state = optimizer.settle(state)
      >>> print(params)
      [0.5 0. ]

      With an optimizer on reducers:

      >>> optimizer = jaxhetero.optimizers.on_reducers(optax.sgd(0.5, momentum=0.9))
      >>> training = jaxhetero.optimizers.across_steps(optimizer)
      >>> state = training.send(training.init(jnp.ones(2)), jnp.array([1.0, 2.0]))
      >>> params, reducers_state = training.settle(state)
      >>> weights, opt_state = optimizer.pull(reducers_state)
      >>> print(params, opt_state[0].trace)
      [0.5 0. ] [1. 2.]
    """

    tx: optax.GradientTransformation
    priority: Any
    options: dict[str, Any]  # of psum_start
    label: str = _LABEL

    def named(self, label: str) -> AcrossSteps:
        """The same, with another name in messages and traces: of several in one job, each needs its own."""
        return replace(self, label=label)

    def init(self, params: Any, opt_state: optax.OptState | None = None) -> AcrossStepsState:
        """The state before a first step, which a jitted step is compiled for apart from the one for all others.

        Args:
          params: the weights.
          opt_state: as ``settle`` gave it; None for that of a new training.

        Does not block.
        """
        return AcrossStepsState(params, self.tx.init(params) if opt_state is None else opt_state)

    def weights(self, state: AcrossStepsState) -> tuple[Any, AcrossStepsState]:
        """The weights for this step, and the state for ``send``: the first thing of a step.

        Each leaf is updated when the total of its bucket is there, and what a program computes with it waits for
        nothing else. Where the optimizer needs all gradients before the first update, as in clipping by the global
        norm, all wait for the last one.

        Does not block. Errors are those of ``jaxhetero.psum_done``.
        """
        if state.pending is None:
            return state.params, state
        if isinstance(state.pending, Pending):
            grads = psum_done(state.pending)
            updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
        elif isinstance(self.tx, ReducersOptimizer):
            updates, opt_state = self.tx._home.finish(state.pending, state.opt_state, state.params)
        else:
            raise ConfigError(f"{self.label}: the state is one of an optimizer on reducers, and this one is none")
        # Behind a barrier, XLA compiles the update, and what uses a weight, as it does where these are two programs: to
        # the same bits. One for each leaf: behind a common one, all would wait for the last gradient.
        params = jax.tree.map(jax.lax.optimization_barrier, optax.apply_updates(state.params, updates))
        return params, AcrossStepsState(params, opt_state)

    def send(self, state: AcrossStepsState, grads: Any) -> AcrossStepsState:
        """Start to reduce this step's gradients: the last thing of a step. The state is that for the next step.

        Args:
          state: as ``weights`` gave it.
          grads: this worker's gradients, a pytree like the weights.

        Does not block. Errors are those of ``jaxhetero.psum_start``.
        """
        if state.pending is not None:
            raise ConfigError(f"{self.label}: send() takes the state that weights() gave in this step")
        priority = self._priority(grads)
        if isinstance(self.tx, ReducersOptimizer):
            of_leaves = priorities_of(priority, grads, self.label)
            return state._replace(pending=self.tx._home.start(grads, state.opt_state, of_leaves))
        return state._replace(pending=psum_start(grads, name=self.label, priority=priority, **self.options))

    def settle(self, state: AcrossStepsState) -> tuple[Any, optax.OptState]:
        """The weights and the optimizer's state after the last step: before an evaluation, a checkpoint, the end.

        Every worker calls it. To go on afterwards, give both to ``init``.

        Does not block. Errors are those of ``weights``.
        """
        params, state = self._settled(state)
        return params, state.opt_state

    @cached_property
    def _settled(self) -> jax.stages.Wrapped:
        # Compiled, as in a step: operation by operation, sums and products would be rounded otherwise.
        return jax.jit(self.weights)

    def _priority(self, params: Any) -> Any:
        """By default, the first leaf is needed first, and after what waits for its result at once."""
        if self.priority is not None:
            return self.priority
        numbers = itertools.count(1)
        return jax.tree.map(lambda _: next(numbers), params)


def across_steps(
    tx: optax.GradientTransformation,
    axis_name: AxisName = None,
    *,
    mean: bool = True,
    priority: Any = None,
    wire_dtype: Any = None,
    bucket_bytes: int = api.DEFAULT_BUCKET_BYTES,
) -> AcrossSteps:
    """Reduce gradients across the end of a step, so that the network has the next forward pass's time as well.

    The mathematics and the bits are those of ``all_reduce_gradients`` in front of ``tx``: no gradient is stale. Only
    the update has moved, from the end of a step to the beginning of the next one.

    Args:
      tx: an optimizer of optax, which gets gradients that are reduced already; or what ``on_reducers`` gives, which
        reduces itself, and to which the next four are given.
      axis_name, wire_dtype, bucket_bytes: as in ``jaxhetero.psum``.
      mean: ``False`` gives the sum instead of the mean.
      priority: a pytree of ints like the weights; those with the lowest number travel first. Default: the order of the
        leaves, as if the forward pass needed them in it.

    Returns:
      An object with ``init``, ``weights``, ``send`` and ``settle``.

    Raises:
      NotInitializedError, ConfigError: its methods raise them, as ``jaxhetero.psum_start`` and ``psum_done`` do.

    Example:
      >>> import optax
      >>> optimizer = jaxhetero.optimizers.across_steps(optax.sgd(0.1))
      >>> @jax.jit
      ... def train_step(state, batch):
      ...     params, state = optimizer.weights(state)
      ...     loss, grads = jax.value_and_grad(lambda w: jnp.sum((batch @ w) ** 2))(params)
      ...     return optimizer.send(state, grads), loss
      >>> state = optimizer.init(jnp.ones(2))
      >>> for batch in jnp.eye(2):
      ...     state, loss = train_step(state, batch)
      >>> params, opt_state = optimizer.settle(state)
      >>> print(params)
      [0.8 0.8]
    """
    options = {"axis_name": axis_name, "mean": mean, "wire_dtype": wire_dtype, "bucket_bytes": bucket_bytes}
    defaults = {"axis_name": None, "mean": True, "wire_dtype": None, "bucket_bytes": api.DEFAULT_BUCKET_BYTES}
    if isinstance(tx, ReducersOptimizer) and options != defaults:
        given = ", ".join(name for name, value in options.items() if value != defaults[name])
        raise ConfigError(f"{_LABEL}: give {given} to on_reducers, which reduces here")
    return AcrossSteps(tx, priority, options)
