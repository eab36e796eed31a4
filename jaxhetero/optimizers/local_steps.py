"""Training in which workers step by themselves, and now and then move to weights that they have in common."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxhetero._collectives import api
from jaxhetero._collectives.mesh_axes import AxisName
from jaxhetero.errors import ConfigError
from jaxhetero.optimizers.across_steps import AcrossSteps, AcrossStepsState, across_steps

_LABEL = "local_steps"


class LocalStepsState(NamedTuple):
    """What a worker has beside its own weights.

    Attributes:
      fragments: of each part of the weights, in the order of the leaves, the common weights, the state of the outer
        optimizer, and what is on its way.

    Example:
      >>> state = jaxhetero.optimizers.local_steps(fragments=2).init([jnp.ones(2), jnp.ones(2)])
      >>> print(state.fragments[1].params)
      [Array([1., 1.], dtype=float32)]
    """

    fragments: tuple[AcrossStepsState, ...]


@dataclass(frozen=True, eq=False)
class LocalSteps:
    """What ``local_steps`` gives. Its methods are called between the programs of a training, outside of ``jax.jit``.

    Example:
      >>> import optax
      >>> local = jaxhetero.optimizers.local_steps(optax.sgd(0.5), every=2, fragments=1, overlap=0)
      >>> params = jnp.ones(2)
      >>> state = local.init(params)
      >>> for step in range(2):
      ...     params = params - 0.25
      ...     params, state = local.exchange(params, state, step)
      >>> print(params)
      [0.75 0.75]
    """

    fragments: tuple[_Fragment, ...]
    every: int
    overlap: int
    mixing: float

    def init(self, params: Any) -> LocalStepsState:
        """The state before the first step. Every worker gives the same weights: see ``jaxhetero.broadcast``.

        Does not block.
        """
        leaves = jax.tree.leaves(params)
        parts = _cut(leaves, len(self.fragments))
        # With memory of their own: a step may be given the weights, to use their memory.
        common = ([leaves[leaf].copy() for leaf in part] for part in parts)
        named = zip(self.fragments, common, strict=False)  # a few leaves may make fewer fragments
        return LocalStepsState(tuple(fragment.across.init(weights) for fragment, weights in named))

    def exchange(self, params: Any, state: LocalStepsState, step: int) -> tuple[Any, LocalStepsState]:
        """What comes behind each step: the weights to go on with, and the next state.

        Args:
          params: this worker's weights after the step.
          state: as ``init`` or the last call gave it.
          step: the number of the step, from 0; the same on all workers.

        Does not block. Errors are those of ``jaxhetero.psum_start`` and ``psum_done``.
        """
        try:
            count = operator.index(step) + 1
        except TypeError:
            raise ConfigError(
                f"{_LABEL}: step is {step!r}; call exchange() outside of jax.jit, with the number of the step as an int"
            ) from None
        weights = _Weights(self, params, state)
        for number in range(len(state.fragments)):
            # Each at a step of its own; the last one at the end of a period.
            behind = (count - (number + 1) * self.every // len(state.fragments)) % self.every
            if behind == 0:
                weights.start(number)
            if behind == self.overlap:
                weights.finish(number, self.mixing)
        return weights.whole, weights.state

    def settle(self, params: Any, state: LocalStepsState) -> tuple[Any, LocalStepsState]:
        """The common weights after a last exchange of all: before an evaluation, a checkpoint, the end.

        All workers call it, and get the same. The state has nothing on its way, so that a checkpoint can have it, and
        training goes on with both. Does not block. Errors are those of ``exchange``.
        """
        weights = _Weights(self, params, state)
        numbers = range(len(state.fragments))
        for number in numbers:
            weights.finish(number, self.mixing)
            weights.start(number)
        for number in numbers:
            weights.finish(number, 0.0)
        return weights.whole, weights.state


def local_steps(
    outer: optax.GradientTransformation | None = None,
    axis_name: AxisName = None,
    *,
    every: int = 32,
    fragments: int = 8,
    overlap: int = 4,
    mixing: float | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = api.DEFAULT_BUCKET_BYTES,
) -> LocalSteps:
    """Let each worker train by itself, and exchange weights only every few dozen steps: DiLoCo, streamed.

    The step is any step of one worker, with an optimizer of its own and without a collective. Every few steps, the
    mean of the workers' differences to their common weights is a gradient for the optimizer ``outer``, which moves the
    common weights. Each of several fragments of the weights has its turn at another step, and ``overlap`` steps of time
    for its way. Between exchanges, workers have different weights.

    Args:
      outer: an optimizer of optax for the common weights, or what ``on_reducers`` gives, to which ``axis_name``,
        ``wire_dtype`` and ``bucket_bytes`` are given then. Default:
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
      axis_name, wire_dtype, bucket_bytes: as in ``jaxhetero.psum``, of the differences.
      every: so many steps are between two exchanges of a fragment.
      fragments: into so many parts of about equal bytes the weights are cut, between leaves.
      overlap: so many steps after its start an exchange is finished; less than ``every``.
      mixing: the share that its own weights have in a worker's weights behind an exchange. The rest is that of the
        common weights. Default: 0.5, or 0 where ``overlap`` is 0.

    Returns:
      An object with ``init``, ``exchange`` and ``settle``.

    Raises:
      ConfigError: a number is out of its range. Also its methods raise it, as ``jaxhetero.psum_start`` does.

    Example:
      >>> import optax
      >>> inner, local = optax.sgd(0.1), jaxhetero.optimizers.local_steps(every=4, fragments=2, overlap=1)
      >>> @jax.jit
      ... def train_step(params, opt_state, batch):
      ...     loss, grads = jax.value_and_grad(lambda w: jnp.sum((batch @ w) ** 2))(params)
      ...     updates, opt_state = inner.update(grads, opt_state)
      ...     return optax.apply_updates(params, updates), opt_state, loss
      >>> params = jnp.ones(2)
      >>> opt_state, state = inner.init(params), local.init(params)
      >>> for step in range(8):
      ...     params, opt_state, loss = train_step(params, opt_state, jnp.eye(2))
      ...     params, state = local.exchange(params, state, step)
      >>> params, state = local.settle(params, state)
      >>> bool(jnp.all(params < 0.5))
      True
    """
    mixing = (0.5 if overlap else 0.0) if mixing is None else mixing
    for name, value, is_good, range_ in (
        ("every", every, every >= 1, "at least 1"),
        ("fragments", fragments, 1 <= fragments <= every, f"from 1 to every, which is {every}"),
        ("overlap", overlap, 0 <= overlap < every, f"from 0 to less than every, which is {every}"),
        ("mixing", mixing, 0 <= mixing <= 1, "from 0 to 1"),
    ):
        if not is_good:
            raise ConfigError(f"{_LABEL}: {name} is {value}; it must be {range_}")
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    across = across_steps(outer, axis_name, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes)
    named = (across.named(f"{_LABEL} fragment {number}") for number in range(fragments))
    return LocalSteps(tuple(map(_Fragment, named)), every, overlap, mixing)


class _Fragment:
    """The programs of a part of the weights."""

    def __init__(self, across: AcrossSteps) -> None:
        self.across = across
        self.start = jax.jit(self._start)
        self.finish = jax.jit(self._finish, static_argnames="mixing")

    def _start(self, own: Any, state: AcrossStepsState) -> AcrossStepsState:
        return self.across.send(state, jax.tree.map(lambda common, weights: common - weights, state.params, own))

    def _finish(self, own: Any, state: AcrossStepsState, mixing: float) -> tuple[Any, AcrossStepsState]:
        common, state = self.across.weights(state)
        if mixing:
            common = jax.tree.map(lambda mine, ours: mixing * mine + (1 - mixing) * ours, own, common)
        return common, state


class _Weights:
    """A worker's weights while some fragments of them are exchanged."""

    def __init__(self, local: LocalSteps, params: Any, state: LocalStepsState) -> None:
        self._programs = local.fragments
        self._leaves, self._structure = jax.tree.flatten(params)
        self._fragments = list(state.fragments)
        self._parts = _cut(self._leaves, len(local.fragments))
        given = [[self._leaves[leaf].shape for leaf in part] for part in self._parts]
        if given != [[leaf.shape for leaf in fragment.params] for fragment in state.fragments]:
            raise ConfigError(f"{_LABEL}: the weights are those of another model than the state is of")

    def start(self, number: int) -> None:
        if self._fragments[number].pending is not None:
            raise ConfigError(f"{_LABEL}: fragment {number} is on its way; call exchange() once behind each step")
        own = [self._leaves[leaf] for leaf in self._parts[number]]
        self._fragments[number] = self._programs[number].start(own, self._fragments[number])

    def finish(self, number: int, mixing: float) -> None:
        """If it was started: behind ``settle`` it may not have been."""
        if self._fragments[number].pending is None:
            return
        own = [self._leaves[leaf] for leaf in self._parts[number]]
        mixed, self._fragments[number] = self._programs[number].finish(own, self._fragments[number], mixing=mixing)
        for leaf, array in zip(self._parts[number], mixed, strict=True):
            self._leaves[leaf] = array

    @property
    def whole(self) -> Any:
        return jax.tree.unflatten(self._structure, self._leaves)

    @property
    def state(self) -> LocalStepsState:
        return LocalStepsState(tuple(self._fragments))


def _cut(leaves: Sequence[Any], count: int) -> list[list[int]]:
    """At most so many parts of about equal bytes: the leaves of each."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    middles = np.cumsum(sizes) - np.array(sizes) / 2
    numbers = [int(middle * count / max(sum(sizes), 1)) for middle in middles]
    of_leaf = sorted(zip(numbers, range(len(leaves)), strict=True))
    return [[leaf for _, leaf in group] for _, group in itertools.groupby(of_leaf, lambda pair: pair[0])]
