"""The only module that uses names which JAX does not promise to keep, each with its reason and its versions of JAX.

"Since 0.10" means: written for JAX 0.10, the oldest release that jaxhetero accepts (0.10.2). Every entry was last
checked with JAX 0.10.2. When a later JAX changes one, tests of the collectives fail, and the fix is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax._src import distributed
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh
from jaxlib.mlir import ir


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


def new_channel(context: mlir.LoweringRuleContext) -> int:
    """A number that no other call in the program has that is lowered; the same one on every worker.

    Why: ``module_context`` is not public. JAX numbers its own collectives so. Since 0.10.
    """
    return int(context.module_context.new_channel())


def register_lowering(primitive: Primitive, rule: Callable[..., Any], platform: str | None = None) -> None:
    """As ``mlir.register_lowering``, but the rule sees the operands of the program itself, as ``is_computed`` needs.

    Why: JAX lowers a cacheable rule as a function of its own, and the rule then sees that function's arguments. JAX
    plans to remove the argument ``cacheable``. Since 0.10, until then.
    """
    mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)


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


def partly_reduced_axes(aval: Any) -> frozenset[str]:
    """The axes over which a value's type is "unreduced" or "reduced". Why and since: as ``varying_axes``."""
    return frozenset(aval.mat.unreduced) | frozenset(aval.mat.reduced)
