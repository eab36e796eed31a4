"""From primitives to the program that XLA compiles."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo


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
