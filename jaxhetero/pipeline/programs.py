"""The compiled programs of a stage: prepare, once a step; forward and backward, once a microbatch.

All come from one trace of the stage's value and gradients, whose equations are dealt out by what they depend on:

===========  ============================================================================================
prepare      what the forward pass needs of parameters alone, such as a cast to bfloat16
forward      what depends on the microbatch, and not on gradients
backward     what depends on gradients; if it is parted, what no received value's gradient needs comes
             later, as *weights*
===========  ============================================================================================

What the forward pass makes and the backward pass uses is *kept* between them. It holds no parameters: these go into
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxhetero._collectives.wire_dtypes import sum_dtype
from jaxhetero.pipeline.graph import Equation, Graph, Value, evaluate, live, trace
from jaxhetero.pipeline.rows import Holding
from jaxhetero.pipeline.stages import Stage


@dataclass(frozen=True, eq=False)
class StageProgram:
    """Equations to compile, with what they are given and what they have to make."""

    equations: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: dict[Value, Any]
    donated: frozenset[Value] = frozenset()
    """Inputs whose memory an output may take."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.outputs and not self.equations

    def compile(self) -> Any:
        """A function from a list for the donated and one for the other inputs, each in their order, to the outputs."""

        def run(donated: list[Any], others: list[Any]) -> list[Any]:
            known = dict(zip(self.donated_inputs, donated, strict=True))
            known.update(zip(self.other_inputs, others, strict=True))
            return evaluate(self.equations, self.constants | known, self.outputs)

        shapes = [value.shape for value in self.donated_inputs], [value.shape for value in self.other_inputs]
        return compiled(run, *shapes, donate_argnums=0)

    @cached_property
    def donated_inputs(self) -> tuple[Value, ...]:
        """The inputs whose memory an output may take."""
        return tuple(value for value in self.inputs if value in self.donated)

    @cached_property
    def other_inputs(self) -> tuple[Value, ...]:
        """The inputs that stay as they are."""
        return tuple(value for value in self.inputs if value not in self.donated)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The values that a stage's programs are given, by what they are."""

    params: tuple[Value, ...]
    """What the worker holds of each leaf that the stage uses."""
    whole: tuple[Value, ...]
    state: tuple[Value, ...]
    received: tuple[Value, ...]
    batch: tuple[Value, ...]
    cotangents: tuple[Value, ...]
    """For each float that is sent, one from each stage that it goes to."""
    seed: tuple[Value, ...]
    """One, the gradient of the loss with respect to itself, in the stage that makes it. It is an input, so that what
    depends on it is a part of the backward pass."""
    sums: tuple[Value, ...]
    """The gradients of the float parameters so far."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a stage's programs make, by what it is."""

    sent: tuple[Value, ...]
    outputs: tuple[Value, ...]
    state: tuple[Value, ...]
    sums: tuple[Value, ...]
    gradients: tuple[Value, ...]
    """Of the floats that are received."""


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of one stage. ``weights`` is empty if the backward pass is not parted."""

    stage: Stage
    leaves: tuple[int, ...]
    """The numbers of the leaves that the stage uses, in the order of ``inputs.params``."""
    params: tuple[Value, ...]
    """The parameters of the stage: leaves, or rows of leaves."""
    inputs: Inputs
    outputs: Outputs
    prepare: StageProgram
    forward: StageProgram
    backward: StageProgram
    weights: StageProgram

    @property
    def kept(self) -> set[Value]:
        """What of one microbatch is needed after its forward pass: made by it, or given to it."""
        given = {*self.inputs.state, *self.inputs.received, *self.inputs.batch}
        made = set(self.forward.outputs) | given
        return made & {*self.backward.inputs, *self.weights.inputs}

    @property
    def kept_for_weights(self) -> set[Value]:
        """What of one microbatch the second part of its backward pass needs: all that is not the same for the step."""
        inputs = self.inputs
        of_step = {*inputs.params, *inputs.whole, *inputs.seed, *inputs.sums, *self.prepare.outputs}
        return set(self.weights.inputs) - of_step

    @property
    def kept_bytes(self) -> int:
        """Of one microbatch, between its forward and its backward pass."""
        return sum(value.bytes for value in self.kept)

    @property
    def kept_for_weights_bytes(self) -> int:
        """Of one microbatch, between the two parts of a backward pass."""
        return sum(value.bytes for value in self.kept_for_weights)

    @property
    def prepared_bytes(self) -> int:
        """What is prepared once a step."""
        return sum(value.bytes for value in set(self.prepare.outputs))

    @property
    def params_bytes(self) -> int:
        """The stage's parameters."""
        return sum(value.bytes for value in self.params)

    @property
    def sums_bytes(self) -> int:
        """The sums of the gradients."""
        return sum(value.bytes for value in self.inputs.sums)


def make_programs(stage: Stage, graph: Graph, holding: Holding, *, parted: bool) -> Programs:
    """Trace a stage, and deal its equations out.

    Args:
      graph: of the whole loss.
      holding: what the worker of the stage holds.
      parted: whether gradients of received values and gradients of parameters are programs of their own.
    """
    return _Dealer(stage, graph, holding).programs(parted)


def compiled(function: Callable[..., Any], *shapes: Any, donate_argnums: int | tuple[()] = ()) -> Callable[..., Any]:
    """A program of ``function`` for arguments of these shapes; it is one under ``jax.disable_jit`` as well."""
    with jax.disable_jit(False):
        program = jax.jit(function, donate_argnums=donate_argnums).lower(*shapes).compile()

    def run(*arguments: Any) -> Any:
        with jax.disable_jit(False):
            return program(*arguments)

    return run


def _sum_shape(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.aval.shape, sum_dtype(value.aval.dtype))


def _is_float(shape: Any) -> bool:
    return bool(jnp.issubdtype(shape.dtype, jnp.inexact))


class _Dealer:
    def __init__(self, stage: Stage, graph: Graph, holding: Holding) -> None:
        self.stage = stage
        self.holding = holding
        self.leaves = tuple(holding.leaves_of(stage.params))
        self.constants = {value: graph.constants[value] for value in stage.constants}
        self.params = tuple(graph.inputs[number] for number in stage.params)
        self.whole = tuple(graph.inputs[number] for number in stage.whole)
        self.state = tuple(graph.inputs[number] for number in stage.state)
        self.batch = tuple(graph.inputs[number] for number in stage.batch)
        self.results = tuple(graph.outputs[number] for number in stage.outputs)
        self.new_state = tuple(graph.outputs[number] for number in stage.state_outputs)
        self.loss_place = stage.outputs.index(0) if 0 in stage.outputs else None

    def programs(self, parted: bool) -> Programs:
        graph, inputs, outputs = self._trace()
        kinds = _Kinds(graph, inputs)
        forward_outputs = (*outputs.sent, *outputs.outputs, *outputs.state)
        backward_outputs = (*outputs.sums, *outputs.gradients)
        forward = live(kinds.forward, forward_outputs)
        backward = live(kinds.backward, backward_outputs)
        # What is needed of the microbatch for the backward pass alone is made by the forward pass, and kept.
        forward = live(kinds.forward, [*forward_outputs, *_needs(backward)])
        prepared = live(kinds.static, [*forward_outputs, *_needs(forward)])
        made_before = {value for equation in (*prepared, *forward) for value in equation.outputs}
        backward = live([*kinds.static, *kinds.backward], backward_outputs)
        backward = [equation for equation in backward if made_before.isdisjoint(equation.outputs)]
        first, second = _part(backward, outputs) if parted else (backward, [])
        make = _Maker(graph, kinds.free, inputs)
        later = {*_needs(backward), *backward_outputs}
        weights_outputs = outputs.sums if parted else ()
        first_outputs = (*outputs.gradients, *_made_for(first, {*_needs(second)})) if parted else backward_outputs
        return Programs(
            self.stage,
            self.leaves,
            self.params,
            inputs,
            outputs,
            make.program(prepared, _made_for(prepared, {*_needs(forward), *later, *forward_outputs})),
            make.program(forward, _unique((*forward_outputs, *_made_for(forward, later)))),
            make.program(first, _unique(first_outputs)),
            make.program(second, weights_outputs),
        )

    def _trace(self) -> tuple[Graph, Inputs, Outputs]:
        """The graph of the stage's value and gradients."""
        sent = [pair for pair in zip(self.stage.sent, self.stage.targets, strict=True) if pair[0].is_float]
        target_counts = [len(targets) for _, targets in sent]
        sums = [_sum_shape(value) for value in self.params if value.is_float]
        shapes = (
            [self.holding.shape(leaf) for leaf in self.leaves],
            *(_shapes(values) for values in (self.whole, self.state, self.stage.received, self.batch)),
            [value.shape for value, targets in sent for _ in targets],
            [] if self.loss_place is None else [self.results[self.loss_place].shape],
            sums,
        )
        graph = trace(lambda *arguments: self._joint(target_counts, *arguments), *shapes)
        inputs = Inputs(*_grouped(graph.inputs, [len(group) for group in shapes]))
        counts = [
            len(self.stage.sent),
            len(self.results),
            len(self.new_state),
            len(sums),
            sum(value.is_float for value in self.stage.received),
        ]
        return graph, inputs, Outputs(*_grouped(graph.outputs, counts))

    def _joint(
        self,
        target_counts: list[int],
        leaves: list[Any],
        whole: list[Any],
        state: list[Any],
        received: list[Any],
        batch: list[Any],
        cotangents: list[Any],
        seed: list[Any],
        sums: list[Any],
    ) -> list[Any]:
        """Sent values, outputs, new state, sums of gradients, gradients of what was received: one after the other."""

        def run(float_params: list[Any], float_received: list[Any]) -> tuple[list[Any], list[Any]]:
            known = dict(self.constants)
            known.update(zip(self.params, _with_floats(params, float_params), strict=True))
            known.update(zip(self.stage.received, _with_floats(received, float_received), strict=True))
            for values, arrays in ((self.whole, whole), (self.state, state), (self.batch, batch)):
                known.update(zip(values, arrays, strict=True))
            wanted = [*self.stage.sent, *self.results, *self.new_state]
            made = evaluate(self.stage.equations, known, wanted)
            sent = made[: len(self.stage.sent)]
            differentiated = [array for array in sent if _is_float(array)]
            if self.loss_place is not None:
                differentiated.append(made[len(sent) + self.loss_place])
            return differentiated, made

        params = self._params_of(leaves)
        differentiated, pull_back, made = jax.vjp(run, _floats(params), _floats(received), has_aux=True)
        gradients, received_gradients = pull_back(_add_up(cotangents, target_counts, differentiated) + seed)
        new_sums = [total + gradient.astype(total.dtype) for total, gradient in zip(sums, gradients, strict=True)]
        return [*made, *new_sums, *received_gradients]

    def _params_of(self, leaves: Sequence[Any]) -> list[Any]:
        """The stage's parameters, of what the worker holds."""
        parts = {
            number: part
            for leaf, array in zip(self.leaves, leaves, strict=True)
            for number, part in self.holding.parts(leaf, array)
        }
        return [parts[number] for number in self.stage.params]


def _add_up(cotangents: list[Any], counts: list[int], like: Sequence[Any]) -> list[Any]:
    """The cotangent of each sent value: those of the stages that use it, the last one first, as JAX adds them."""
    seeds, position = [], 0
    for count, array in zip(counts, like, strict=False):
        parts = cotangents[position : position + count][::-1]
        position += count
        total = parts[0].astype(sum_dtype(array.dtype)) if count > 1 else parts[0]
        for part in parts[1:]:
            total += part
        seeds.append(total.astype(array.dtype))
    return seeds


def _shapes(values: Iterable[Value]) -> list[jax.ShapeDtypeStruct]:
    return [value.shape for value in values]


def _floats(arrays: Sequence[Any]) -> list[Any]:
    return [array for array in arrays if _is_float(array)]


def _with_floats(arrays: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
    """``arrays``, with ``floats`` in the place of those that are floats."""
    left = iter(floats)
    return [next(left) if _is_float(array) else array for array in arrays]


def _grouped(atoms: Sequence[Any], counts: Sequence[int]) -> list[tuple[Any, ...]]:
    left = iter(atoms)
    return [tuple(next(left) for _ in range(count)) for count in counts]


def _needs(equations: Iterable[Equation]) -> Iterable[Value]:
    return (value for equation in equations for value in equation.values)


def _made_for(equations: Iterable[Equation], needed: set[Any]) -> tuple[Value, ...]:
    return tuple(value for equation in equations for value in equation.outputs if value in needed)


def _unique(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(values))


def _part(backward: list[Equation], outputs: Outputs) -> tuple[list[Equation], list[Equation]]:
    """The equations that gradients of received values need, and the others."""
    first = live(backward, outputs.gradients)
    chosen = set(first)
    return first, [equation for equation in backward if equation not in chosen]


class _Kinds:
    """Equations by what they depend on."""

    def __init__(self, graph: Graph, inputs: Inputs) -> None:
        self.free: dict[Value, Equation] = {}
        """Those of nothing, such as zeros: each program makes them for itself. By their outputs."""
        self.static: list[Equation] = []
        self.forward: list[Equation] = []
        self.backward: list[Equation] = []
        ranks: dict[Value, int] = {}
        lists = (None, self.static, self.forward, self.backward)
        for values, rank in (
            ((*inputs.params, *inputs.whole, *graph.constants), 1),
            ((*inputs.state, *inputs.received, *inputs.batch), 2),
            ((*inputs.cotangents, *inputs.seed, *inputs.sums), 3),
        ):
            ranks.update(dict.fromkeys(values, rank))
        for equation in graph.equations:
            rank = max((ranks[value] for value in equation.values), default=0)
            if equation.source.effects:
                rank = max(rank, 2)
            ranks.update(dict.fromkeys(equation.outputs, rank))
            chosen = lists[rank]
            if chosen is None:
                self.free.update(dict.fromkeys(equation.outputs, equation))
            else:
                chosen.append(equation)


class _Maker:
    """Makes programs that are complete in themselves."""

    def __init__(self, graph: Graph, free: dict[Value, Equation], inputs: Inputs) -> None:
        self.graph = graph
        self.free = free
        self.sums = frozenset(inputs.sums)
        self.order = {equation: number for number, equation in enumerate(graph.equations)}

    def program(self, equations: list[Equation], outputs: Sequence[Value]) -> StageProgram:
        if not outputs and not equations:
            return StageProgram((), (), (), {})
        body = set(equations)
        todo = [*_needs(equations), *outputs]
        while todo:
            equation = self.free.get(todo.pop())
            if equation is not None and equation not in body:
                body.add(equation)
                todo += equation.values
        ordered = tuple(sorted(body, key=self.order.__getitem__))
        made = {value for equation in ordered for value in equation.outputs}
        given = _unique(value for value in (*_needs(ordered), *outputs) if value not in made)
        constants = {value: self.graph.constants[value] for value in given if value in self.graph.constants}
        inputs = tuple(value for value in given if value not in constants)
        return StageProgram(ordered, inputs, tuple(outputs), constants, self.sums.intersection(inputs))
