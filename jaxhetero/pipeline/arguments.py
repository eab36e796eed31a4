"""The arguments of a loss: which are its leaves, and what each microbatch gets of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero.errors import ConfigError
from jaxhetero.pipeline.graph import Graph, trace
from jaxhetero.pipeline.layout import Layout
from jaxhetero.pipeline.operations import Roles
from jaxhetero.pipeline.stacked import Span, split_leaves


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Of an array, a number or a shape."""
    if not hasattr(leaf, "shape"):
        leaf = np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))


def _shape_in(argnum: int, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    """Of a leaf of an argument."""
    shape = shape_of(leaf)
    if getattr(shape.dtype, "kind", "V") in "OSU":  # objects and texts of NumPy
        raise ConfigError(
            f"pipeline: {jax.tree_util.keystr(path)} of argument {argnum} is a {type(leaf).__name__} and no array; let "
            "the loss close over it, and give the arrays alone, with None in its place: Equinox has eqx.partition and "
            "eqx.combine for this"
        )
    return shape


@dataclass(frozen=True)
class Signature:
    """How the arguments after the parameters are given.

    Attributes:
      whole_argnums: those that every microbatch gets as they are.
      state_argnum: the one that each microbatch changes for the next one.
      has_aux: whether the loss comes with something else.
    """

    whole_argnums: tuple[int, ...]
    state_argnum: int | None
    has_aux: bool

    def is_batch(self, argnum: int) -> bool:
        """Whether each microbatch gets its part of an argument."""
        return argnum not in (0, self.state_argnum, *self.whole_argnums)


@dataclass(frozen=True, eq=False)
class TracedLoss:
    """A loss, traced for the shapes of one microbatch.

    Attributes:
      graph: its equations.
      roles: what its inputs and outputs are.
      layouts: of each argument.
      aux_tree: the structure of what comes with the loss, without the state.
      names: of the leaves of the parameters, for people.
      spans: which parameters are rows of a leaf, by their numbers.
    """

    graph: Graph
    roles: Roles
    layouts: tuple[Layout, ...]
    aux_tree: Any
    names: tuple[str, ...]
    spans: dict[int, Span]


def trace_loss(
    loss: Callable[..., Any], signature: Signature, microbatches: int, scan_parts: int, arguments: Sequence[Any]
) -> TracedLoss:
    """Trace the loss of one microbatch; ``arguments`` are arrays or shapes of whole batches.

    Raises:
      ConfigError: the arguments or the results are not what the signature says.
    """
    shapes = []
    for argnum, argument in enumerate(arguments):
        own = jax.tree_util.tree_map_with_path(functools.partial(_shape_in, argnum), argument)
        shapes.append(_microbatch(own, argnum, microbatches) if signature.is_batch(argnum) else own)
    trees: dict[str, Any] = {}

    def flat(*traced: Any) -> list[Any]:
        aux, state = _unpack(loss(*traced), signature, trees)
        return [trees.pop("loss"), *aux, *state]

    whole = trace(flat, *shapes, scan_parts=scan_parts)
    counts = [len(jax.tree.leaves(shape)) for shape in shapes]
    starts = [sum(counts[:argnum]) for argnum in range(len(counts))]
    numbers = [tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    aux_count = trees["aux"].num_leaves
    state = () if signature.state_argnum is None else numbers[signature.state_argnum]
    graph, spans = split_leaves(whole, numbers[0])
    split = {span.leaf for span in spans.values()}
    roles = Roles(
        params=(*(leaf for leaf in numbers[0] if leaf not in split), *spans),
        whole=tuple(number for argnum in signature.whole_argnums for number in numbers[argnum]),
        batch=tuple(number for argnum, group in enumerate(numbers) if signature.is_batch(argnum) for number in group),
        state=state,
        aux_outputs=tuple(range(1, 1 + aux_count)),
        state_outputs=tuple(range(1 + aux_count, 1 + aux_count + len(state))),
    )
    paths = jax.tree_util.tree_leaves_with_path(shapes[0])
    names = tuple(jax.tree_util.keystr(path) for path, _ in paths)
    traced = TracedLoss(graph, roles, tuple(map(Layout.of, shapes)), trees["aux"], names, spans)
    _check(traced, signature)
    return traced


def _unpack(results: Any, signature: Signature, trees: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The leaves of what comes with the loss, and of the state."""
    has_more = signature.has_aux or signature.state_argnum is not None
    if has_more and not (isinstance(results, tuple) and len(results) == 2):
        raise ConfigError("pipeline: the loss must return a pair (loss, aux), because has_aux or state_argnum is given")
    more: Any
    trees["loss"], more = results if has_more else (results, None)
    if getattr(trees["loss"], "shape", ()) != ():
        raise ConfigError(f"pipeline: the loss must be a scalar; its shape is {trees['loss'].shape}")
    state: Any = None
    if signature.state_argnum is not None:
        if signature.has_aux and not (isinstance(more, tuple) and len(more) == 2):
            raise ConfigError("pipeline: with has_aux and state_argnum, the loss must return (loss, (aux, state))")
        more, state = more if signature.has_aux else (None, more)
    trees["aux"] = jax.tree.structure(more)
    trees["state"] = jax.tree.structure(state)
    return jax.tree.leaves(more), jax.tree.leaves(state)


def _check(traced: TracedLoss, signature: Signature) -> None:
    graph, roles = traced.graph, traced.roles
    for name, value in zip(traced.names, graph.inputs, strict=False):
        if not value.is_float:
            raise ConfigError(
                f"pipeline: the parameter {name} is {value.aval.str_short()}, which has no gradient; "
                "give it in another argument"
            )
    if not graph.outputs[0].is_float:
        raise ConfigError(f"pipeline: the loss is {graph.outputs[0].aval.str_short()}; it must be floating point")
    if len(roles.state) != len(graph.outputs) - 1 - len(roles.aux_outputs):
        raise ConfigError(
            f"pipeline: argument {signature.state_argnum} is the state, with {len(roles.state)} leaves, and the loss "
            f"returns a state with {len(graph.outputs) - 1 - len(roles.aux_outputs)}"
        )
    for before, after in zip(roles.state, roles.state_outputs, strict=True):
        old, new = graph.inputs[before].aval, graph.outputs[after].aval
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ConfigError(
                f"pipeline: the loss gets a state of {old.str_short()} and returns {new.str_short()} for it; a state "
                "keeps its shape and its dtype"
            )
    for number in roles.aux_outputs:
        dtype = graph.outputs[number].aval.dtype
        if not jnp.issubdtype(dtype, jnp.number):
            raise ConfigError(f"pipeline: what comes with the loss must be numbers, which can be added; one is {dtype}")


def _microbatch(shapes: Any, argnum: int, microbatches: int) -> Any:
    """The shapes of one microbatch."""

    def part(path: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = f"{jax.tree_util.keystr(path)} of argument {argnum}"
        if not shape.shape:
            raise ConfigError(
                f"pipeline: {name} has no leading axis to be divided into microbatches; list the argument in "
                "whole_argnums if all of them get it as it is"
            )
        if shape.shape[0] % microbatches:
            raise ConfigError(
                f"pipeline: {name} has a leading axis of {shape.shape[0]}, which is no multiple of {microbatches} "
                "microbatches"
            )
        return jax.ShapeDtypeStruct((shape.shape[0] // microbatches, *shape.shape[1:]), shape.dtype)

    return jax.tree_util.tree_map_with_path(part, shapes)


class Splitter:
    """Divides the arrays of a batch into microbatches along their first axis."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._jitted = jax.jit(lambda arrays: [self._parts(array) for array in arrays])

    def split(self, arrays: Mapping[int, Any]) -> list[dict[int, Any]]:
        """For each microbatch its arrays, by the same numbers. Arrays of NumPy are not copied."""
        on_host = {number: array for number, array in arrays.items() if isinstance(array, np.ndarray)}
        on_device = {number: array for number, array in arrays.items() if number not in on_host}
        parts = {number: self._parts(array) for number, array in on_host.items()}
        if on_device:
            parts.update(zip(on_device, self._jitted(list(on_device.values())), strict=True))
        return [{number: parts[number][index] for number in arrays} for index in range(self._microbatches)]

    def _parts(self, array: Any) -> list[Any]:
        size = array.shape[0] // self._microbatches
        return [array[index * size : (index + 1) * size] for index in range(self._microbatches)]
