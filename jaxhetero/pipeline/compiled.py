"""A cut that is compiled on this worker, and runs steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero._collectives import api
from jaxhetero._job.channels import Channels
from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.arguments import Splitter, shape_of
from jaxhetero.pipeline.cut import Cut
from jaxhetero.pipeline.executor import Executor, Made
from jaxhetero.pipeline.reduction import Reduction
from jaxhetero.pipeline.results import Results
from jaxhetero.pipeline.runner import Step


class CompiledPipeline:
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
        self._own_leaves = frozenset(cut.holding.leaves)
        if cut.places.worker_count > 1:
            # Compiling takes the workers different times. From here on, who is late is stuck.
            api.barrier(name="pipeline: compiled")

    def run(self, params: Any, arguments: Sequence[Any]) -> Any:
        """A step. After one that has failed, every further one fails in the same way."""
        if self._failure is not None:
            raise self._failure
        step = self._step(self._arrays([params, *arguments]))
        layout = self._cut.traced.layouts[0]
        leaves = layout.leaves(params, "the tree of parameters")
        self._refuse_others(leaves)
        try:
            made, outputs = self._run(step)
        except Exception as error:
            self._failure = error  # other workers wait for messages of this step, and this one for theirs
            raise
        gradients = {
            number: self._gradient(number, leaf, made.gradients)
            for number, leaf in enumerate(leaves)
            if leaf is not None
        }
        return self._value(outputs, made.state, arguments), layout.filled(params, gradients)

    def _gradient(self, number: int, leaf: Any, gradients: dict[int, Any]) -> Any:
        joined = self._cut.holding.join(number, gradients)
        return jax.tree.map(jnp.zeros_like, leaf) if joined is None else joined

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
        leaves = {place: state[number] for place, number in enumerate(traced.roles.state) if number in state}
        new_state = traced.layouts[signature.state_argnum].filled(arguments[signature.state_argnum - 1], leaves)
        return (loss, (aux, new_state)) if signature.has_aux else (loss, new_state)

    def _refuse_others(self, params: Sequence[Any]) -> None:
        for number, leaf in enumerate(params):
            if leaf is not None and number not in self._own_leaves:
                name = self._cut.traced.names[number]
                raise ConfigError(
                    f"pipeline: the parameter {name} belongs to a stage of another worker; give what Pipeline.init or "
                    "Pipeline.own made, with None in its place"
                )

    def _arrays(self, arguments: Sequence[Any]) -> dict[int, Any]:
        """The leaves of all arguments, by their numbers."""
        traced = self._cut.traced
        if len(arguments) != len(traced.layouts):
            raise ConfigError(
                f"pipeline: called with {len(arguments)} arguments; the loss was cut for {len(traced.layouts)}"
            )
        arrays: list[Any] = []
        for argnum, (argument, layout) in enumerate(zip(arguments, traced.layouts, strict=True)):
            arrays += layout.leaves(argument, f"argument {argnum}")
        return dict(enumerate(arrays))

    def _step(self, arrays: dict[int, Any]) -> Step:
        own, holding = self._cut.own_stages, self._cut.holding
        microbatches = self._cut.decision.schedule.microbatches
        leaves = holding.leaves_of(number for stage in own for number in stage.params)
        params = {leaf: holding.array(leaf, arrays[leaf]) for leaf in leaves}
        whole = {number: arrays[number] for stage in own for number in stage.whole}
        batch = {number: arrays[number] for stage in own for number in stage.batch}
        state = {number: arrays[number] for stage in own for number in stage.state}
        for leaf, array in params.items():
            self._check_array(leaf, array, holding.shape(leaf).shape)
        for number, array in (whole | state).items():
            self._check_array(number, array, self._shape(number))
        for number, array in batch.items():
            count, *rest = self._shape(number)
            self._check_array(number, array, (count * microbatches, *rest))
        return Step(params, whole, state, self._splitter.split(batch))

    def _shape(self, number: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._cut.traced.graph.inputs[number].aval.shape
        return shape

    def _check_array(self, number: int, array: Any, wanted: tuple[int, ...]) -> None:
        names, dtype = self._cut.traced.names, self._cut.traced.graph.inputs[number].aval.dtype
        if array is None:
            what = names[number] if number < len(names) else f"leaf {number} of the arguments"
            raise ConfigError(f"pipeline: {what} is None, but a stage of this worker uses it; see Pipeline.own")
        shape = shape_of(array)
        if (shape.shape, shape.dtype) != (wanted, dtype):
            raise ConfigError(
                f"pipeline: leaf {number} of the arguments is {shape.dtype}{list(shape.shape)}; the loss was cut for "
                f"{dtype}{list(wanted)}. Call cut() again for other shapes"
            )
