"""The collectives: pytrees in, pytrees out, inside ``jax.jit`` or not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxhetero import _primitive, world
from jaxhetero._compat import varying_axes
from jaxhetero._mesh import AxisName, ReducedAxes, classify
from jaxhetero._primitive import Kind
from jaxhetero.errors import ConfigError

DEFAULT_BUCKET_BYTES = 25 * 2**20

Tree = TypeVar("Tree")

_PACKAGE_DIR = str(Path(__file__).parent)


def psum(
    x: Tree, axis_name: AxisName = None, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, name: str | None = None
) -> Tree:
    """Sum every leaf of ``x`` over all workers: the two-hop counterpart of ``jax.lax.psum``.

    The sum is taken in rank order, ``((x_0 + x_1) + x_2) + ...``, so it has the same bits in every run, with any number
    of reducers and any bucket size. float16 and bfloat16 are summed in float32 and rounded once; integers wrap.

    Args:
      x: a pytree of arrays or numbers: float16/32/64, bfloat16, int8-64, uint8-64, complex64/128, or bool, which is
        summed as int32. All workers must call with the same structure, shapes and dtypes.
      axis_name: ``None`` in a program that runs on one device (plain ``jax.jit``). Under ``jax.shard_map``, the mesh
        axis or axes to sum over, which the result no longer varies over. In a mesh over all workers
        (``jax.distributed``), one of them is made of the workers; in a mesh of this process's own devices, the sum goes
        over those and over all workers. The devices of a worker are summed first, by XLA, and each device sends its
        equal part.
      bucket_bytes: leaves are grouped in buckets of about this size, last leaf first; each bucket is one custom call
        and starts as soon as its leaves are computed. Must be the same on all workers.
      name: what error messages and traces call this op. Default: the file and function of the caller.

    Returns:
      A pytree like ``x``, of the same shapes and dtypes. With ``axis_name``, a tree of constants gives constants:
      ``psum(1, axis_name)`` is the static number of workers.

    Does not block: as with any JAX computation, the caller waits when it looks at the result.

    Raises:
      NotInitializedError: before ``jaxhetero.initialize()``.
      ConfigError: for a dtype or mesh that is not supported, or, when the program is compiled, for an array that is
        sharded over several devices outside ``shard_map``.
      jax.errors.JaxRuntimeError: when the program runs and a peer fails; see ``jaxhetero.errors``.
    """
    total: Tree = _sum(x, axis_name, bucket_bytes, name or _caller("psum"))
    return total


def pmean(
    x: Tree, axis_name: AxisName = None, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, name: str | None = None
) -> Tree:
    """The mean of every leaf over all workers: ``psum`` divided by their number, as ``jax.lax.pmean``.

    Arguments, blocking and errors are those of ``psum``. Integers give floats, as division does.
    """
    total = _sum(x, axis_name, bucket_bytes, name or _caller("pmean"))
    count = classify(axis_name, name or "pmean").count
    mean: Tree = jax.tree.map(lambda leaf: leaf / count, total)
    return mean


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
    that ``psum`` takes. Arguments, blocking and errors are those of ``psum``.
    """
    if not 0 <= root < world.size():
        raise ConfigError(f"broadcast: root {root} is not in 0..{world.size() - 1}")
    label = name or _caller("broadcast")
    axes = classify(axis_name, label)
    if axes.local_count > 1:
        raise ConfigError(f"{label}: axes {axes.local_axes} lie inside a worker; broadcast goes over the workers' axis")
    arrays = jax.tree.map(jnp.asarray, x)
    same: Tree = _reduce(arrays, axes, Kind.BROADCAST, root, bucket_bytes, label)
    return same


def replicated(
    params: Tree,
    axis_name: AxisName = None,
    *,
    mean: bool = False,
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
      axis_name, bucket_bytes, name: as in ``psum``. Under ``jax.shard_map`` with ``check_vma=True`` the result varies
        over ``axis_name``, which is what keeps JAX from summing the gradients a second time.
      mean: gradients are the mean instead of the sum.

    Errors are those of ``psum``, raised where the gradient is taken.
    """
    label = name or _caller("replicated")
    reduce = pmean if mean else psum

    @jax.custom_vjp
    def identity(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        axes = classify(axis_name, label)
        spanned = axes.local_axes + ((axes.worker_axis,) if axes.worker_axis else ())
        return tuple(_varying(jnp.asarray(leaf), spanned) for leaf in leaves)

    def forward(*leaves: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        return identity(*leaves), None

    def backward(_: None, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return reduce(cotangents, axis_name, bucket_bytes=bucket_bytes, name=label)

    identity.defvjp(forward, backward)
    leaves, structure = jax.tree.flatten(params)
    results: list[Any] = list(leaves)
    for bucket in make_buckets([jnp.asarray(leaf) for leaf in leaves], bucket_bytes):
        for index, result in zip(bucket, identity(*(leaves[index] for index in bucket)), strict=True):
            results[index] = result
    same: Tree = jax.tree.unflatten(structure, results)
    return same


def _sum(x: Any, axis_name: AxisName, bucket_bytes: int, label: str) -> Any:
    leaves = jax.tree.leaves(x)
    axes = classify(axis_name, label)
    if axis_name is not None and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        # As jax.lax.psum does: what the traced program does not compute is the same everywhere, so that
        # psum(1, axis_name) is the static number of workers.
        return jax.tree.map(lambda leaf: leaf * axes.count, x)
    integers = jax.tree.map(lambda leaf: jnp.asarray(leaf, _int_if_bool(leaf)), x)
    return _reduce(integers, axes, Kind.SUM, 0, bucket_bytes, label)


def _int_if_bool(leaf: Any) -> Any:
    """Booleans are summed as int32, as ``jax.lax.psum`` does."""
    dtype = jnp.result_type(leaf)
    return jnp.int32 if dtype == jnp.bool_ else dtype


def _reduce(x: Any, axes: ReducedAxes, kind: Kind, root: int, bucket_bytes: int, label: str) -> Any:
    """Inside each worker first, then over the workers, each device with its share, then inside each worker again."""
    if bucket_bytes < 1:
        raise ConfigError(f"{label}: bucket_bytes is {bucket_bytes}; it must be at least 1")
    leaves, structure = jax.tree.flatten(x)
    for leaf in leaves:
        _check_dtype(leaf, label)
    if not axes.spans_workers:
        return jax.lax.psum(x, axes.local_axes) if axes.local_axes and kind is Kind.SUM else x
    if axes.local_count == 1 and axes.local_axes:
        leaves = [jax.lax.psum(leaf, axes.local_axes) for leaf in leaves]
    parts = [_local_sum_part(leaf, axes.local_axes) for leaf in leaves] if axes.local_count > 1 else leaves
    results = _reduce_over_workers(parts, axes.worker_axis, kind, root, bucket_bytes, label)
    if axes.local_count > 1:
        results = [_from_parts(result, leaf, axes) for result, leaf in zip(results, leaves, strict=True)]
    return jax.tree.unflatten(structure, results)


def _local_sum_part(leaf: jax.Array, local_axes: tuple[str, ...]) -> jax.Array:
    """This device's equal part of the sum over its worker's devices, as a vector; the last parts end in zeros."""
    parts = int(jax.lax.axis_size(local_axes))
    flat = jnp.pad(leaf.reshape(-1), (0, -leaf.size % parts))
    part: jax.Array = jax.lax.psum_scatter(_varying(flat, local_axes), local_axes, scatter_dimension=0, tiled=True)
    return part


def _from_parts(part: jax.Array, leaf: jax.Array, axes: ReducedAxes) -> jax.Array:
    """Put the parts of a worker's devices together again, in the shape of ``leaf``."""
    whole: jax.Array = jax.lax.all_gather(part, axes.local_axes, axis=0, tiled=True, to="invarying")
    return whole[: leaf.size].reshape(leaf.shape)


def _reduce_over_workers(
    arrays: Sequence[jax.Array], worker_axis: str | None, kind: Kind, root: int, bucket_bytes: int, label: str
) -> list[jax.Array]:
    results: dict[int, jax.Array] = {}
    if worker_axis is not None:
        arrays = [_varying(array, (worker_axis,)) for array in arrays]
    for number, bucket in enumerate(make_buckets(arrays, bucket_bytes)):
        bucket_label = f"{label} bucket {number}"
        with jax.named_scope(bucket_label):
            outputs = _primitive.all_reduce(
                [arrays[index] for index in bucket],
                label=bucket_label,
                kind=kind,
                root=root,
                worker_count=world.size(),
                axis_name=worker_axis,
            )
        results.update(zip(bucket, outputs, strict=True))
    return [results[index] for index in range(len(arrays))]


def _varying(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """As lax.psum does: a value that is the same along an axis counts once for each step of it."""
    constant = tuple(name for name in axes if name not in varying_axes(jax.typeof(array)))
    return jax.lax.pcast(array, constant, to="varying") if constant else array


def make_buckets(arrays: Sequence[Any], bucket_bytes: int) -> list[list[int]]:
    """The indices of ``arrays`` in buckets of one dtype and at most ``bucket_bytes``, or of one larger array.

    From the last array to the first, because the backward pass computes the gradients of the last layers first. The
    buckets are in the order of their first members.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for index in reversed(range(len(arrays))):
        array = arrays[index]
        array_bytes = array.size * array.dtype.itemsize
        bucket, filled_bytes = open_buckets.get(array.dtype, ([], 0))
        if not bucket or filled_bytes + array_bytes > bucket_bytes:
            bucket, filled_bytes = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[array.dtype] = (bucket, filled_bytes + array_bytes)
    return buckets


_SUPPORTED = frozenset(
    {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def _check_dtype(leaf: Any, label: str) -> None:
    dtype = jnp.result_type(leaf)
    if str(dtype) not in _SUPPORTED:
        raise ConfigError(
            f"{label}: a leaf is {dtype}[{','.join(map(str, jnp.shape(leaf)))}], a dtype that reducers cannot sum; "
            f"cast it first, to one of: {' '.join(sorted(_SUPPORTED))}"
        )


def _caller(collective: str) -> str:
    """``psum at train.py:train_step``: the first frame outside this package. No line, which every edit would move."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_DIR):
        frame = frame.f_back
    return f"{collective} at {Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
