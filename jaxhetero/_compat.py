"""The only importer of what JAX does not promise to keep, each piece with its reason."""

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

    Private because ``jax.distributed`` offers no way to read the address it was given or found.
    """
    return distributed.global_state.coordinator_address or ""


def distributed_publish(key: str, value: str) -> None:
    """Set a key that every process of ``jax.distributed`` can read. Private: the key-value store has no public face."""
    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    client.key_value_set(key, value)


def distributed_read(key: str, timeout_ms: int) -> str:
    """Wait for a key of ``distributed_publish``."""
    client = distributed.global_state.client
    assert client is not None, "jax.distributed is not initialized"
    return str(client.blocking_key_value_get(key, timeout_ms))


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes that a value under ``jax.shard_map`` varies over.

    The attribute changed its name between JAX 0.9 (``vma``) and 0.10 (``mat.varying``).
    """
    return frozenset(aval.mat.varying)


def without_varying_axis(aval: Any, axis_name: str) -> Any:
    """``aval`` as it is once it is the same all along ``axis_name``; private for the same reason."""
    kept = varying_axes(aval) - {axis_name}
    return aval.update(manual_axis_type=aval.mat.update(varying=kept))


def program_mesh(context: mlir.LoweringRuleContext) -> Mesh | AbstractMesh | None:
    """The mesh of the ``jax.shard_map`` that is lowered here; None outside.

    ``LoweringRuleContext`` is public, what ``axis_context`` holds is not.
    """
    mesh = getattr(context.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, (Mesh, AbstractMesh)) else None


def program_device_count(context: mlir.LoweringRuleContext) -> int:
    """How many devices an instruction that is lowered here would be cut over by XLA: one inside shard_map.

    Private for the same reason: a program's device count outside shard_map, the mesh and its manual axes inside.
    """
    axis_context = context.module_context.axis_context
    if isinstance(axis_context, mlir.ShardingContext):
        return axis_context.num_devices
    return math.prod(size for name, size in axis_context.mesh.shape.items() if name not in axis_context.manual_axes)


def register_lowering(primitive: Primitive, rule: Callable[..., Any], platform: str | None = None) -> None:
    """As ``mlir.register_lowering``, with the operands as they stand in the program, for ``is_computed``.

    ``cacheable`` is to go one day; a rule that may be cached sees only arguments of a function that JAX makes for it.
    """
    mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)


def is_computed(operand: Any) -> bool:
    """Whether the function that is lowered computes the ``ir.Value``; else it is an argument, maybe in another shape.

    Private because jaxlib's MLIR bindings are.
    """
    if isinstance(operand, ir.BlockArgument):
        return False
    operation = operand.owner
    return is_computed(operation.operands[0]) if operation.name == "stablehlo.reshape" else True


def operation_name(context: mlir.LoweringRuleContext, name: str) -> ir.Location:
    """For a ``with`` block: XLA calls the operations that are lowered in it ``name``, and so does a profile.

    Private because jaxlib's MLIR bindings are; a ``jax.named_scope`` does not reach a profile of the CPU.
    """
    return ir.Location.name(f"{context.name_stack}/{name}", childLoc=ir.Location.current)


def partly_reduced_axes(aval: Any) -> frozenset[str]:
    """The axes over which a value's type is "unreduced" or "reduced"; private as those of ``varying_axes``."""
    return frozenset(aval.mat.unreduced) | frozenset(aval.mat.reduced)
