"""The collectives: pytrees in, pytrees out, inside ``jax.jit`` or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero import world
from jaxhetero._collectives.mesh_axes import AxisName, ReducedAxes, classify
from jaxhetero._collectives.primitive import Kind
from jaxhetero._collectives.reduce_tree import (
    gather_arrays,
    make_varying,
    prepare_leaves,
    reduce_tree,
    scatter_arrays,
)
from jaxhetero._collectives.refuse_invariant import refuse_invariant
from jaxhetero._collectives.wire_dtypes import describe_leaf, wire_bytes
from jaxhetero.buckets import DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES
from jaxhetero.buckets import make_buckets as make_buckets
from jaxhetero.errors import ConfigError, from_message

Tree = TypeVar("Tree")

_PACKAGE_DIR = str(Path(__file__).parent)


def psum(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """Sum every leaf of ``x`` over all workers: the two-hop counterpart of ``jax.lax.psum``.

    The sum is taken in rank order, ``((x_0 + x_1) + x_2) + ...``, so it has the same bits in every run, with any number
    of reducers and any bucket size. float16 and bfloat16 are summed in float32 and rounded once; integers wrap.

    Unlike ``jax.lax.psum``, it refuses floats and complex numbers that are the same along ``axis_name`` by their type,
    in ``jax.shard_map(check_vma=True)``: JAX has summed the gradients of replicated parameters, and a second sum would
    multiply them. Integers, bools and constants are counted once for each device, as in ``jax.lax``.

    Args:
      x: a pytree of arrays or numbers: float16/32/64, bfloat16, int8-64, uint8-64, complex64/128, or bool, which is
        summed as int32. All workers must call with the same structure, shapes and dtypes.
      axis_name: ``None`` in a program that runs on one device (plain ``jax.jit``). Under ``jax.shard_map``, the mesh
        axis or axes to sum over, which the result no longer varies over. In a mesh over all workers
        (``jax.distributed``), one of them is made of the workers; in a mesh of this process's own devices, the sum goes
        over those and over all workers. The devices of a worker are summed first, by XLA, and each device sends its
        equal part.
      axis_index_groups: only ``None``; it is here because ``jax.lax.psum`` has it.
      wire_dtype: ``jnp.bfloat16`` or ``jnp.float16`` sends leaves of float32 and float64 in half the bytes, or a
        quarter: rounded once before they are sent, summed in float32, and the total rounded once more. The result has
        the dtype of ``x``. A number above 65504 is infinity in float16. Other leaves are sent as they are.
      bucket_bytes: leaves are grouped in buckets of about this size, last leaf first; each bucket is one custom call
        and starts as soon as its leaves are computed. Must be the same on all workers.
      name: what error messages and traces call this op. Default: the file and function of the caller.

    Returns:
      A pytree like ``x``, of the same shapes and dtypes. With ``axis_name``, a tree of constants gives constants:
      ``psum(1, axis_name)`` is the static number of workers.

    Does not block: as with any JAX computation, the caller waits when it looks at the result.

    Raises:
      NotInitializedError: before ``jaxhetero.initialize()``.
      ConfigError: for a dtype or mesh that is not supported; for a float that does not vary over ``axis_name``; or,
        when the program is compiled, for an array that is sharded over several devices outside ``shard_map``.
      jax.errors.JaxRuntimeError: when the program runs and a peer fails; see ``jaxhetero.errors``.
    """
    label = _label("psum", name, axis_index_groups)
    axes = classify(axis_name, label)
    refuse_invariant(x, axis_name, label, mean=False)
    return _sum(x, axes, label, bucket_bytes, wire_dtype)


def pmean(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """The mean of every leaf over all workers, as ``jax.lax.pmean``: ``psum`` divided by their number.

    Arguments, shapes, blocking and errors are those of ``psum``. Integers give floats, as division does.
    """
    label = _label("pmean", name, axis_index_groups)
    axes = classify(axis_name, label)
    refuse_invariant(x, axis_name, label, mean=True)
    return _mean(x, axes, label, bucket_bytes, wire_dtype)


def pmax(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """The largest value of every element over all workers, as ``jax.lax.pmax``: a pytree like ``x``.

    NaN where any worker has NaN; +0 is larger than -0. It has no derivative, as in ``jax.lax``. Arguments, dtypes,
    blocking and errors are those of ``psum``, but complex numbers are refused and bool stays bool.
    """
    return _extreme(x, axis_name, Kind.MAX, _label("pmax", name, axis_index_groups), bucket_bytes)


def pmin(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """The smallest value of every element over all workers, as ``jax.lax.pmin``; see ``pmax``."""
    return _extreme(x, axis_name, Kind.MIN, _label("pmin", name, axis_index_groups), bucket_bytes)


def all_gather(
    x: Any,
    axis_name: AxisName = None,
    *,
    axis_index_groups: None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Any:
    """Every worker's ``x`` on all workers, in the order of their ranks, as ``jax.lax.all_gather``.

    One broadcast from each worker: of ``S`` bytes a worker sends ``S`` and receives ``(n - 1) S``.

    Args:
      x: a pytree of arrays or numbers of the dtypes of ``psum``, or bool.
      axis_name: as in ``psum``; with several axes, the order of the result is theirs. In a mesh of this process's own
        devices the workers come first.
      axis_index_groups, bucket_bytes, name: as in ``psum``.
      axis: where in the result the workers' axis is.
      tiled: ``True`` joins the workers' arrays along their own ``axis`` instead of stacking them along a new one.
      to: "varying" or "invarying", the type of the result in typed ``shard_map``; see ``jax.lax.all_gather``.

    Returns:
      A pytree like ``x``, of leaves with a new axis, or with an axis that is longer by the number of workers. The
      transpose is ``psum_scatter``, or, with "invarying", a slice.

    Blocking and errors are those of ``psum``.
    """
    label = _label("all_gather", name, axis_index_groups)
    if to not in ("varying", "invarying"):
        raise ConfigError(f"{label}: to is {to!r}; it can be 'varying' or 'invarying'")
    axes = classify(axis_name, label)

    def gather(tree: Any) -> Any:
        leaves, structure = prepare_leaves(tree, label, bucket_bytes)
        places = [_normalize_axis(axis, leaf.ndim if tiled else leaf.ndim + 1) for leaf in leaves]
        stacks = gather_arrays(leaves, axes, label=label, bucket_bytes=bucket_bytes, to=to)
        results = [jnp.moveaxis(stack, 0, place) for stack, place in zip(stacks, places, strict=True)]
        if tiled:
            results = [_merge(result, place) for result, place in zip(results, places, strict=True)]
        return jax.tree.unflatten(structure, results)

    return _with_bools_as_bytes(gather, x)


def psum_scatter(
    x: Any,
    axis_name: AxisName = None,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: None = None,
    tiled: bool = False,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Any:
    """The sum of ``x`` over all workers, of which each keeps the part of its rank, as ``jax.lax.psum_scatter``.

    It is a ``psum`` and a slice: of ``S`` bytes a worker sends ``S`` and receives ``S``, where ``S/n`` would do. The
    devices of a worker share them.

    Args:
      x: a pytree of arrays of the dtypes of ``psum``.
      axis_name, axis_index_groups, bucket_bytes, name: as in ``all_gather``.
      scatter_dimension: the axis that is cut. Its size is the number of workers, or, if ``tiled``, a multiple.
      tiled: ``True`` keeps the axis, shorter by the number of workers; else it is gone.

    Returns:
      A pytree like ``x``. The transpose is ``all_gather``.

    Blocking and errors are those of ``psum``, which refuses the same operands. Compiled for this worker's rank where
    ``axis_name`` does not name the workers.
    """
    label = _label("psum_scatter", name, axis_index_groups)
    axes = classify(axis_name, label)
    refuse_invariant(x, axis_name, label, mean=False)
    leaves, structure = prepare_leaves(x, label, bucket_bytes)
    places = [_normalize_axis(scatter_dimension, leaf.ndim) for leaf in leaves]
    for leaf, place in zip(leaves, places, strict=True):
        size = leaf.shape[place]
        if size % axes.count if tiled else size != axes.count:
            raise ConfigError(
                f"{label}: axis {place} of {describe_leaf(leaf)} cannot be scattered over {axes.count}; its "
                f"size must be {'a multiple of that' if tiled else 'that, or pass tiled=True'}"
            )
    stacks = [_cut(leaf, place, axes.count) for leaf, place in zip(leaves, places, strict=True)]
    rows = scatter_arrays(stacks, axes, label=label, bucket_bytes=bucket_bytes)
    if tiled:
        rows = [jnp.moveaxis(row, 0, place) for row, place in zip(rows, places, strict=True)]
    else:
        rows = [row[0] for row in rows]
    return jax.tree.unflatten(structure, rows)


def broadcast(
    x: Tree,
    root: int = 0,
    axis_name: AxisName = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """Every leaf of worker ``root``'s ``x``, bit by bit: for initial parameters.

    The other workers pass a tree of the same structure, shapes and dtypes, whose values are not used. Takes every dtype
    that ``psum`` takes, and bool. Arguments, blocking and errors are those of ``psum``.
    """
    if not 0 <= root < world.size():
        raise ConfigError(f"broadcast: root {root} is not in 0..{world.size() - 1}")
    label = _label("broadcast", name)
    axes = classify(axis_name, label)
    if axes.local_count > 1:
        raise ConfigError(f"{label}: axes {axes.local_axes} lie inside a worker; broadcast goes over the workers' axis")
    return _with_bools_as_bytes(
        lambda tree: reduce_tree(tree, axes, Kind.BROADCAST, label=label, bucket_bytes=bucket_bytes, root=root), x
    )


def replicated(
    params: Tree,
    axis_name: AxisName = None,
    *,
    mean: bool = False,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """``params`` as they are, but with gradients that arrive summed over all workers: the backward hook.

    Apply it to parameters that are the same on every worker, inside the function that is differentiated::

        def loss_fn(params, batch):
            params = jaxhetero.replicated(params, mean=True)
            ...
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)    # grads are reduced already

    Each bucket's round starts when the backward pass has computed the cotangents of its leaves, while the layers before
    it are still at work.

    Args:
      params: a pytree of float or complex arrays; everybody's are the same.
      axis_name, wire_dtype, bucket_bytes, name: as in ``psum``. Under ``jax.shard_map`` with ``check_vma=True`` the
        result varies over ``axis_name``, which is what keeps JAX from summing the gradients a second time.
      mean: gradients are the mean instead of the sum.

    Errors are those of ``psum``, raised where the gradient is taken.
    """
    label = _label("replicated", name)
    # Not the public ones: their checks are for gradients that JAX may have summed, which these are before it could.
    reduce = _mean if mean else _sum

    @jax.custom_vjp
    def identity(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        axes = classify(axis_name, label)
        return tuple(make_varying(leaf, axes) for leaf in leaves)

    def forward(*leaves: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        return identity(*leaves), None

    def backward(_: None, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return reduce(cotangents, classify(axis_name, label), label, bucket_bytes, wire_dtype, call_bytes)

    identity.defvjp(forward, backward)
    leaves, structure = jax.tree.flatten(params)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    call_bytes = wire_bytes(arrays, wire_dtype)
    results: list[Any] = list(leaves)
    for bucket in make_buckets(arrays, bucket_bytes):
        for index, result in zip(bucket, identity(*(leaves[index] for index in bucket)), strict=True):
            results[index] = result
    same: Tree = jax.tree.unflatten(structure, results)
    return same


def barrier(*, name: str | None = None) -> None:
    """Wait until every worker has called this: for the host, between programs, for example around files.

    Args:
      name: what error messages call it. Default: the file and function of the caller.

    Blocks, without holding the GIL, for at most ``timeout_ms`` (``start_timeout_ms`` the first time).

    Raises:
      NotInitializedError: before ``jaxhetero.initialize()``.
      ConfigError: inside a traced function, where there is nothing to block.
      JaxheteroError: a worker did not come, or was lost.
    """
    label = _label("barrier", name)
    arrived = psum(np.ones((), np.int32), name=label)
    if isinstance(arrived, jax.core.Tracer):
        raise ConfigError(f"{label}: inside a traced function there is nothing to block; call barrier() outside")
    try:
        jax.block_until_ready(arrived)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise from_message(str(error)) from error
    world.check()


def _sum(x: Tree, axes: ReducedAxes, label: str, bucket_bytes: int, wire_dtype: Any, call_bytes: int = 0) -> Tree:
    if axes.are_named and not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
        # As jax.lax.psum does: what the traced program does not compute is the same everywhere, so that
        # psum(1, axis_name) is the static number of workers.
        constants: Tree = jax.tree.map(lambda leaf: leaf * axes.count, x)
        return constants
    integers = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32) if _is_bool(leaf) else leaf, x)
    total: Tree = reduce_tree(
        integers,
        axes,
        Kind.SUM,
        label=label,
        bucket_bytes=bucket_bytes,
        wire_dtype=wire_dtype,
        call_bytes=call_bytes,
    )
    return total


def _mean(x: Tree, axes: ReducedAxes, label: str, bucket_bytes: int, wire_dtype: Any, call_bytes: int = 0) -> Tree:
    total = _sum(x, axes, label, bucket_bytes, wire_dtype, call_bytes)
    mean: Tree = jax.tree.map(lambda leaf: leaf / axes.count, total)
    return mean


def _extreme(x: Tree, axis_name: AxisName, kind: Kind, label: str, bucket_bytes: int) -> Tree:
    axes = classify(axis_name, label)
    for leaf in jax.tree.leaves(x):
        if jnp.iscomplexobj(leaf):
            raise ConfigError(
                f"{label}: a leaf is {describe_leaf(leaf)}, and complex numbers have no order; "
                "take that of jnp.abs, or of its real and imaginary parts"
            )
    return _with_bools_as_bytes(lambda tree: reduce_tree(tree, axes, kind, label=label, bucket_bytes=bucket_bytes), x)


def _with_bools_as_bytes(function: Callable[[Any], Any], x: Tree) -> Tree:
    """``function`` of ``x``, which has no bool; where ``x`` has, so has the result."""
    results = function(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.uint8) if _is_bool(leaf) else leaf, x))
    restored: Tree = jax.tree.map(lambda result, leaf: result.astype(bool) if _is_bool(leaf) else result, results, x)
    return restored


def _is_bool(leaf: Any) -> bool:
    return bool(jnp.result_type(leaf) == jnp.bool_)


def _normalize_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of bounds for array of dimension {ndim}")
    return axis % ndim


def _merge(array: jax.Array, place: int) -> jax.Array:
    """Axis ``place`` and the one after it as one."""
    size = array.shape[place] * array.shape[place + 1]
    return array.reshape(*array.shape[:place], size, *array.shape[place + 2 :])


def _cut(array: jax.Array, place: int, count: int) -> jax.Array:
    """Axis ``place`` as ``count`` rows, first, and what each of them has of it, second."""
    rows = jnp.moveaxis(array, place, 0)
    return rows.reshape(count, rows.shape[0] // count, *rows.shape[1:])


def _label(collective: str, name: str | None, axis_index_groups: Any = None) -> str:
    """What messages and traces call an op: ``name``, or ``psum at train.py:train_step``."""
    label = name or f"{collective} at {_caller()}"
    if axis_index_groups is not None:
        raise ConfigError(
            f"{label}: axis_index_groups is not supported, because every worker takes part in every round; for groups "
            "of devices inside a worker give the mesh one more axis and name the axes to reduce over"
        )
    return label


def _caller() -> str:
    """``train.py:train_step``: the first frame outside this package. No line, which every edit would move."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
