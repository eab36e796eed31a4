"""From an optax transformation to an ``Update``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxhetero._compat import bind
from jaxhetero.errors import ConfigError
from jaxhetero.optimizers._programs.assembly import Assembly, Operand
from jaxhetero.optimizers._programs.graph import ELEMENTWISE, SUM, Call, Constant, Graph, Result, Value
from jaxhetero.optimizers._programs.homes import NOWHERE, TOTALS, WORKERS, Home, Homes, in_order, needed_calls
from jaxhetero.optimizers._programs.program import Opcode, OutputType, Program
from jaxhetero.optimizers._programs.rules import RULES, Writer
from jaxhetero.optimizers._programs.update import Leaf, Origin, Pass, Source, Update
from jaxhetero.optimizers._programs.vectors import MOVES

_BFLOAT16 = np.dtype(jnp.bfloat16)
_DTYPES = {np.dtype(np.float32), _BFLOAT16, np.dtype(bool)}


def lower(tx: optax.GradientTransformation, params: Any, *, weights_dtype: Any = jnp.float32) -> Update:
    """What reducers have to do in a step of ``tx``.

    ``tx.update`` is traced on shapes alone; nothing of it runs.

    Args:
      tx: a transformation of gradients.
      params: a tree of arrays or of ``jax.ShapeDtypeStruct``, float32.
      weights_dtype: of the weights that workers get: float32, or bfloat16, to which the float32 weights are rounded.

    Raises:
      ConfigError: parameters are not float32, or the transformation does what no program can. The message names the
        primitive of JAX, and the function that called it.
    """
    weights_type = _output_type(weights_dtype)
    leaves, structure = jax.tree.flatten(params)
    types = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.result_type(leaf) != jnp.float32:
            name = f"params{jax.tree_util.keystr(path)}"
            raise ConfigError(f"{name} is {jnp.result_type(leaf)}; optimizers on reducers take float32 parameters")
    state = jax.eval_shape(tx.init, jax.tree.unflatten(structure, types))

    def as_params(elements: Sequence[Any]) -> Any:
        shaped = [jnp.reshape(leaf, type_.shape) for leaf, type_ in zip(elements, types, strict=True)]
        return jax.tree.unflatten(structure, shaped)

    def step(gradients: Sequence[Any], weights: Sequence[Any], state: Any) -> Any:
        try:
            updates, state = tx.update(as_params(gradients), state, as_params(weights))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "this optimizer cannot run on reducers: its update() takes more than gradients, state and params, as "
                f"reducers have no extra arguments, such as value=..., to give; or it fails by itself: {error}"
            ) from error
        return jax.tree.leaves(optax.apply_updates(as_params(weights), updates)), state

    # With an axis each, so that the element of a leaf without one is not taken for a number that all elements share.
    elements = [jax.ShapeDtypeStruct(type_.shape or (1,), type_.dtype) for type_ in types]
    return _Lowering(Graph(jax.make_jaxpr(step)(elements, elements, state)), len(leaves), weights_type).update()


def _output_type(dtype: Any) -> OutputType:
    found = {np.dtype(np.float32): OutputType.F32, _BFLOAT16: OutputType.BF16}.get(np.dtype(dtype))
    if found is None:
        raise ConfigError(f"weights_dtype is {np.dtype(dtype)}; it can be float32 or bfloat16")
    return found


class _Lowering:
    """Collects what an ``Update`` consists of."""

    def __init__(self, graph: Graph, leaf_count: int, weights_type: OutputType) -> None:
        self._graph = graph
        self._leaf_count = leaf_count
        self._weights_type = weights_type
        self._next = dict(enumerate(graph.outputs[leaf_count:], 2 * leaf_count))  # of states, by their inputs
        self._homes = Homes(graph, leaf_count, self._next)
        self._states: defaultdict[Home, list[int]] = defaultdict(list)
        for number in self._next:
            self._states[self._homes[graph.inputs[number]]].append(number)
        self._check_homes()
        self._totals = {call: number for number, call in enumerate(self._needed_totals())}
        self._programs: dict[Program, int] = {}
        self._sent: dict[Value, int] = {}  # scalars of the workers
        self._derived: dict[Value, int] = {}
        self._derivations: list[Pass] = []

    def update(self) -> Update:
        """All of it."""
        leaves = tuple(self._leaf(number) for number in range(self._leaf_count))
        kept = self._states[WORKERS]
        sent, after = list(self._sent), [self._next[number] for number in kept]
        returned = [call for call in needed_calls(self._homes, TOTALS, after) if self._homes.is_total(call)]
        compute_scalars = self._computation([], sent)
        compute_states = self._computation([call.results[0] for call in returned], after)
        shapes = [self._graph.inputs[number].shape for number in kept]

        def scalars(states: Sequence[Any]) -> Any:
            found = [jnp.asarray(value, jnp.float32) for value in compute_scalars(states, [])]
            return jnp.stack(found) if found else jnp.zeros(0, jnp.float32)

        def advance(states: Sequence[Any], totals: Sequence[Any]) -> list[Any]:
            found = compute_states(states, totals)
            return [jnp.broadcast_to(value, shape) for value, shape in zip(found, shapes, strict=True)]

        return Update(
            tuple(self._programs),
            leaves,
            len(self._totals),
            tuple(self._derivations),
            tuple(number - 2 * self._leaf_count for number in kept),
            jax.jit(scalars),
            tuple(self._totals[call] for call in returned),
            jax.jit(advance),
        )

    def _check_homes(self) -> None:
        for number in self._next:
            state = self._graph.inputs[number]
            if self._homes[state] >= 0 and state.dtype not in _DTYPES:
                raise _refusal(self._next[number], f"keeps a state of {state.dtype} for each element")
        if any(self._homes[value] == NOWHERE for value in self._graph.outputs):
            culprits = (call for call in self._graph.calls if self._homes[call.results[0]] == NOWHERE)
            culprit = next(culprits)
            raise _refusal(culprit.results[0], f"calls {culprit.name}, which combines elements of several tensors")

    def _outputs(self, leaf: int) -> list[tuple[Value, OutputType]]:
        """The weights, the states, and the weights for the workers if those are of another type."""
        weights = self._graph.outputs[leaf]
        outputs = [(weights, OutputType.F32), *((self._next[i], OutputType.F32) for i in self._states[leaf])]
        return outputs if self._weights_type == OutputType.F32 else [*outputs, (weights, self._weights_type)]

    def _needed_totals(self) -> list[Call]:
        """The sums that weights and states depend on, in order."""
        found: set[Call] = set()
        waiting = [value for leaf in range(self._leaf_count) for value, _ in self._outputs(leaf)]
        waiting += [self._next[number] for number in self._states[WORKERS]]
        while waiting:
            homes = {self._homes[value] for value in waiting}
            calls = [call for home in homes for call in needed_calls(self._homes, home, waiting)]
            scalars = [*waiting, *(operand for call in calls for operand in call.operands)]
            totals = {call for call in needed_calls(self._homes, TOTALS, scalars) if self._homes.is_total(call)}
            for call in totals:
                if call.results[0].shape != ():
                    raise _refusal(call.results[0], f"calls {SUM} over some axes, and programs add up whole tensors")
            waiting = [call.operands[0] for call in totals - found]
            found |= totals
        return in_order(found)

    def _leaf(self, leaf: int) -> Leaf:
        inputs = [leaf, self._leaf_count + leaf, *self._states[leaf]]
        sums = [call for call in self._totals if self._homes[call.operands[0]] == leaf]
        passes = []
        for stage in sorted({call.sums for call in sums}):
            passes.append(self._pass(leaf, inputs, [call for call in sums if call.sums == stage], []))
        passes.append(self._pass(leaf, inputs, [], self._outputs(leaf)))
        return Leaf(tuple(number - 2 * self._leaf_count for number in inputs[2:]), tuple(passes))

    def _pass(
        self, home: int, inputs: Sequence[int], sums: Sequence[Call], outputs: Sequence[tuple[Value, OutputType]]
    ) -> Pass:
        """A pass that computes values of one home: what is summed, and what is written."""
        assembly = Assembly(len(inputs))
        operands: dict[Value, Operand] = {self._graph.inputs[n]: assembly.input(i) for i, n in enumerate(inputs)}
        scalars: dict[Source, Operand] = {}

        def scalar(source: Source) -> Operand:
            if source not in scalars:
                scalars[source] = assembly.scalar()
            return scalars[source]

        def operand_of(value: Value) -> Operand:
            return operands[value] if value in operands else scalar(self._source(value))

        writer = Writer(assembly, lambda value: scalar(Source.of_constant(value)))
        wanted = [*(call.operands[0] for call in sums), *(value for value, _ in outputs)]
        for call in needed_calls(self._homes, home, wanted):
            if call not in self._totals:
                operands[call.results[0]] = _write(writer, call, [operand_of(value) for value in call.operands])
        summands = [operand_of(call.operands[0]) for call in sums]
        written = [(_as_kept(assembly, value, operand_of(value)), type_) for value, type_ in outputs]
        program = assembly.program(summands, written)
        if not program.is_small:
            raise _refusal(outputs[0][0] if outputs else sums[0].results[0], "needs a program that is too large")
        number = self._programs.setdefault(program, len(self._programs))
        level = max((call.sums for call in sums), default=0)
        return Pass(number, tuple(scalars), tuple(self._totals[call] for call in sums), level)

    def _source(self, value: Value) -> Source:
        """Where a program gets what is the same for all elements."""
        self._check_scalars(value)
        if value.shape != ():
            made = f"that {value.call.name} makes" if isinstance(value, Result) else "that it was given"
            raise _refusal(value, f"uses an array {made}, which does not depend on gradients and parameters alone")
        if isinstance(value, Constant):
            return Source.of_constant(value.value)
        if self._homes[value] == WORKERS:
            return Source(Origin.WORKERS, self._sent.setdefault(value, len(self._sent)))
        assert isinstance(value, Result)
        if value.call in self._totals:
            return Source(Origin.TOTAL, self._totals[value.call])
        if value not in self._derived:
            self._derivations.append(self._pass(TOTALS, [], [], [(value, OutputType.F32)]))
            self._derived[value] = len(self._derived)
        return Source(Origin.DERIVED, self._derived[value])

    def _check_scalars(self, value: Value) -> None:
        """Refuses what is computed of sums by a primitive that needs all of a small array, such as a sort."""
        for call in needed_calls(self._homes, TOTALS, [value]):
            if not (self._homes.is_total(call) or call.name in RULES or call.name in MOVES):
                raise _refusal(call.results[0], f"calls {call.name}, which no program can do")

    def _computation(
        self, given: Sequence[Value], wanted: Sequence[Value]
    ) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
        """A function of JAX's from the workers' states and given values to what is wanted."""
        calls = set(needed_calls(self._homes, TOTALS, wanted)) - set(self._totals)
        before = [*wanted, *(operand for call in calls for operand in call.operands)]
        calls |= set(needed_calls(self._homes, WORKERS, before))
        inputs = [self._graph.inputs[number] for number in self._states[WORKERS]]

        def compute(states: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
            known: dict[Value, Any] = dict(zip(inputs, states, strict=True))
            known |= {value: jnp.asarray(numbers[i], value.dtype) for i, value in enumerate(given)}

            def read(value: Value) -> Any:
                return value.value if isinstance(value, Constant) else known[value]

            for call in in_order(calls):
                operands = [read(value) for value in call.operands]
                if call.name in ELEMENTWISE:
                    operands = [jnp.broadcast_to(operand, call.results[0].shape) for operand in operands]
                known |= zip(call.results, bind(call.primitive, call.params, operands), strict=True)
            return [read(value) for value in wanted]

        return compute


def _write(writer: Writer, call: Call, operands: Sequence[Operand]) -> Operand:
    """Add what a call computes to a program."""
    result = call.results[0]
    if call.name not in RULES or (call.name == "select_n" and len(operands) != 3):
        raise _refusal(result, f"calls {call.name}, which no program can do")
    is_count = call.name == "convert_element_type" and call.operands[0].dtype == bool
    if result.dtype not in _DTYPES and not is_count:
        raise _refusal(result, f"calls {call.name} and computes with {result.dtype}; programs compute with float32")
    return RULES[call.name](writer, operands, call.params)


def _as_kept(assembly: Assembly, value: Value, operand: Operand) -> Operand:
    """bfloat16 is rounded where it is kept, and computed in float32 up to there: so does XLA in a jitted function."""
    return assembly.emit(Opcode.ROUND_BF16, operand) if value.dtype == _BFLOAT16 else operand


def _refusal(value: Value, what: str) -> ConfigError:
    source = value.call.source if isinstance(value, Result) else "it"
    return ConfigError(f"this optimizer cannot run on reducers: {source} {what}")
