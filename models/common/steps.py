"""The train steps of data parallelism: the ordinary one, and the one with the same bits on any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.optimizers import ExactMean, ExactSums
from models.common.batches import BatchSplit
from models.common.errors import require
from models.common.optimizer import GradientConfig, Optimizer

Piece: TypeAlias = Callable[..., dict[str, Any]]
"""``(state, *batch) -> values``: the forward and backward pass over one piece of a global batch. ``values`` has "loss",
float32[]; "grads"; and what becomes of other fields of the state, such as statistics."""


def plain_step(piece: Piece, optimizer: Optimizer) -> jax.stages.Wrapped:
    """The jitted step of one piece. The optimizer all-reduces, so the step has no call for it."""

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, *batch: Any) -> tuple[Any, jax.Array]:
        state = optimizer.weights(state)
        values = piece(state, *batch)
        loss, grads = values.pop("loss"), values.pop("grads")
        return optimizer.step(state._replace(**values), grads), loss

    return train_step


class StepOptions(Protocol):
    """The command line's options for steps."""

    @property
    def is_exact(self) -> bool: ...


def data_parallel_step(
    piece: Piece,
    optimizer: Optimizer,
    config: GradientConfig,
    split: BatchSplit,
    options: StepOptions,
    averaged: tuple[str, ...] = (),
) -> jax.stages.Wrapped | ExactStep:
    """The step that the options ask for. ``averaged``: the fields of the state that a piece changes."""
    if not options.is_exact:
        return plain_step(piece, optimizer)
    require(config.wire_dtype == "float32", "--microbatches works with --wire-dtype float32 alone")
    return ExactStep(piece, optimizer, split.pieces_per_step, averaged)


class ExactOptState(NamedTuple):
    """The state of an optimizer behind an ``ExactMean``."""

    inner_state: optax.OptState
    exponents: Any
    """Those of ``ExactSums``."""


@dataclass
class ExactStep:
    """A step whose weights have the same bits on any number of workers: a whole one, of all pieces of this worker.

    Everything that a piece makes is averaged exactly over the pieces of all workers, statistics as well.
    """

    piece: Piece
    optimizer: optax.GradientTransformation
    """It gets gradients that are averaged."""
    pieces: int
    """Of all workers in a step."""
    averaged: tuple[str, ...] = ()
    """The fields of the state that a piece changes."""

    def __post_init__(self) -> None:
        self._means = ExactMean(self.pieces)
        self._begin: Any = None
        self._add: Any = None
        self._finish: Any = None

    def prepare(self, state: Any) -> Any:
        """The state to train with."""
        values = {"loss": jnp.float32(0), "grads": state.params} | self._averaged_of(state)
        return state._replace(opt_state=ExactOptState(state.opt_state, self._means.init(values).exponents))

    def lower(self, state: Any, *batch: Any) -> ExactStep:
        """Compile for these shapes."""
        values = jax.eval_shape(self.piece, state, *batch)

        def begin() -> ExactSums:
            return self._means.init(values)._replace(exponents=None)  # the state has them

        def add(state: Any, sums: ExactSums, *batch: Any) -> tuple[ExactSums, jax.Array]:
            found = self.piece(state, *batch)
            sums = self._means.add(sums._replace(exponents=state.opt_state.exponents), found)
            return sums._replace(exponents=None), found["loss"]

        sums, scalar = jax.eval_shape(begin), jax.ShapeDtypeStruct((), jnp.float32)
        self._begin = jax.jit(begin).lower().compile()
        self._add = jax.jit(add, donate_argnums=1).lower(state, sums, *batch).compile()
        self._finish = jax.jit(self._update, donate_argnums=0).lower(state, sums, scalar, scalar).compile()
        return self

    def compile(self) -> ExactStep:
        """Itself."""
        return self

    def __call__(self, state: Any, pieces: Iterable[tuple[Any, ...]], is_asked: bool) -> tuple[Any, jax.Array]:
        """One step; the next state, and a report for the loop: see ``loop.Step``."""
        sums, losses = self._begin(), np.float32(0)
        for batch in pieces:
            sums, loss = self._add(state, sums, *batch)
            losses = losses + loss
        state, report = self._finish(state, sums, losses, np.float32(is_asked))
        return state, report

    def _update(self, state: Any, sums: ExactSums, losses: jax.Array, is_asked: jax.Array) -> tuple[Any, jax.Array]:
        mean, is_whole, fits, sums = self._means.mean(sums._replace(exponents=state.opt_state.exponents))
        # The sum of this worker's losses is for a step that does not fit, such as the first one.
        total_loss, asked = jaxhetero.psum((losses, is_asked))

        def update() -> Any:
            updates, inner_state = self.optimizer.update(mean["grads"], state.opt_state.inner_state, state.params)
            params = optax.apply_updates(state.params, updates)
            averaged = {name: mean[name] for name in self.averaged}
            return state._replace(params=params, opt_state=ExactOptState(inner_state, sums.exponents), **averaged)

        def rest() -> Any:
            return state._replace(opt_state=state.opt_state._replace(exponents=sums.exponents))

        loss = jnp.where(fits, mean["loss"], total_loss / self.pieces)
        return jax.lax.cond(is_whole & fits, update, rest), jnp.stack([loss, asked, is_whole])

    def _averaged_of(self, state: Any) -> dict[str, Any]:
        return {name: getattr(state, name) for name in self.averaged}
