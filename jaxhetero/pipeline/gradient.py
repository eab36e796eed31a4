"""``value_and_grad`` over several workers: the loss is traced, cut into stages, and run as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from jaxhetero import _compat
from jaxhetero._job import world
from jaxhetero.errors import ConfigError, JaxheteroError
from jaxhetero.pipeline.agreement import check_digest, cut_digest, digest, measure_on_rank_0
from jaxhetero.pipeline.arguments import Signature, trace_loss
from jaxhetero.pipeline.clipping import clip_by_global_norm
from jaxhetero.pipeline.compiled import CompiledPipeline
from jaxhetero.pipeline.costs import estimate
from jaxhetero.pipeline.cut import Cut
from jaxhetero.pipeline.decision import Wishes, decide, simulate_step
from jaxhetero.pipeline.graph import evaluate, trace
from jaxhetero.pipeline.operations import Operations
from jaxhetero.pipeline.places import Places
from jaxhetero.pipeline.report import Report
from jaxhetero.pipeline.rows import Rows, is_leaf
from jaxhetero.pipeline.schedules import ScheduleName
from jaxhetero.pipeline.simulation import Interconnect, Simulation
from jaxhetero.pipeline.stages import make_stages

if TYPE_CHECKING:
    import optax

# A scan is taken apart into several times as many as there are stages, so that these can be nearly equal.
_SCAN_PARTS_PER_STAGE = 4
_HOW_TO_CUT = (
    "pipeline: some parameters are None, or Rows; give cut() the shapes of all parameters, for example those of "
    "jax.eval_shape(init_fn), before the function is called with those of one worker"
)
_HOW_TO_SPLIT = (
    "it runs many programs, in the order of a schedule. Call it between jitted functions: "
    "`loss, grads = grad_fn(params, batch)`, then `params, opt_state = jax.jit(update)(grads, opt_state, params)`"
)


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    stages: int | Literal["auto"] = "auto",
    microbatches: int,
    schedule: ScheduleName | Literal["auto"] = "auto",
    stages_per_worker: int | None = None,
    has_aux: bool = False,
    whole_argnums: Sequence[int] = (),
    state_argnum: int | None = None,
    costs: Literal["flops", "measured"] = "flops",
    memory_bytes: float | None = None,
    network: Interconnect | None = None,
) -> Pipeline:
    """As ``jax.value_and_grad``, of a loss that is cut into stages on several workers.

    The loss is traced, and nothing in the model changes. The workers of the job are *replicas* of a pipeline of
    ``stages`` workers each. Neighbours are one replica: with 8 workers and 4 stages, ranks 0 to 3 and ranks 4 to 7.
    Gradients are reduced over the replicas by the reducers of the job; do not reduce them again.

    Args:
      loss_fn: ``(params, *arguments) -> loss``, a scalar that is a mean over the examples. It is traced for the shapes
        of one microbatch.
      stages: workers in a pipeline. "auto" chooses a number that divides the workers, by the simulated time for each
        example: with fewer stages there are more replicas, each with a batch of its own.
      microbatches: into how many the batch is divided along the leading axis of each of its leaves. The loss and the
        gradients are means over them, as with gradient accumulation.
      schedule: "simple" (GPipe), "interleaved" (1F1B), "virtual" (interleaved 1F1B of Megatron), "breadth_first" or
        "zero_bubble" (ZB-H1). "auto" takes the one with the shortest simulated step.
      stages_per_worker: for "virtual" and "breadth_first". Default: 2 or 4, by simulated time.
      has_aux: the loss returns ``(loss, aux)``. Floats in ``aux`` are averaged over the microbatches, integers added.
      whole_argnums: arguments that are no part of the batch: each microbatch gets them as they are.
      state_argnum: an argument that each microbatch changes for the next one, such as BatchNorm's statistics. The loss
        then returns ``(loss, state)``, or with ``has_aux`` ``(loss, (aux, state))``.
      costs: what the operations of the model take: "flops" estimates it from shapes, "measured" runs each kind of
        operation on rank 0's device.
      memory_bytes: at most so much for the parameters of a worker, the sums of their gradients, and the activations
        that it keeps. The optimizer's state is not in it.
      network: the rate and latency between workers that the choice of a cut reckons with. Default: 12.5 GB/s, 20 us.

    Returns:
      A ``Pipeline``, which is called as the function of ``jax.value_and_grad``. Call it outside of ``jax.jit``.

    Raises:
      ConfigError: a setting makes no sense. When called: inside ``jax.jit``; or what ``Pipeline.cut`` raises.

    Example:
      In a world of one worker, two stages of it:

      >>> def loss_fn(params, x, y):
      ...     return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)
      >>> grad_fn = jaxhetero.pipeline.value_and_grad(
      ...     loss_fn, microbatches=4, schedule="breadth_first", stages_per_worker=2
      ... )
      >>> params = {"in": jnp.ones((2, 3)), "out": jnp.ones((3, 1))}
      >>> loss, grads = grad_fn(params, jnp.ones((8, 2)), jnp.ones((8, 1)))
      >>> grads["in"].shape
      (2, 3)
    """
    if microbatches < 1:
        raise ConfigError(f"pipeline: microbatches is {microbatches}; it must be at least 1")
    if costs not in ("flops", "measured"):
        raise ConfigError(f"pipeline: costs is {costs!r}; it must be 'flops' or 'measured'")
    wishes = Wishes(
        None if stages == "auto" else stages,
        microbatches,
        None if schedule == "auto" else schedule,
        stages_per_worker,
        memory_bytes,
        network or Interconnect(12.5e9, 20e-6),
    )
    signature = Signature(tuple(whole_argnums), state_argnum, has_aux)
    return Pipeline(loss_fn, signature, wishes, is_measured=costs == "measured")


class Pipeline:
    """What ``value_and_grad`` returns. Each worker holds the parameters of its stages alone: see ``init``."""

    def __init__(self, loss_fn: Callable[..., Any], signature: Signature, wishes: Wishes, *, is_measured: bool) -> None:
        self._loss_fn = loss_fn
        self._signature = signature
        self._wishes = wishes
        self._is_measured = is_measured
        self._cut: Cut | None = None
        self._compiled: CompiledPipeline | None = None

    def cut(self, params: Any, *arguments: Any) -> Report:
        """Trace the loss and cut it, for arguments of these shapes. Every worker calls it, with the same shapes.

        Nothing is computed, and no memory is taken for parameters.

        Args:
          params: the whole tree: arrays, or ``jax.ShapeDtypeStruct``, for example of ``jax.eval_shape``. None in it is
            no parameter, and stays None.
          arguments: as the function is called; a whole batch of one replica.

        Returns:
          The cut, to be printed.

        Raises:
          ConfigError: the arguments do not fit the settings, or the loss cannot be cut so.
          MismatchError: the loss is another one on another worker.
        """
        self._cut = self._make_cut(params, arguments)
        self._compiled = None
        return self.report()

    def report(self) -> Report:
        """The cut that was made: what each stage computes, receives and holds. Does not block.

        Raises:
          ConfigError: nothing has been cut yet.
        """
        return self._known_cut.report()

    def simulate(self, network: Interconnect | None = None) -> Simulation:
        """A step of the cut that was made, with another network. Does not block."""
        cut = self._known_cut
        decision = cut.decision
        return simulate_step(
            cut.operations,
            decision.schedule,
            decision.partition,
            network or self._wishes.network,
            cut.places.replica_count,
        )

    @property
    def replica(self) -> int:
        """The number of this worker's pipeline. All workers of a replica need the same batches."""
        return self._known_cut.places.replica

    @property
    def replica_count(self) -> int:
        """How many pipelines there are."""
        return self._known_cut.places.replica_count

    def init(self, init_fn: Callable[..., Any], *arguments: Any) -> Any:
        """The parameters of this worker's stages, and nothing else: the rest of ``init_fn`` is not computed.

        Args:
          init_fn: a function that makes the whole tree of parameters.
          arguments: of ``init_fn``.

        Returns:
          The tree of parameters, with None in the place of leaves that only other workers use, and ``Rows`` in the
          place of those that are stacked over a scan of which this worker computes a part.
        """
        whole = jax.eval_shape(init_fn, *arguments)
        layout = self._known_cut.traced.layouts[0]
        layout.leaves(whole, "what init_fn makes")
        graph = trace(lambda *traced: jax.tree.leaves(init_fn(*traced)), *arguments)
        holding = self._known_cut.holding
        part = graph.keep_live([graph.outputs[leaf] for leaf in holding.leaves])

        def make(operands: list[Any]) -> dict[int, Any]:
            known = {**part.constants, **dict(zip(part.inputs, operands, strict=True))}
            made = evaluate(part.equations, known, part.outputs)
            return {leaf: holding.take(leaf, array) for leaf, array in zip(holding.leaves, made, strict=True)}

        return layout.filled(whole, jax.jit(make)(jax.tree.leaves(arguments)))

    def own(self, params: Any) -> Any:
        """This worker's part of the tree of parameters, as ``init`` makes it. Does not block."""
        cut = self._known_cut
        layout, holding = cut.traced.layouts[0], cut.holding
        leaves = layout.leaves(params, "the tree of parameters")
        return layout.filled(params, {leaf: holding.take(leaf, leaves[leaf]) for leaf in holding.leaves})

    def clip_by_global_norm(self, max_norm: float) -> optax.GradientTransformation:
        """As ``optax.clip_by_global_norm``, over the gradients of all stages of the pipeline.

        Its ``update`` is a collective of the workers of a replica, and may be jitted.

        Example:
          >>> import optax
          >>> grad_fn = jaxhetero.pipeline.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), microbatches=2)
          >>> w, x = jnp.ones(3), jnp.ones((4, 3))
          >>> _ = grad_fn.cut(w, x)
          >>> tx = optax.chain(grad_fn.clip_by_global_norm(1.0), optax.sgd(0.1))
          >>> loss, grads = grad_fn(w, x)
          >>> updates, _ = tx.update(grads, tx.init(w))
          >>> print(f"{jnp.linalg.norm(updates):.3f}")
          0.100
        """
        cut = self._known_cut
        return clip_by_global_norm(max_norm, cut.traced.layouts[0], cut.holding, cut.sharers(), cut.places)

    def __call__(self, params: Any, *arguments: Any) -> Any:
        """The loss and the gradients of this worker's parameters.

        Args:
          params: of this worker, as ``init`` or ``own`` makes them. With one worker in a pipeline, all of them.
          arguments: a batch of this worker's replica. Of a state, the leaves of this worker.

        Returns:
          ``loss, grads``; ``(loss, aux), grads``; ``(loss, state), grads`` or ``(loss, (aux, state)), grads``, as the
          loss returns them. The loss and ``aux`` are those of the replica, on all of its workers. ``grads`` is like
          ``params``, and the mean over all replicas. ``state`` has the leaves of this worker's stages.

        Blocks until this worker has received what it needs of others. The first call also compiles.

        Raises:
          WorkerLost: a worker of the pipeline ended; it names the rank and what it should have sent or received.
          ConfigError: see ``value_and_grad``.
        """
        if _compat.is_tracing():
            raise ConfigError(f"pipeline: value_and_grad was called inside a traced function; {_HOW_TO_SPLIT}")
        if self._cut is None:
            self._cut = self._cut_for(params, arguments)
        if self._compiled is None:
            self._compiled = CompiledPipeline(self._cut)
        return self._compiled.run(params, arguments)

    @property
    def _known_cut(self) -> Cut:
        if self._cut is None:
            raise ConfigError("pipeline: nothing has been cut yet; call cut() with the shapes of the parameters first")
        return self._cut

    def _cut_for(self, params: Any, arguments: Sequence[Any]) -> Cut:
        """The cut of a function that is called before ``cut`` was: are the parameters whole?"""
        try:
            return self._make_cut(params, arguments)
        except JaxheteroError:
            raise
        except Exception as error:
            if None in jax.tree.leaves(params, is_leaf=lambda node: node is None):
                raise ConfigError(f"{_HOW_TO_CUT}. The loss raised {type(error).__name__}: {error}") from error
            raise

    def _make_cut(self, params: Any, arguments: Sequence[Any]) -> Cut:
        if any(isinstance(leaf, Rows) for leaf in jax.tree.leaves(params, is_leaf=is_leaf)):
            raise ConfigError(_HOW_TO_CUT)
        world.refuse_elastic("jaxhetero.pipeline")
        current = world.current()
        workers = self._wishes.stages or current.size
        scan_parts = _SCAN_PARTS_PER_STAGE * workers * (self._wishes.stages_per_worker or 2)
        traced = trace_loss(self._loss_fn, self._signature, self._wishes.microbatches, scan_parts, [params, *arguments])
        settings = f"{self._wishes} {self._is_measured}"
        check_digest(digest(traced.graph, settings), "the loss or a setting")
        seconds = measure_on_rank_0(traced.graph) if self._is_measured else list(map(estimate, traced.graph.equations))
        # From here on every worker has to find the same, because the costs are the same.
        operations = Operations(traced.graph, traced.roles, seconds)
        decision = decide(operations, self._wishes, current.size)
        places = Places(decision.schedule.places, current.rank, current.size)
        stages = make_stages(operations, decision.partition.edges)
        check_digest(cut_digest(decision.schedule, decision.partition.edges, stages), "the cut")
        return Cut(traced, self._signature, operations, decision, places, stages)
