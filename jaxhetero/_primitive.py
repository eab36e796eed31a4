"""The primitive behind every collective: one bucket in, one bucket out, one custom call in the compiled program."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxhetero import _ffi
from jaxhetero._compat import program_device_count, without_varying_axis
from jaxhetero.errors import ConfigError


class Kind(enum.IntEnum):
    """What a round does; the numbers are those of xla_ffi/wire.h."""

    SUM = 1
    BROADCAST = 2


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
      axis_name: the mesh axis that is summed over under ``jax.shard_map``, which the results no longer vary over.
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
    del axis_name
    devices = program_device_count(ctx)
    if devices > 1:
        raise ConfigError(
            f"{label}: this program runs on {devices} devices, and XLA would gather the whole array on each of them "
            "before the call; use it inside jax.shard_map over all mesh axes, with the workers' axis as axis_name"
        )
    rule = jax.ffi.ffi_lowering(_ffi.ALL_REDUCE)
    attributes = {"kind": np.int64(kind), "root": np.int64(root), "worker_count": np.int64(worker_count)}
    return rule(ctx, *bucket, label=label, **attributes)


all_reduce_p.def_impl(_run_eagerly)
all_reduce_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(all_reduce_p, _lowering)
