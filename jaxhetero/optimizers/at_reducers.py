"""Optimizers whose state and update live at the reducers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxhetero._collectives import api
from jaxhetero._collectives.buckets import make_buckets
from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.mesh_axes import AxisName, axis_names, classify
from jaxhetero._collectives.pending_primitives import PendingState
from jaxhetero._collectives.quanta import QUANTA, quanta_of
from jaxhetero._collectives.refuse_invariant import refuse_invariant
from jaxhetero._collectives.state_primitive import StateCall
from jaxhetero._collectives.together import together
from jaxhetero._collectives.wire_dtypes import check_wire_dtype, primitive_wire_dtype, wire_bytes
from jaxhetero._collectives.worker_devices import WorkerDevices
from jaxhetero._job import world
from jaxhetero.errors import ConfigError
from jaxhetero.optimizers._new_weights import NewWeights
from jaxhetero.optimizers._programs import lower
from jaxhetero.optimizers._programs.buckets import BucketPlan, plan_bucket
from jaxhetero.optimizers._programs.graph import Constant, Graph
from jaxhetero.optimizers._programs.program import OutputType
from jaxhetero.optimizers._programs.update import Origin, Update

_numbers = itertools.count()
# In place of a version, for a store of weights: see StateModels in xla_ffi/worker/state_models.h.
_NEW_MODEL, _LATEST_MODEL = 0xFFFFFFFF, 0xFFFFFFFE
_NO_MESH = jax.sharding.AbstractMesh((), ())
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Model:
    """What the parameters of a model are, but for their values; and the optimizer that it has."""

    optimizer: str
    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    @classmethod
    def of(cls, optimizer: str, params: Any) -> Model:
        """That of these parameters."""
        leaves, structure = jax.tree.flatten(params)
        dtypes = tuple(np.dtype(jnp.result_type(leaf)) for leaf in leaves)
        return cls(optimizer, structure, tuple(tuple(jnp.shape(leaf)) for leaf in leaves), dtypes)

    def params(self, dtype: Any = None) -> Any:
        """Their types, all of this dtype if it is given."""
        types = zip(self.shapes, self.dtypes, strict=True)
        leaves = [jax.ShapeDtypeStruct(shape, dtype or own) for shape, own in types]
        return jax.tree.unflatten(self.structure, leaves)


class ReducersState(NamedTuple):
    """What workers hold of an optimizer on reducers: a few numbers.

    Attributes:
      versions: for each bucket of weights, uint32[]: a number that grows with each update that the reducers make.
      own: the optimizer's state as optax has it. What stays with the workers is there, such as counts of steps and the
        scale of the loss, so that ``optax.tree.get`` and ``scale_loss`` find it. The rest is None.
      model: which parameters it is the state for: their structure, shapes and dtypes. It has no arrays.
      weights: None, but in a world of one worker and no reducer. That worker has it all: these weights in float32, and
        the whole state in ``own``.

    Example:
      >>> import optax
      >>> state = jaxhetero.optimizers.on_reducers(optax.adam(1e-3)).init(jnp.ones(2))
      >>> print(optax.tree.get(state, "count"))
      0
    """

    versions: tuple[jax.Array, ...]
    own: optax.OptState
    model: Model
    weights: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StartedUpdate:
    """An update on its way.

    Attributes:
      arrays: the tickets of its rounds; in a world of one worker the gradients.
      calls: what takes them, one for each bucket.
    """

    arrays: tuple[jax.Array, ...]
    calls: tuple[PendingState, ...] = field(metadata={"static": True})


class ReducersOptimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """What ``on_reducers`` gives: a transformation of optax with two more methods.

    Example:
      What a checkpoint has does not tell that there were reducers:

      >>> import optax
      >>> optimizer = jaxhetero.optimizers.on_reducers(optax.sgd(0.5, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(2))
      >>> _, state = optimizer.update(jnp.array([1.0, 2.0]), state)
      >>> weights, opt_state = optimizer.pull(state)
      >>> print(weights, opt_state[0].trace)
      [0.5 0. ] [1. 2.]
      >>> state = optimizer.push(weights, opt_state)
    """

    _home: _Home

    def pull(self, state: ReducersState) -> tuple[Any, optax.OptState]:
        """The weights in float32, and the state of the optimizer as optax has it. For checkpoints.

        Every worker calls it, and each gets all of it, whatever the number of reducers. It may be called inside
        ``jax.jit``. The state of this step must not have been updated yet.

        Does not block. Errors are those of ``update``.
        """
        return self._home.pull(state)

    def push(self, params: Any, opt_state: optax.OptState, state: ReducersState | None = None) -> ReducersState:
        """Give the reducers weights and a state of the optimizer, such as those of a checkpoint; those of rank 0 count.

        Every worker calls it. What the reducers kept before is gone.

        Args:
          params, opt_state: as ``pull`` gives them.
          state: of the model whose place they take, if this optimizer has several; else of that which was made last.

        Does not block. Errors are those of ``init``.
        """
        return self._home.push(params, opt_state, state)


def on_reducers(
    tx: optax.GradientTransformation,
    axis_name: AxisName = None,
    *,
    mean: bool = True,
    weights_dtype: Any = jnp.float32,
    wire_dtype: Any = None,
    backups: int = 1,
    bucket_bytes: int = api.DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> ReducersOptimizer:
    """Let the reducers apply ``tx``: they sum the gradients, update their share of the weights, and send those back.

    The weights in float32 and the optimizer's state of each element are kept by the reducers, each of which has its
    share. A worker sends its gradients and gets weights: as many bytes as in ``psum``, or half with
    ``weights_dtype=jnp.bfloat16`` and gradients of bfloat16. It holds no state of the optimizer but a few numbers.

    ``tx`` is not run but traced, and sent to the reducers as a list of elementary operations; they need no JAX. The
    weights have the same bits with any number of reducers. They differ from those of a jitted ``tx`` by rounding, as
    XLA contracts multiplications and additions.

    Args:
      tx: an optax transformation, such as ``optax.adamw(1e-3)``, or a chain of them with schedules, masks, clipping by
        the global norm, LAMB, ... It must work on each leaf by itself, but for sums over whole leaves.
      axis_name: as in ``jaxhetero.psum``, of gradients that have not been summed: all axes of the mesh. Only ``update``
        has to be called inside its ``jax.shard_map``.
      mean: ``tx`` gets the mean of the gradients of all workers and of all their devices; ``False``: their sum.
      weights_dtype: of the weights that workers get: float32, or bfloat16, rounded from the float32 that is kept.
      wire_dtype: as in ``jaxhetero.psum``, of the gradients. With 8 and 4 bits each worker has scales of its own, and
        ``tx`` gets the mean in float32, which is not rounded again.
      backups: 1: another reducer backs up each share, and the loss of a reducer changes no bit; 0: none does.
      bucket_bytes: as in ``jaxhetero.psum``, counted in the dtypes of the parameters, of which each bucket has one.
      name: of the optimizer in messages; every worker makes the same optimizers in the same order.

    Returns:
      An optax transformation with two more methods, ``pull`` and ``push``.

      ``init(params)`` gives the reducers the weights of rank 0. Give every worker those as well, by
      ``jaxhetero.broadcast``. ``update(gradients, state)`` takes the gradients of this worker. It returns updates to
      give to ``optax.apply_updates``, which makes them the new weights, and the next state. ``accumulate_gradients``
      around it needs ``update(gradients, state, params)``.

    A state can be used once: an update changes it at the reducers. In a world of one worker and no reducer, the worker
    runs ``tx`` itself.

    If a reducer is lost, those that back its share up go on with it, and copy it to new backups while training goes on.
    A reducer that joins gets a share with what is kept of it. The job ends where a share is lost with its backup, or
    has none, as with a reducer alone: start again from a checkpoint.

    In an elastic job workers may be lost as well. ``mean`` is then over those who have taken part in a bucket. All
    workers give ``init`` and ``push`` the same. One that comes calls ``init`` as the others did, and gets its result
    from them at its first gate.

    Does not block, as any JAX computation.

    Raises:
      ConfigError: a parameter is not float32, bfloat16 or float16; ``tx`` does what cannot be sent: then the message
        names the primitive of JAX; ``axis_name`` does not name all axes of the mesh; or JAX has summed gradients
        already: see ``jaxhetero.psum``.
      jax.errors.JaxRuntimeError: when the program runs: a peer fails, a state is used twice, or workers disagree about
        the numbers of the step, such as the learning rate; see ``jaxhetero.errors``.

    Example:
      >>> import optax
      >>> optimizer = jaxhetero.optimizers.on_reducers(optax.sgd(0.5))
      >>> params = {"w": jnp.ones(2)}
      >>> opt_state = optimizer.init(params)
      >>> updates, opt_state = optimizer.update({"w": jnp.array([1.0, 2.0])}, opt_state, params)
      >>> optax.apply_updates(params, updates)
      {'w': Array([0.5, 0. ], dtype=float32)}
    """
    label = name or f"optimizer {next(_numbers)}"
    check_wire_dtype(wire_dtype, label, tuple(QUANTA))
    if backups not in (0, 1):
        raise ConfigError(f"{label}: backups is {backups}; it can be 0 or 1")
    home = _Home(tx, axis_name, mean, np.dtype(weights_dtype), wire_dtype, backups, bucket_bytes, label)

    def init(params: Any) -> ReducersState:
        return home.init(params)

    def update(gradients: Any, state: ReducersState, params: Any = None, **extra: Any) -> tuple[Any, ReducersState]:
        if extra:
            home.check_unused(state.model, extra)
        return home.update(gradients, state, params)

    optimizer = ReducersOptimizer(init, update)
    optimizer._home = home
    return optimizer


@dataclass(frozen=True)
class _Plan:
    """What ``tx`` is for weights of certain shapes."""

    model: Model
    update: Update
    buckets: tuple[BucketPlan, ...]
    opt_state: Any  # of shapes
    zeros: frozenset[int]  # the leaves of a new state that are 0 everywhere
    digest: str

    def with_states(self, states: dict[int, Any]) -> Any:
        """The optimizer's state with these leaves, by their numbers; None in the place of others."""
        structure: Any = jax.tree.structure(self.opt_state)
        return jax.tree.unflatten(structure, [states.get(number) for number in range(structure.num_leaves)])


@dataclass
class _Home:
    """An optimizer at the reducers, as a worker sees it."""

    tx: optax.GradientTransformation
    axis_name: AxisName
    mean: bool
    weights_dtype: np.dtype[Any]
    wire_dtype: Any
    backups: int
    bucket_bytes: int
    label: str

    def __post_init__(self) -> None:
        self._plans: dict[Model, _Plan] = {}

    def init(self, params: Any) -> ReducersState:
        return self._store(Model.of(self.label, params), params, self.tx.init(params), _NEW_MODEL)

    def push(self, params: Any, opt_state: Any, state: ReducersState | None) -> ReducersState:
        if state is not None:
            self._check(state, params, "params")
            return self._store(state.model, params, opt_state, state)
        # ``pull`` gives all weights in float32, whatever the model has.
        model = Model.of(self.label, params)
        model = next((known for known in reversed(self._plans) if known.shapes == model.shapes), model)
        return self._store(model, params, opt_state, _LATEST_MODEL)

    def _store(self, model: Model, params: Any, opt_state: Any, place: int | ReducersState) -> ReducersState:
        """``place``: of the model among those of this optimizer. A new model has the state of ``tx.init``.

        Of such a state, reducers need not be told what is 0.
        """
        is_new = place == _NEW_MODEL
        self._check_dtypes(params, "params")
        axis_name = self._axis_name_here()
        plan, devices = self._plan_of(model), self._devices(axis_name)
        weights, states = jax.tree.leaves(params), jax.tree.leaves(opt_state)
        given: Any = jax.tree.structure(opt_state)
        if given != jax.tree.structure(plan.opt_state):
            raise ConfigError(f"{self.label}: the state is not one of this optimizer for these parameters")
        if world.current().is_alone:
            # With memory of its own: a step may be given both, to use their memory.
            kept = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
            return ReducersState((), opt_state, plan.model, kept)
        own = [jnp.asarray(states[index]) for index in plan.update.worker_states]
        kept = plan.with_states(dict(zip(plan.update.worker_states, own, strict=True)))
        if world.is_coming():  # the others have stored it, and hand the state over at the gate
            return ReducersState(tuple(jnp.uint32(0) for _ in plan.buckets), kept, plan.model)
        versions = []
        for number, bucket in enumerate(plan.buckets):
            version = jax.device_put(np.uint32(place)) if isinstance(place, int) else place.versions[number]
            for slot in range(bucket.slot_count):
                found = [_slot_leaf(plan, leaf, slot) for leaf in bucket.leaves]
                if is_new and slot and all(state is None or state in plan.zeros for state in found):
                    continue
                arrays = [
                    jnp.asarray(weights[leaf] if slot == 0 else 0.0 if state is None else states[state], jnp.float32)
                    for leaf, state in zip(bucket.leaves, found, strict=True)
                ]
                arrays = [
                    jnp.broadcast_to(array, plan.model.shapes[leaf]) if array.ndim == 0 else array
                    for array, leaf in zip(arrays, bucket.leaves, strict=True)
                ]
                (version,) = self._call(plan, number, Kind.STORE, devices, (), slot=slot)(*arrays, version)
            versions.append(version)
        if not world.is_elastic():  # there all give the same
            own = api.broadcast(own, axis_name=axis_name, name=f"{self.label} state")
            kept = plan.with_states(dict(zip(plan.update.worker_states, own, strict=True)))
        return ReducersState(tuple(versions), kept, plan.model)

    def pull(self, state: ReducersState) -> tuple[Any, Any]:
        if world.current().is_alone:
            return state.weights, state.own
        plan = self._plan_of(state.model)
        devices = self._devices(self._axis_name_here())
        weights: list[Any] = [None] * len(plan.model.shapes)
        states = dict(zip(plan.update.worker_states, jax.tree.leaves(state.own), strict=True))
        types = jax.tree.leaves(plan.opt_state)
        for number, bucket in enumerate(plan.buckets):
            results = tuple((plan.model.shapes[leaf], "float32") for leaf in bucket.leaves)
            for slot in range(bucket.slot_count):
                call = self._call(plan, number, Kind.LOAD, devices, results, slot=slot)
                *arrays, _ = call(state.versions[number])
                for leaf, array in zip(bucket.leaves, arrays, strict=True):
                    index = _slot_leaf(plan, leaf, slot)
                    if slot == 0:
                        weights[leaf] = array
                    elif index is not None:
                        states[index] = array.reshape(types[index].shape).astype(types[index].dtype)
        return jax.tree.unflatten(plan.model.structure, weights), plan.with_states(states)

    def update(self, gradients: Any, state: ReducersState, params: Any) -> tuple[Any, ReducersState]:
        self._check(state, gradients, "gradients")
        if params is not None:
            self._check(state, params, "params")
        refuse_invariant(gradients, self.axis_name, self.label, mean=None)
        devices = self._devices(self.axis_name)
        if self.mean and devices.count > 1:
            gradients = jax.tree.map(lambda leaf: leaf / devices.count, gradients)
        if world.current().is_alone:
            return self._update_alone(jax.tree.map(devices.sum, gradients), state, params)
        plan = self._plan_of(state.model)
        leaves, structure = jax.tree.flatten(gradients)
        step = _Step(self, plan, devices, leaves, state)
        return self._finish(step, plan, structure, state, params)

    def _finish(
        self, step: _Step, plan: _Plan, structure: Any, state: ReducersState, params: Any
    ) -> tuple[Any, ReducersState]:
        weights, versions, totals = step.run()
        own = plan.update.advance(
            jax.tree.leaves(state.own), jnp.stack(totals) if totals else jnp.zeros(0, jnp.float32)
        )
        updates = _replacing(jax.tree.unflatten(structure, weights), params)
        kept = jax.tree.unflatten(jax.tree.structure(state.own), own)
        return updates, ReducersState(tuple(versions), kept, state.model)

    def start(self, gradients: Any, state: ReducersState, priorities: Sequence[int]) -> StartedUpdate:
        """Begin an update, which ``finish`` ends in this program or in a later one. A priority for each gradient."""
        world.refuse_elastic(f"{self.label}: across_steps around on_reducers")
        self._check(state, gradients, "gradients")
        refuse_invariant(gradients, self.axis_name, self.label, mean=None)
        leaves = jax.tree.leaves(gradients)
        if world.current().is_alone:
            return StartedUpdate(tuple(map(jnp.asarray, leaves)), ())
        plan = self._plan_of(state.model)
        step = _Step(self, plan, self._devices(self.axis_name), leaves, state)
        return StartedUpdate(*step.start(priorities))

    def finish(self, started: StartedUpdate, state: ReducersState, params: Any) -> tuple[Any, ReducersState]:
        """As ``update``, with the state that ``start`` was given."""
        if world.current().is_alone:
            gradients = jax.tree.unflatten(jax.tree.structure(params), started.arrays)
            return self._update_alone(gradients, state, params)
        plan = self._plan_of(state.model)
        results = [call.done(ticket) for call, ticket in zip(started.calls, started.arrays, strict=True)]
        leaves, structure = jax.tree.flatten(params)
        step = _Step(self, plan, self._devices(self.axis_name), leaves, state, results)
        return self._finish(step, plan, structure, state, params)

    def _update_alone(self, gradients: Any, state: ReducersState, params: Any) -> tuple[Any, ReducersState]:
        gradients = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), gradients)
        updates, own = self.tx.update(gradients, state.own, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        rounded = jax.tree.map(lambda leaf: leaf.astype(self.weights_dtype), weights)
        return _replacing(rounded, params), ReducersState((), own, state.model, weights)

    def call(
        self, plan: _Plan, bucket: int, stage: int, leaves: Sequence[Any], devices: WorkerDevices, call_bytes: int
    ) -> StateCall:
        """The call of one stage of a bucket, whose gradients are ``leaves``."""
        known = plan.buckets[bucket]
        is_last = stage == len(known.stages) - 1
        dtypes = [self.weights_dtype if is_last else leaf.dtype for leaf in leaves]
        results = tuple((plan.model.shapes[leaf], str(dtype)) for leaf, dtype in zip(known.leaves, dtypes, strict=True))
        if not is_last:
            results = (*results, ((len(known.stages[stage].totals),), "float32"))
        return self._call(
            plan,
            bucket,
            Kind.UPDATE if is_last else Kind.MEASURE,
            devices,
            results,
            update=known.stages[stage].description,
            resumes=stage > 0,
            wire_dtype=primitive_wire_dtype(leaves[0].dtype, self.wire_dtype),
            call_bytes=call_bytes,
        )

    def _call(
        self, plan: _Plan, bucket: int, kind: Kind, devices: WorkerDevices, results: tuple[Any, ...], **options: Any
    ) -> StateCall:
        digest = hashlib.blake2b(f"{self.label} {plan.digest} {bucket}".encode(), digest_size=7).digest()
        return StateCall(
            kind=kind,
            label=f"{self.label} bucket {bucket} {kind.name.lower()}",
            number=1 + int.from_bytes(digest, "little"),
            slot_count=plan.buckets[bucket].slot_count,
            results=results,
            is_backed_up=self.backups > 0,
            worker_count=world.capacity(),
            devices=devices,
            caller=bucket % devices.count,
            is_shared=devices.count > 1,
            is_elastic=world.is_elastic(),
            averages=world.is_elastic() and self.mean and kind in (Kind.MEASURE, Kind.UPDATE),
            **options,
        )

    def _check(self, state: ReducersState, tree: Any, name: str) -> None:
        """Raises where gradients or parameters are not those of the state. Flax has its trees in several structures."""
        self._check_dtypes(tree, name)
        if state.model.optimizer != self.label:
            raise ConfigError(
                f"{self.label}: the state is one of {state.model.optimizer}. What makes an optimizer in each step, as "
                "optax.inject_hyperparams does, goes inside: on_reducers(optax.inject_hyperparams(...)(...))"
            )
        if Model.of(self.label, tree).shapes != state.model.shapes:
            raise ConfigError(f"{self.label}: {name} are those of another model than the state is of")

    def check_unused(self, model: Model, extra: dict[str, Any]) -> None:
        """Raises where ``tx`` does another thing with these extra arguments than without."""
        tx, params = optax.with_extra_args_support(self.tx), model.params(np.float32)
        state = jax.eval_shape(tx.init, params)

        def traced(**extra: Any) -> str:
            return str(jax.make_jaxpr(lambda params, state: tx.update(params, state, params, **extra))(params, state))

        if traced(**extra) != traced():
            names = ", ".join(extra)
            raise ConfigError(f"{self.label}: update() is given {names}, and reducers have no extra arguments for it")

    def _check_dtypes(self, tree: Any, name: str) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jnp.result_type(leaf) not in _DTYPES:
                raise ConfigError(
                    f"{self.label}: {name}{jax.tree_util.keystr(path)} is {jnp.result_type(leaf)}; reducers keep "
                    "weights of float32, from parameters and gradients of float32, bfloat16 or float16"
                )

    def _axis_name_here(self) -> AxisName:
        """The axis if this is inside its ``jax.shard_map``: states are made and pulled outside as well."""
        try:
            for name in axis_names(self.axis_name):
                jax.lax.axis_size(name)
        except NameError:
            return None
        return self.axis_name

    def _devices(self, axis_name: AxisName) -> WorkerDevices:
        return WorkerDevices.of(classify(axis_name, self.label))

    def _plan_of(self, model: Model) -> _Plan:
        if model not in self._plans:
            with jax.sharding.use_abstract_mesh(_NO_MESH):  # ``tx`` as it is: in a mesh JAX puts in what is about that
                self._plans[model] = self._make_plan(model)
        return self._plans[model]

    def _make_plan(self, model: Model) -> _Plan:
        params = model.params(np.float32)
        update = lower(self._scaled(), params, weights_dtype=self.weights_dtype)
        weights = OutputType.BF16 if self.weights_dtype == jnp.bfloat16 else OutputType.F32
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in model.shapes]
        buckets = tuple(
            plan_bucket(update, leaves, [sizes[leaf] for leaf in leaves], weights)
            for leaves in make_buckets(model.params(), self.bucket_bytes)
        )
        opt_state = jax.eval_shape(self.tx.init, params)
        new_state = Graph(jax.make_jaxpr(lambda given: jax.tree.leaves(self.tx.init(given)))(params)).outputs
        zeros = {i for i, value in enumerate(new_state) if isinstance(value, Constant) and not np.any(value.value)}
        descriptions = [stage.description for bucket in buckets for stage in bucket.stages]
        digest = hashlib.blake2b(b"".join(descriptions)).hexdigest()
        return _Plan(model, update, buckets, opt_state, frozenset(zeros), digest)

    def _scaled(self) -> optax.GradientTransformation:
        """``tx`` on the sum of the gradients."""
        if not self.mean or world.is_elastic() or world.size() == 1:  # of an elastic job, reducers know the number
            return self.tx
        factor = np.float32(1 / world.size())

        def update(gradients: Any, state: Any, params: Any) -> Any:
            return self.tx.update(jax.tree.map(lambda leaf: leaf * factor, gradients), state, params)

        return optax.GradientTransformation(self.tx.init, update)


def _replacing(weights: Any, params: Any) -> Any:
    """The updates that make ``params`` these weights, in their own dtypes."""
    if params is None:
        return jax.tree.map(NewWeights, weights)
    return jax.tree.map(lambda leaf, param: NewWeights(leaf.astype(param.dtype), param), weights, params)


def _slot_leaf(plan: _Plan, leaf: int, slot: int) -> int | None:
    """Which leaf of the optimizer's state a slot has for a leaf of the weights; None if it has none, or the weights."""
    states = plan.update.leaves[leaf].states
    return states[slot - 1] if 0 < slot <= len(states) else None


class _Step:
    """A step: the stages of all buckets. A bucket waits for the totals that it needs, and for nothing else."""

    def __init__(
        self,
        home: _Home,
        plan: _Plan,
        devices: WorkerDevices,
        leaves: Sequence[Any],
        state: ReducersState,
        started: Sequence[list[Any]] = (),
    ) -> None:
        """``started``: of each bucket, what its first stage has given, if that is over. Then leaves are not read."""
        self._started = started
        self._home, self._plan, self._devices = home, plan, devices
        self._leaves, self._versions = [jnp.asarray(leaf) for leaf in leaves], list(state.versions)
        is_in_numbers = quanta_of(home.wire_dtype) is not None
        for bucket in plan.buckets:
            # Parameters of a bucket have one dtype, but their gradients may have several.
            if is_in_numbers or len({self._leaves[leaf].dtype for leaf in bucket.leaves}) > 1:
                for leaf in bucket.leaves:
                    self._leaves[leaf] = self._leaves[leaf].astype(jnp.float32)
        self._scalars = plan.update.scalars(jax.tree.leaves(state.own))
        self._totals: dict[int, Any] = {}
        self._measured: list[list[Any]] = [[] for _ in plan.buckets]
        # Chunks are as large as without numbers, which are a code of float32.
        self._call_bytes = wire_bytes(self._leaves, None if is_in_numbers else home.wire_dtype)

    def start(self, priorities: Sequence[int]) -> tuple[tuple[jax.Array, ...], tuple[PendingState, ...]]:
        """Begin the first stage of each bucket; their tickets, and the calls that take them."""
        tickets, calls = [], []
        for index, bucket in enumerate(self._plan.buckets):
            if any(source.origin != Origin.WORKERS for source in bucket.stages[0].sent):
                raise ConfigError(
                    f"{self._home.label}: bucket {index} has weights whose update waits for sums over others and has "
                    "none of its own, so there is nothing to start in a step and finish in the next one"
                )
            call = PendingState.of(self._call(index, 0), min(priorities[leaf] for leaf in bucket.leaves))
            tickets.append(call.start(self._operands(index, 0)))
            calls.append(call)
        return tuple(tickets), tuple(calls)

    def run(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The weights, the versions of the buckets, and the totals that workers need."""
        measures = [
            (stage.level, index, number)
            for index, bucket in enumerate(self._plan.buckets)
            for number, stage in enumerate(bucket.stages[:-1])
        ]
        for _, index, number in sorted(measures):
            (totals,) = self._run_stage(index, number)
            self._measured[index].append(totals)
            self._totals |= zip(self._plan.buckets[index].stages[number].totals, totals, strict=True)
        for index, bucket in enumerate(self._plan.buckets):
            self._run_stage(index, len(bucket.stages) - 1)
        totals = [self._totals[number] for number in self._plan.update.returned_totals]
        return together(self._leaves), self._versions, totals

    def _run_stage(self, bucket: int, stage: int) -> list[Any]:
        """Puts new weights, or what has their memory until then, in the place of gradients. Returns totals, if any."""
        known = self._plan.buckets[bucket]
        if stage == 0 and self._started:
            passed = [self._leaves[leaf] for leaf in known.leaves] if len(known.stages) > 1 else []
            results = [*passed, *self._started[bucket]]
        else:
            results = self._call(bucket, stage)(*self._operands(bucket, stage))
        *results, self._versions[bucket] = results
        for leaf, result in zip(known.leaves, results, strict=False):
            self._leaves[leaf] = result
        return results[len(known.leaves) :]

    def _call(self, bucket: int, stage: int) -> StateCall:
        leaves = [self._leaves[leaf] for leaf in self._plan.buckets[bucket].leaves]
        return self._home.call(self._plan, bucket, stage, leaves, self._devices, self._call_bytes)

    def _operands(self, bucket: int, stage: int) -> list[Any]:
        leaves = [self._leaves[leaf] for leaf in self._plan.buckets[bucket].leaves]
        return [*leaves, *self._sent(bucket, stage), self._versions[bucket]]

    def _sent(self, bucket: int, stage: int) -> list[Any]:
        """The totals of the bucket itself as they came: what is computed from them waits for more than them."""
        measured = self._measured[bucket]
        others = self._plan.buckets[bucket].stages[stage].sent[sum(len(totals) for totals in measured) :]
        values = [
            self._scalars[source.number] if source.origin == Origin.WORKERS else self._totals[source.number]
            for source in others
        ]
        return [*measured, jnp.stack(values) if values else jnp.zeros(0, jnp.float32)]
