"""Training a model that is cut into stages: what the trainers share of it.

The workers are replicas of a pipeline of ``stages`` workers. A replica takes the place of a worker: it gets the pieces
of a global batch that a worker would get, as microbatches of one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import optax

import jaxhetero
from models.common.batches import BatchSplit, pieces_for
from models.common.errors import require
from models.common.optimizer import GradientConfig


class StageOptions(Protocol):
    """The command line's options for stages."""

    @property
    def stages(self) -> int: ...
    @property
    def microbatches(self) -> int: ...


def split_over_replicas(global_batch: int, micro_batch: int, options: StageOptions) -> BatchSplit:
    """How a global batch is split where ``stages`` workers are one replica. With 1, every worker is one."""
    stages, rank, worker_count = options.stages, jaxhetero.rank(), jaxhetero.size()
    if jaxhetero.elastic.is_elastic():
        require(stages == 1, "--stages does not work in an elastic job")
        worker_count = jaxhetero.elastic.capacity()
        pieces = options.microbatches or pieces_for(global_batch, micro_batch, worker_count)
        return BatchSplit.of_pieces(global_batch, pieces, rank=rank, worker_count=worker_count)
    if stages == 1 and options.microbatches:
        return BatchSplit.of_pieces(global_batch, options.microbatches, rank=rank, worker_count=worker_count)
    require(
        worker_count % stages == 0,
        f"--stages is {stages}; the {worker_count} workers of the job must be a multiple of that",
    )
    replicas = worker_count // stages
    if options.microbatches:
        require(
            global_batch % (replicas * options.microbatches) == 0,
            f"--microbatches is {options.microbatches}; the {global_batch} examples of a step cannot be shared equally "
            f"by {replicas} replicas with so many each",
        )
        micro_batch = global_batch // (replicas * options.microbatches)
    return BatchSplit.make(global_batch, micro_batch, rank=rank // stages, worker_count=replicas)


def require_plain_gradients(config: GradientConfig, stages: int) -> None:
    """The gradients of a pipeline are reduced as they are."""
    require(
        stages == 1 or (config.loss_scaling == "none" and config.wire_dtype == "float32"),
        "--stages works without --loss-scaling and --wire-dtype; a bfloat16 model needs no loss scale",
    )


def split_over_workers(split: BatchSplit) -> BatchSplit:
    """The same split where every worker has a share of its own, as in an evaluation.

    In an elastic job, where a share could be lost, every worker has the whole.
    """
    if jaxhetero.elastic.is_elastic():
        return dataclasses.replace(split, rank=0, worker_count=1)
    return dataclasses.replace(split, rank=jaxhetero.rank(), worker_count=jaxhetero.size())


@dataclass
class StagedStep:
    """A train step over the stages of a pipeline, with the methods of a jitted one.

    A state is whole, or has what this worker holds alone. The step takes both, and returns the latter.
    """

    loss: Callable[..., Any]
    """``(params, *batch) -> loss``; with statistics ``(params, statistics, *batch) -> (loss, statistics)``."""
    make_optimizer: Callable[[jaxhetero.pipeline.Pipeline], optax.GradientTransformation]
    """Makes the optimizer, whose gradients are reduced already."""
    stages: int
    microbatches: int
    statistics: str | None = None
    """The name of the field of the state that has them."""

    def __post_init__(self) -> None:
        self._grad_fn = jaxhetero.pipeline.value_and_grad(
            self.loss,
            stages=self.stages,
            microbatches=self.microbatches,
            state_argnum=None if self.statistics is None else 1,
        )
        self._update: Any = None
        self._template: Any = None
        self.report = ""

    def lower(self, state: Any, *batch: Any) -> StagedStep:
        """Cut the model for these shapes."""
        self.report = str(self._grad_fn.cut(state.params, *self._statistics_of(state), *batch))
        optimizer = self.make_optimizer(self._grad_fn)
        self._template = jax.eval_shape(lambda params: optimizer.init(self._grad_fn.own(params)), state.params)

        def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self._update = jax.jit(update, donate_argnums=(1, 2))
        return self

    def compile(self) -> StagedStep:
        """Itself: the programs of a stage are compiled in the first step."""
        return self

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, jax.Array]:
        params = self._grad_fn.own(state.params)
        opt_state = jaxhetero.pipeline.part(state.opt_state, self._template)
        value, grads = self._grad_fn(params, *self._statistics_of(state), *batch)
        params, opt_state = self._update(grads, opt_state, params)
        state = state._replace(params=params, opt_state=opt_state)
        if self.statistics is None:
            return state, value
        return state._replace(**{self.statistics: value[1]}), value[0]

    def make_whole(self, state: Any) -> Any:
        """The whole state, the same on every worker; statistics are averaged over the replicas."""
        if self.statistics is not None:
            same_place = range(jaxhetero.rank() % self.stages, jaxhetero.size(), self.stages)
            averaged = jaxhetero.pmean(getattr(state, self.statistics), workers=tuple(same_place))
            state = state._replace(**{self.statistics: averaged})
        return jaxhetero.pipeline.gather(state)

    def _statistics_of(self, state: Any) -> tuple[Any, ...]:
        return () if self.statistics is None else (getattr(state, self.statistics),)
