"""The primitive behind every collective: one bucket in, one bucket out, one custom call in the compiled program."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxhetero import _ffi, world
from jaxhetero._compat import program_device_count, program_mesh, varying_axes, without_varying_axis
from jaxhetero._mesh import make_lanes
from jaxhetero.errors import ConfigError


class Kind(enum.IntEnum):
    """What a round does; the numbers are those of xla_ffi/wire.h."""

    SUM = 1
    BROADCAST = 2


_NO_LANES = np.zeros(0, np.int64)

all_reduce_p = Primitive("jaxhetero_psum")
all_reduce_p.multiple_results = True


def all_reduce(
    bucket: Sequence[jax.Array], *, label: str, kind: Kind, root: int, worker_count: int, axis_name: str | None
) -> list[jax.Array]:
    """Reduce one bucket over all workers.

    Args:
      bucket: arrays of one dtype.
      label: what messages and traces call this op; with the order of the compiled program it makes the op's number.
      kind: how contributions become a result.
      root: the rank whose contribution a broadcast takes, else 0.
      worker_count: how many workers the caller counted on; checked against the world when the program runs.
      axis_name: the mesh axis of the workers under ``jax.shard_map``, which the results no longer vary over; None where
        the mesh, if there is one, does not span workers.
    """
    outputs: list[jax.Array] = all_reduce_p.bind(
        *bucket, label=label, kind=kind, root=root, worker_count=worker_count, axis_name=axis_name
    )
    return outputs


@functools.partial(jax.jit, static_argnames=("label", "kind", "root", "worker_count", "axis_name"))
def _run_eagerly(*bucket: jax.Array, **params: Any) -> list[jax.Array]:
    outputs: list[jax.Array] = all_reduce_p.bind(*bucket, **params)
    return outputs


def _abstract_eval(*bucket: Any, axis_name: str | None, **_params: Any) -> list[Any]:
    results = [aval.update(weak_type=False) for aval in bucket]
    return results if axis_name is None else [without_varying_axis(aval, axis_name) for aval in results]


def _lowering(
    ctx: Any, *bucket: Any, label: str, kind: Kind, root: int, worker_count: int, axis_name: str | None
) -> Any:
    devices = program_device_count(ctx)
    if devices > 1:
        raise ConfigError(
            f"{label}: this program runs on {devices} devices, and XLA would gather the whole array on each of them "
            "before the call; use it inside jax.shard_map over all mesh axes, with the workers' axis as axis_name"
        )
    rule = jax.ffi.ffi_lowering(_ffi.ALL_REDUCE)
    mesh = program_mesh(ctx)
    ids, lanes = (_NO_LANES, _NO_LANES) if mesh is None else make_lanes(mesh, axis_name, label)
    return rule(
        ctx,
        *bucket,
        label=label,
        kind=np.int64(kind),
        root=np.int64(root),
        worker_count=np.int64(worker_count),
        device_ids=ids,
        device_lanes=lanes,
    )


def _batch(bucket: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[jax.Array], Sequence[Any]]:
    """``vmap``: the reduction is elementwise, so a batched operand is just a larger one."""
    outputs: list[jax.Array] = all_reduce_p.bind(*bucket, **params)
    return outputs, dims


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[Any]]:
    """The reduction is linear: tangents are reduced like values. Leaves that do not vary take no part."""
    outputs: list[jax.Array] = all_reduce_p.bind(*primals, **params)
    zeros = [ad.Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]
    return outputs, _reduce_nonzero(tangents, zeros, "tangents", params)


def _transpose(cotangents: Sequence[Any], *bucket: Any, **params: Any) -> list[Any]:
    """What reaches this worker's operands of the cotangents of all workers' results.

    Where types say that the results are the same on every worker (``check_vma=True``), so are their cotangents, and
    each worker keeps its own copy. Everywhere else each worker holds the cotangent of its own copy of the result, and
    the operands of a sum get the sum of those: the rule that ``jax.lax.psum`` has there.
    """
    operand_types = [operand.aval for operand in bucket]
    axis_name, kind, root = params["axis_name"], params["kind"], params["root"]
    if axis_name is not None and any(axis_name in varying_axes(aval) for aval in operand_types):
        results = [ct if isinstance(ct, ad.Zero) else jax.lax.pcast(ct, axis_name, to="varying") for ct in cotangents]
        is_root = jax.lax.axis_index(axis_name) == root
    else:
        zeros = [ad.Zero(aval) for aval in operand_types]
        results = _reduce_nonzero(cotangents, zeros, "cotangents", {**params, "kind": Kind.SUM, "root": 0})
        is_root = world.rank() == root
    if kind is Kind.BROADCAST:
        results = [ct if isinstance(ct, ad.Zero) else jnp.where(is_root, ct, jnp.zeros_like(ct)) for ct in results]
    return results


def _reduce_nonzero(values: Sequence[Any], zeros: Sequence[Any], what: str, params: dict[str, Any]) -> list[Any]:
    """Reduce those of ``values`` that are not symbolic zeros; the others are ``zeros``."""
    chosen = [index for index, value in enumerate(values) if not isinstance(value, ad.Zero)]
    results = list(zeros)
    if chosen:
        label = f"{params['label']} {what}"
        outputs = all_reduce_p.bind(*(values[index] for index in chosen), **{**params, "label": label})
        for index, output in zip(chosen, outputs, strict=True):
            results[index] = output
    return results


all_reduce_p.def_impl(_run_eagerly)
all_reduce_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(all_reduce_p, _lowering)
batching.primitive_batchers[all_reduce_p] = _batch
ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transpose
