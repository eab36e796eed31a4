"""The only module that uses names which JAX does not promise to keep, each with its reason and its versions of JAX.

"Since 0.10" means: written for JAX 0.10, the oldest release that jaxhetero accepts (0.10.2). Every entry was last
checked with JAX 0.10.2 and 0.12.0. When a later JAX changes one, tests of the collectives fail, and the fix is here.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import core, distributed, effects, linear_util, pjit, shard_map, source_info_util, tree, tree_util
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo


def distributed_place() -> tuple[int, int]:
    """The number of this process in ``jax.distributed``, and how many processes there are.

    Why: ``jax.process_count()`` asks the backend, which has to be made for it, and one that knows nothing of
    ``jax.distributed`` has one process. Since 0.10, until ``jax.distributed`` tells.
    """
    state = distributed.global_state
    return int(state.process_id or 0), int(state.num_processes or 1)


def distributed_coordinator() -> str:
    """``host:port`` of JAX's own coordination service, which process 0 runs.

    Why: ``jax.distributed`` has no public way to read the address that it was given or has found. Since 0.10, until
    ``jax.distributed`` has one.
    """
    return distributed.global_state.coordinator_address or ""


def distributed_publish(key: str, value: str) -> None:
    """Set a key that every process of ``jax.distributed`` can read.

    Why: the key-value store has no public interface. Since 0.10, until it has one.
    """
    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    client.key_value_set(key, value)


def distributed_read(key: str, timeout_ms: int) -> str:
    """Wait for a key of ``distributed_publish``. Why and since: as there."""
    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    return str(client.blocking_key_value_get(key, timeout_ms))


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes that a value under ``jax.shard_map`` varies over.

    Why: there is no public name for them, and the attribute has changed its name. Until 0.9 it was ``vma``; since 0.10
    it is ``mat.varying``.
    """
    return frozenset(aval.mat.varying)


def without_varying_axis(aval: Any, axis_name: str) -> Any:
    """The type of a value like ``aval`` that no longer varies over ``axis_name``. Why, since: ``varying_axes``."""
    kept = varying_axes(aval) - {axis_name}
    return aval.update(manual_axis_type=aval.mat.update(varying=kept))


def program_mesh(context: mlir.LoweringRuleContext) -> Mesh | AbstractMesh | None:
    """The mesh of the ``jax.shard_map`` that is lowered here; None outside.

    Why: ``LoweringRuleContext`` is public, but the attributes of its ``axis_context`` are not. Since 0.10.
    """
    mesh = getattr(context.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, (Mesh, AbstractMesh)) else None


def program_device_count(context: mlir.LoweringRuleContext) -> int:
    """Over how many devices XLA would partition an instruction that is lowered here: one inside shard_map.

    Why and since: as ``program_mesh``. The ``axis_context`` has the program's device count outside shard_map, and the
    mesh and its manual axes inside.
    """
    axis_context = context.module_context.axis_context
    if isinstance(axis_context, mlir.ShardingContext):
        return axis_context.num_devices
    return math.prod(size for name, size in axis_context.mesh.shape.items() if name not in axis_context.manual_axes)


def place_in_program(context: mlir.LoweringRuleContext, key: Hashable) -> int:
    """How-manyth call of this ``key`` in the program is lowered here, from 1; whatever its other calls are.

    Each call in the program that runs has a place of its own. JAX lowers a function that a program calls twice only
    once, and XLA would have two copies of each call in it, which it may order as it likes.

    Why: ``module_context`` is not public. It is another one inside ``jax.shard_map``, with the same ``lowering_cache``.
    Since 0.10.
    """
    lowered = context.module_context.lowering_cache
    assert isinstance(lowered, _Lowered), "jaxhetero was imported while JAX lowered a program"
    return lowered.calls.place_of(key)


class _Calls:
    """The calls of one program that have been lowered."""

    def __init__(self) -> None:
        self.count = 0
        self._places: Counter[Hashable] = Counter()

    def place_of(self, key: Hashable) -> int:
        self.count += 1
        self._places[key] += 1
        return self._places[key]


class _Lowered(dict[Any, Any]):
    """The functions that JAX has lowered for a program and will not lower again; but none that has a call of ours.

    Why: JAX has no other way to have a function lowered each time that a program calls it. JAX looks a function up, and
    sets it once it is lowered. Since 0.10, where ``ModuleContext`` has two such dicts, ``lowering_cache`` and
    ``cached_primitive_lowerings``.
    """

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self.calls = calls
        self._earlier: dict[Any, int] = {}  # how many calls there were, of the functions that are being lowered

    def __missing__(self, key: Any) -> Any:
        self._earlier[key] = self.calls.count
        raise KeyError(key)

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __setitem__(self, key: Any, function: Any) -> None:
        if self._earlier.pop(key, None) == self.calls.count:
            super().__setitem__(key, function)


def _count_calls_in_programs() -> None:
    """Have each program that JAX lowers keep its functions in ``_Lowered``. Why and since: as there."""
    make = mlir.ModuleContext.__init__

    @functools.wraps(make)
    def make_with_calls(self: Any, **fields: Any) -> None:
        if fields.get("lowering_cache") is None:
            calls = _Calls()
            fields |= {"lowering_cache": _Lowered(calls), "cached_primitive_lowerings": _Lowered(calls)}
        make(self, **fields)

    mlir.ModuleContext.__init__ = make_with_calls  # type: ignore[method-assign]


_count_calls_in_programs()


def register_lowering(primitive: Primitive, rule: Callable[..., Any], platform: str | None = None) -> None:
    """As ``mlir.register_lowering``, but the rule sees the operands of the program itself, as ``is_computed`` needs.

    Why: JAX lowers a cacheable rule as a function of its own, and the rule then sees that function's arguments. JAX
    plans to remove the argument ``cacheable``. Since 0.10, until then.
    """
    mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)


def lower_on_gpu_stream(
    context: mlir.LoweringRuleContext, number: int, rule: Callable[..., Any], *operands: Any
) -> Any:
    """Lower what ``rule`` makes of the operands, one value, as a call on another stream of a GPU than what is around.

    Why: of the public ways, ``jax.experimental.compute_on`` took a block until 0.11.0 and takes a function since
    0.11.1, which then says of each result in which memory it is. Since 0.10, until there is one way.
    """
    types = [operand.type for operand in operands]
    make_function: Any = func.FuncOp  # whose stub has the arguments of the generated class below it
    function = make_function(_ON_GPU_STREAM, (types, []), visibility="private", ip=context.module_context.ip)
    context.module_context.symbol_table.insert(function)
    block = function.add_entry_block()
    with ir.InsertionPoint(block):
        result = rule(*block.arguments)
        func.ReturnOp([result])
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, [result.type]))
    call = func.CallOp([result.type], ir.FlatSymbolRefAttr.get(function.name.value), operands)
    marks = {"_xla_stream_annotation": str(number), "inlineable": "false"}
    call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {name: ir.StringAttr.get(value) for name, value in marks.items()}
    )
    return call.result


def lower_to_barrier(values: Sequence[Any]) -> list[Any]:
    """Lower to the same values behind a barrier: XLA uses none of them before all of them are there.

    What was cut out of a result of ``lower_on_gpu_stream`` is cut out again behind the barrier, where XLA does it as
    part of the use. In front of the barrier it would be a use of the call, and a copy. Why and since: as
    ``is_computed``.
    """
    origins = [_origin(value) for value in values]
    sources = list(dict.fromkeys(source for source, _ in origins))
    if len(sources) < 2:
        return list(values)
    passed = dict(zip(sources, stablehlo.OptimizationBarrierOp(sources).results, strict=True))
    return [_repeat(operations, passed[source]) for source, operations in origins]


_ON_GPU_STREAM = "jaxhetero_on_gpu_stream"
_OF_FIRST_OPERAND = [f"stablehlo.{name}" for name in ("slice", "reshape", "convert", "divide")]


def _origin(value: Any) -> tuple[Any, list[Any]]:
    """The result of ``lower_on_gpu_stream`` that ``value`` was made of, and by which operations; else the value."""
    source = value
    operations: list[Any] = []
    while not isinstance(source, ir.BlockArgument):
        operation = source.owner
        if operation.name in _OF_FIRST_OPERAND:
            operations.insert(0, operation)
            source = operation.operands[0]
        elif operation.name == "stablehlo.optimization_barrier":
            source = operation.operands[ir.OpResult(source).result_number]
        elif operation.name == "func.call" and operation.attributes["callee"].value.startswith(_ON_GPU_STREAM):
            return source, operations
        else:
            break
    return value, []


def _repeat(operations: Sequence[Any], value: Any) -> Any:
    for operation in operations:
        copy = operation.clone()
        copy.operands[0] = value
        value = copy.results[0]
    return value


def is_computed(operand: Any) -> bool:
    """Whether the function that is lowered computes the ``ir.Value``; else it is an argument, maybe in another shape.

    Why: jaxlib's MLIR bindings are private. Since 0.10.
    """
    if isinstance(operand, ir.BlockArgument):
        return False
    operation = operand.owner
    return is_computed(operation.operands[0]) if operation.name == "stablehlo.reshape" else True


def operation_name(context: mlir.LoweringRuleContext, name: str) -> ir.Location:
    """For a ``with`` block: XLA and its profiles use ``name`` for the operations that are lowered in the block.

    Why: a ``jax.named_scope`` does not reach a profile of the CPU, and jaxlib's MLIR bindings are private. Since 0.10.
    """
    return ir.Location.name(f"{context.name_stack}/{name}", childLoc=ir.Location.current)


def unreduced_axes(aval: Any) -> frozenset[str]:
    """The manual axes over which a value is the sum of what the devices have. Why and since: as ``varying_axes``."""
    return frozenset(aval.mat.unreduced) if _adds_up(aval.mat) else frozenset()


def partly_reduced_axes(aval: Any) -> frozenset[str]:
    """The manual axes over which a type is "unreduced", in any way, or "reduced". Why, since: as ``varying_axes``."""
    return frozenset(aval.mat.unreduced) | frozenset(aval.mat.reduced)


def summable_axes(leaf: Any) -> frozenset[str]:
    """The mesh axes over which a global array, outside ``jax.shard_map``, is the sum of what the devices have.

    Why: that a type has a sharding is documented, but not its attribute ``spec.unreduced``. Since 0.10.
    """
    spec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", None)
    unreduced = frozenset(getattr(spec, "unreduced", ()))
    return unreduced if unreduced and _adds_up(spec) else frozenset()


def _adds_up(type_: Any) -> bool:
    """Since 0.12 what is unreduced may also wait for a maximum or a minimum."""
    return str(getattr(type_, "unreduced_kind", None) or "sum").endswith("sum")


def varying_instead_of_unreduced(aval: Any, axes: frozenset[str]) -> Any:
    """The type of a value that varies over ``axes``, where ``aval`` is unreduced. Why, since: ``varying_axes``."""
    left = frozenset(aval.mat.unreduced) - axes
    kind = {} if left or not hasattr(aval.mat, "unreduced_kind") else {"unreduced_kind": None}
    return aval.update(manual_axis_type=aval.mat.update(varying=varying_axes(aval) | axes, unreduced=left, **kind))


# --- Programs that JAX has traced, its jaxprs, for jaxhetero.offload. Why: how to run, take apart and put together a
# jaxpr has no public interface, although jax.extend.core has the classes. Since 0.10, where a jaxpr with values for its
# constants is a ClosedJaxpr. In 0.12 both are a Jaxpr; the attributes that are used here are the same.

Equation = JaxprEqn

# The names of the primitives of jax.lax that send something along an axis, and axis_index. No version has all of them.
_SYNCHRONOUS = """
    psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter axis_index ppermute all_to_all
    ragged_all_to_all pbroadcast pbroadcast_dynamic psend precv unreduced_psum unreduced_reduce_scatter unreduced_pmax
    unreduced_pmin all_gather_reduced
"""
COLLECTIVES = frozenset(_SYNCHRONOUS.split()) | {f"{name}_start" for name in _SYNCHRONOUS.split()}


def inner_programs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among the parameters of an equation, for example the body of a scan."""
    found: list[Any] = []

    def note(program: Any) -> Any:
        found.append(program)
        return program

    with_inner_programs(params, note)
    return found


def with_inner_programs(value: Any, change: Callable[[Any], Any], done: dict[int, Any] | None = None) -> Any:
    """``value`` with each jaxpr in it changed; what has none, or an unchanged one, stays the same object.

    A library keeps its jaxprs where it likes: in containers, named tuples, dataclasses and objects of its own.

    Args:
      value: the parameters of an equation, or a part of them.
      change: gives what takes the place of a jaxpr.
      done: what has become of the parts before this one, by their ids. Objects may hold each other.

    Raises:
      TypeError: a jaxpr that would change is in a function.
    """
    done = {} if done is None else done
    if isinstance(value, _PLAIN):
        return value
    if hasattr(value, "eqns"):
        return change(value)
    if id(value) not in done:
        done[id(value)] = value
        parts, put_together = _taken_apart(value)
        changed = [with_inner_programs(part, change, done) for part in parts]
        if not all(map(operator.is_, changed, parts)):
            done[id(value)] = put_together(changed)
    return done[id(value)]


_PLAIN = (str, bytes, int, float, complex, type(None), type, np.ndarray, np.dtype, jax.Array)


def _taken_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The parts of a parameter, and what makes another one of other parts. JAX has its jaxprs in the open."""
    if isinstance(value, (tuple, list)):
        return list(value), getattr(value, "_make", type(value))
    if isinstance(value, functools.partial):
        return [value.args, value.keywords], lambda changed: type(value)(value.func, *changed[0], **changed[1])
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    is_foreign = module.partition(".")[0] not in ("jax", "jaxlib", "numpy", "builtins")
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if is_foreign], _refuse_function
    is_data = is_foreign and (dataclasses.is_dataclass(value) or not callable(value))
    attributes = _attributes(value) if is_data else {}
    entries = dict(value) if isinstance(value, dict) else {}

    def put_together(changed: list[Any]) -> Any:
        made = copy.copy(value)
        for name, part in zip(attributes, changed, strict=False):
            object.__setattr__(made, name, part)
        if entries:
            dict.update(made, zip(entries, changed[len(attributes) :], strict=True))
        return made

    return [*attributes.values(), *entries.values()], put_together


def _refuse_function(_: list[Any]) -> Any:
    raise TypeError("its program is kept by a Python function")


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds, in its dictionary or in slots."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    in_slots = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **in_slots}


def expansion(equation: Equation) -> Callable[..., Any] | None:
    """What a primitive does that has its program in an object, and shows it when it is compiled; else None.

    Why: JAX's "hijax" primitives are new, and not public. Since 0.10.
    """
    primitive, atoms = equation.primitive, (*equation.invars, *equation.outvars)
    if not primitive.is_high(*(atom.aval for atom in equation.invars), **equation.params):
        return None
    if any(atom.aval.is_high for atom in atoms) or inner_programs(equation.params):
        return None
    return functools.partial(primitive.to_lojax, **equation.params)


def retrace(program: Any, function: Callable[..., Sequence[Any]]) -> Any:
    """A jaxpr of ``function`` for arguments of the types of those of ``program``, to take the place of ``program``."""
    types = [variable.aval for variable in program.invars]
    traced = jax.make_jaxpr(function)(*types)
    if traced.consts and not getattr(program, "consts", ()):
        # There may be no place for constants in this jaxpr. There is one in that of a jitted function inside.
        traced = jax.make_jaxpr(jax.jit(function))(*types)
    return traced if hasattr(program, "consts") else traced.jaxpr


@contextlib.contextmanager
def equation_context(equation: Equation) -> Iterator[None]:
    """The mesh, the names and the place in the source with which JAX traced an equation."""
    stack = source_info_util.current_name_stack() + equation.source_info.name_stack
    with source_info_util.user_context(equation.source_info.traceback, name_stack=stack), equation.ctx.manager:
        yield


def bind(primitive: Primitive, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """The results of a primitive in the trace of the caller."""
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def run_equation(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation in the trace of the caller."""
    return bind(equation.primitive, equation.params, operands)


def has_rules(equation: Equation) -> bool:
    """Whether an equation holds functions of the user's for transformations: derivatives, or what jax.vmap does."""
    return equation.primitive.name in ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def run_with_rules(
    equation: Equation, operands: Sequence[Any], change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[Any]:
    """As ``run_equation`` for one that ``has_rules``, with each of the rules changed. Why: as above."""
    primitive, params = equation.primitive, equation.primitive.get_bind_params(equation.params)
    if "rule" in params:
        params = {**params, "rule": change(params["rule"])}
    else:
        function, *rules = params["subfuns"]
        changed = [linear_util.wrap_init(change(rule.call_wrapped), debug_info=rule.debug_info) for rule in rules]
        params = {**params, "subfuns": (function, *changed)}
    return list(primitive.bind(*operands, **params))


_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def inlined_program(equation: Equation) -> Any | None:
    """The jaxpr of an equation that does nothing but run it; None for any other equation.

    Why: the names of primitives and of their parameters are not public. Since 0.10.
    """
    name = _INLINED.get(equation.primitive.name)
    return None if name is None else equation.params[name]


def mesh_axes(equation: Equation) -> tuple[str, ...]:
    """The axes of the mesh of a ``jax.shard_map``; none of any other equation. Why: as above."""
    return tuple(equation.params["mesh"].axis_names) if equation.primitive is shard_map.shard_map_p else ()


def scan_counts(equation: Equation) -> tuple[int, int]:
    """How many of the first operands of a scan are constants, and how many after them are carried.

    Why: as above. Until 0.11 they are numbers, in 0.12 the structure of the operands.
    """
    structure = equation.params.get("ft_in")
    if structure is None:
        return equation.params["num_consts"], equation.params["num_carry"]
    constants, carry, _ = structure.update(equation.invars).unpack()
    return len(list(constants)), len(list(carry))


def with_params(equation: Equation, **changed: Any) -> Equation:
    """The same equation with other parameters. Why: as above."""
    changed_equation: Equation = equation.replace(params={**equation.params, **changed})
    return changed_equation


def is_ordered(equation: Equation) -> bool:
    """Whether the effects of an equation must happen in the order of the program. Why: as above."""
    return bool(effects.ordered_effects.filter_in(equation.effects))


def equation_source(equation: Equation) -> str:
    """``train.py:train_step``, where the user's program made an equation."""
    frames = source_info_util.user_frames(equation.source_info.traceback)
    frame = next((frame for frame in frames if not _is_of_this_package(frame)), None)
    return source_name(frame.file_name, frame.function_name) if frame else "an unknown place"


_INPUT = re.compile(r"<?i?python-input-\d|.*/ipython-input-\d|.*/ipykernel_\d+/")


def source_name(file_name: str, function_name: str) -> str:
    """``train.py:train_step``; ``<input>:train_step`` in a notebook or a shell.

    An input is named without its number and its hash, which differ where a worker has run more inputs than the others.

    Why: no program promises what it calls the file of an input. IPython says ``<ipython-input-3-1a2b>``, Python since
    3.13 ``<python-input-3>``, Colab ``/tmp/ipython-input-3-1a2b.py``, Jupyter ``/tmp/ipykernel_17/1234.py``.
    """
    return f"{'<input>' if _INPUT.match(file_name) else Path(file_name).name}:{function_name}"


def _is_of_this_package(frame: Any) -> bool:
    return bool(frame.file_name.startswith(_PACKAGE_DIR))


_PACKAGE_DIR = f"{Path(__file__).parent}/"


def is_of_our_collectives(equation: Equation, scope: str) -> bool:
    """Whether one of our collectives made an equation, or something in a ``jax.named_scope`` of this name did."""
    frame = next(iter(source_info_util.user_frames(equation.source_info.traceback)), None)
    is_ours = frame is not None and frame.file_name.startswith(_OUR_COLLECTIVES)
    return is_ours or is_within(equation, scope)


_OUR_COLLECTIVES = f"{_PACKAGE_DIR}_collectives/"


def is_within(equation: Equation, scope: str) -> bool:
    """Whether an equation, or what JAX made it of, was made in a ``jax.named_scope`` of this name."""
    return scope in str(equation.source_info.name_stack)


def equation_functions(equation: Equation) -> list[str]:
    """The functions of the user's program, and of libraries, in which an equation was made; the innermost first."""
    return [frame.function_name for frame in source_info_util.user_frames(equation.source_info.traceback)]


def describe_flattener() -> str | None:
    """Who takes a node of a pytree apart, called in the node's ``tree_flatten``; None if JAX does so to carry it.

    JAX carries nodes in and out of functions. Out of a branch of ``lax.cond`` it carries those of ours alone: the other
    branch has to give such a node as well. And nobody computes with a structure that has no leaves.

    Why: JAX does not tell a node who asks, and its own files are told by their names. Since 0.10.
    """
    frames = _frames_from(2)
    asked = [frame.f_code.co_name for frame in itertools.takewhile(_is_of_trees, frames)]
    rest = frames[len(asked) :]
    passed = [frame.f_code.co_filename for frame in itertools.takewhile(_is_of_jax, rest)]
    callers = rest[len(passed) :]
    in_branch = any(name.endswith("conditionals.py") for name in passed)
    is_carried = (passed or not asked) and not (in_branch and _package(callers[0]) != __package__)
    if is_carried or "tree_structure" in asked or not callers:
        return None
    return _describe(callers) + (" in a branch of jax.lax.cond" if in_branch else "")


def describe_caller() -> str:
    """Who calls a method of ours, by an operator that JAX may have been asked for. Why and since: as above."""
    return _describe(list(itertools.dropwhile(_is_of_jax, _frames_from(2))))


def _describe(callers: Sequence[FrameType]) -> str:
    who = callers[0]
    user = next((frame for frame in callers if not _is_of_jax(frame) and _package(frame) != _package(who)), who)
    name = who.f_code.co_qualname.split(".<locals>.update")[0]
    return f"{name} ({_place(who)}; called from {_place(user)})"


def _frames_from(depth: int) -> list[FrameType]:
    """Of the functions that run, the innermost first: from the caller's caller on for a ``depth`` of 2."""
    frames = []
    frame = inspect.currentframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[1 + depth :]


def _is_of_trees(frame: FrameType) -> bool:
    return frame.f_code.co_filename in {tree.__file__, tree_util.__file__}


def _is_of_jax(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(str(Path(jax.__file__).parent))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_tracing() -> bool:
    """Whether the caller runs inside a function that JAX traces."""
    return not core.trace_state_clean()


class Interceptor(Protocol):
    """What ``intercept`` asks; equal ones share what JAX has traced and compiled."""

    def trace(self, trace: Callable[[], Any]) -> Any:
        """Call ``trace``, which has JAX trace a jitted function."""

    def lower(self, program: Any) -> Any:
        """The jaxpr that JAX shall lower and compile in the place of ``program``."""

    def map(self, function: Callable[..., Any], *shards: Any) -> Any:
        """Call ``function``, which a ``jax.shard_map`` or ``jax.pmap`` maps; for its result see ``with_values``."""

    def call(self, compiled: Any) -> None:
        """A program that was compiled ahead of time, a ``jax.stages.Compiled``, is about to be called."""


_intercepted: Any = jax.make_user_context(None)
_everywhere: list[Interceptor] = []
_everywhere_lock = threading.Lock()


def interceptor() -> Any:
    """Who intercepts in this thread; None for nobody."""
    return _intercepted.value


@contextlib.contextmanager
def intercept(interceptor: Interceptor) -> Iterator[None]:
    """Have ``interceptor`` asked about all programs that this thread traces, lowers or maps in this block.

    To everybody else JAX looks as outside of the block: nothing is traced. What was jitted before the block is traced
    anew, because JAX's caches know the interceptor.

    Why: there is no public way to change a program between JAX's tracing and lowering. Since 0.10.
    """
    with _patches, _intercepted(interceptor):
        yield


@contextlib.contextmanager
def intercept_everywhere(interceptor: Interceptor) -> Iterator[None]:
    """As ``intercept``, and in all threads that are in no block of their own."""

    def use_last() -> None:
        _intercepted.set_global(_everywhere[-1] if _everywhere else None)

    with intercept(interceptor):
        with _everywhere_lock:
            _everywhere.append(interceptor)
            use_last()
        try:
            yield
        finally:
            with _everywhere_lock:
                _everywhere.remove(interceptor)
                use_last()


_otherwise: dict[str, Interceptor] = {}


def intercept_otherwise(interceptor: Interceptor) -> None:
    """Have ``interceptor`` asked from now on where nobody intercepts. JAX's caches do not know that it is there."""
    if _otherwise.setdefault("interceptor", interceptor) is interceptor:
        _patches.__enter__()


class _Patches:
    """Functions of JAX that are others while somebody intercepts."""

    def __init__(self, *patches: tuple[Any, str, Callable[..., Any]]) -> None:
        self._patches = patches  # owner, name, and what is called with the original and its arguments
        self._originals: list[Any] = []
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._originals = [vars(owner).get(name) for owner, name, _ in self._patches]
                patched = [_patched(getattr(owner, name), patch) for owner, name, patch in self._patches]
                for (owner, name, _), function in zip(self._patches, patched, strict=True):
                    setattr(owner, name, function)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for (owner, name, _patch), original in zip(self._patches, self._originals, strict=True):
                if original is None:  # it was an attribute of the owner's class
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def _patched(original: Callable[..., Any], patch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        active = interceptor() or _otherwise.get("interceptor")
        return original(*args, **kwargs) if active is None else patch(active, original, *args, **kwargs)

    return call


def _trace(active: Interceptor, original: Callable[..., Any], *args: Any) -> Any:
    return active.trace(functools.partial(original, *args))


def _lower(active: Interceptor, original: Callable[..., Any], *args: Any, jaxpr: Any, **kwargs: Any) -> Any:
    return original(*args, jaxpr=active.lower(jaxpr), **kwargs)


def _bind_shard_map(active: Interceptor, original: Callable[..., Any], *args: Any, **params: Any) -> Any:
    (function,) = params["subfuns"]
    if function.__qualname__.startswith("_shard_map."):  # the user's, and not a derivative that JAX has made of it
        params["subfuns"] = (functools.partial(active.map, function),)
    return original(*args, **params)


def _call_compiled(active: Interceptor, original: Callable[..., Any], compiled: Any, *args: Any, **kwargs: Any) -> Any:
    active.call(compiled)
    return original(compiled, *args, **kwargs)


# A call of a jitted function and ``lower`` of one go through the first two of these, whoever has jitted it.
_patches = _Patches(
    (pjit, "_infer_params", _trace),
    (pjit, "_resolve_and_lower", _lower),
    (shard_map.shard_map_p, "bind", _bind_shard_map),
    (jax.stages.Compiled, "__call__", _call_compiled),
)


def with_values(result: Any, values: Sequence[Any]) -> Any:
    """What a function that ``jax.shard_map`` maps gives to JAX, with other values; the old ones are its items.

    Why: it is a ``FlatTree``, which is not public. Since 0.10.
    """
    return result.update(values)


def free_axes(program: Any) -> list[str]:
    """The named axes of a jaxpr that nothing in it maps. Why: effects are not public. Since 0.10."""
    return sorted(str(effect.name) for effect in program.effects if isinstance(effect, core.NamedAxisEffect))


def unbound_axis(error: NameError) -> str | None:
    """The axis that JAX says nothing maps; None if the error says something else.

    Why: only its text tells. Since 0.10.
    """
    found = re.search(r"unbound axis name: (.+?)(\. To fix this, .*)?$", str(error), re.DOTALL)
    return found and found[1]


def bound_axes() -> frozenset[str]:
    """The named axes that something maps where the caller is. Why: there is no public list. Since 0.10."""
    return frozenset(name for name in core.get_axis_env().axis_sizes if isinstance(name, str))


def bind_axis(name: str, size: int) -> contextlib.AbstractContextManager[None]:
    """For a ``with`` block in which functions are traced as if something mapped this axis.

    Why: ``jax.make_jaxpr`` can, ``jax.jit`` cannot. Since 0.10.
    """
    manager: contextlib.AbstractContextManager[None] = core.extend_axis_env_nd([(name, size), (_mark(name), 1)])
    return manager


def is_bound_here(name: str) -> bool:
    """Whether ``bind_axis`` binds the axis, and not a transformation of JAX's. Why and since: as there."""
    return _mark(name) in core.get_axis_env().axis_sizes


def _mark(name: str) -> Any:
    return "jaxhetero.offload", name
