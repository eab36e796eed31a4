"""A cut that is compiled on this worker, and runs steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero import collectives
from jaxhetero._channels import Channels
from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.arguments import Splitter, is_none, shape_of
from jaxhetero.pipeline.cut import Cut
from jaxhetero.pipeline.executor import Executor, Made
from jaxhetero.pipeline.reduction import Reduction
from jaxhetero.pipeline.results import Results
from jaxhetero.pipeline.runner import Step


class Engine:
    """A cut, compiled."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._failure: Exception | None = None
        graph, stages = cut.traced.graph, cut.stages
        schedule, places = cut.decision.schedule, cut.places
        channels = Channels() if places.count > 1 else None
        programs = [cut.programs(stage) for stage in cut.own_stages]
        reduction = Reduction(graph, stages, schedule, places)
        self._executor = Executor(schedule, programs, stages, places, channels, reduction)
        self._results = Results(graph, stages, schedule, places, channels)
        self._splitter = Splitter(schedule.microbatches)
        self._own_params = frozenset(cut.own_params)
        if cut.places.worker_count > 1:
            # Compiling takes the workers different times. From here on, who is late is stuck.
            collectives.barrier(name="pipeline: compiled")

    def run(self, params: Any, arguments: Sequence[Any]) -> Any:
        """A step. After one that has failed, every further one fails in the same way."""
        leaves, structure = jax.tree.flatten(params, is_leaf=is_none)
        if self._failure is not None:
            raise self._failure
        step = self._step(self._arrays([params, *arguments]))
        self._refuse_others(leaves)
        try:
            made, outputs = self._run(step)
        except Exception as error:
            self._failure = error  # other workers wait for messages of this step, and this one for theirs
            raise
        gradients = [
            None if leaf is None else made.gradients[number] if number in made.gradients else jnp.zeros_like(leaf)
            for number, leaf in enumerate(leaves)
        ]
        value = self._value(outputs, made.state, arguments)
        return value, jax.tree.unflatten(structure, gradients)

    def _run(self, step: Step) -> tuple[Made, dict[int, Any]]:
        self._results.begin_step()
        made = self._executor.run(step)
        return made, self._results.share(made.outputs)

    def _value(self, outputs: dict[int, Any], state: dict[int, Any], arguments: Sequence[Any]) -> Any:
        """What the loss returns, for the whole step."""
        traced, signature = self._cut.traced, self._cut.signature
        loss = outputs[0]
        aux = jax.tree.unflatten(traced.aux_tree, [outputs[number] for number in traced.roles.aux_outputs])
        if signature.state_argnum is None:
            return (loss, aux) if signature.has_aux else loss
        structure = jax.tree.structure(arguments[signature.state_argnum - 1], is_leaf=is_none)
        new_state = jax.tree.unflatten(structure, [state.get(number) for number in traced.roles.state])
        return (loss, (aux, new_state)) if signature.has_aux else (loss, new_state)

    def _refuse_others(self, params: Sequence[Any]) -> None:
        for number, leaf in enumerate(params):
            if leaf is not None and number not in self._own_params:
                name = self._cut.traced.names[number]
                raise ConfigError(
                    f"pipeline: the parameter {name} belongs to a stage of another worker; give what Pipeline.init or "
                    "Pipeline.own made, with None in its place"
                )

    def _arrays(self, arguments: Sequence[Any]) -> dict[int, Any]:
        """The leaves of all arguments, by their numbers."""
        traced = self._cut.traced
        if len(arguments) != len(traced.trees):
            raise ConfigError(
                f"pipeline: called with {len(arguments)} arguments; the loss was cut for {len(traced.trees)}"
            )
        arrays: list[Any] = []
        for argnum, (argument, tree) in enumerate(zip(arguments, traced.trees, strict=True)):
            leaves = jax.tree.leaves(argument, is_leaf=is_none)
            if len(leaves) != tree.num_leaves:
                raise ConfigError(
                    f"pipeline: argument {argnum} has {len(leaves)} leaves; the loss was cut for {tree.num_leaves}"
                )
            arrays += leaves
        return dict(enumerate(arrays))

    def _step(self, arrays: dict[int, Any]) -> Step:
        own = self._cut.own_stages
        params = {number: arrays[number] for stage in own for number in stage.params}
        whole = {number: arrays[number] for stage in own for number in stage.whole}
        batch = {number: arrays[number] for stage in own for number in stage.batch}
        state = {number: arrays[number] for stage in own for number in stage.state}
        self._check_arrays({**params, **whole, **state}, 1)
        self._check_arrays(batch, self._cut.decision.schedule.microbatches)
        return Step(params, whole, state, self._splitter.split(batch))

    def _check_arrays(self, arrays: dict[int, Any], parts: int) -> None:
        traced = self._cut.traced
        for number, array in arrays.items():
            aval = traced.graph.inputs[number].aval
            if array is None:
                what = traced.names[number] if number in traced.roles.params else f"leaf {number} of the arguments"
                raise ConfigError(f"pipeline: {what} is None, but a stage of this worker uses it; see Pipeline.own")
            shape = shape_of(array)
            wanted = (aval.shape[0] * parts, *aval.shape[1:]) if number in traced.roles.batch else aval.shape
            if (shape.shape, shape.dtype) != (wanted, aval.dtype):
                raise ConfigError(
                    f"pipeline: leaf {number} of the arguments is {shape.dtype}{list(shape.shape)}; the loss was cut "
                    f"for {aval.dtype}{list(wanted)}. Call cut() again for other shapes"
                )
