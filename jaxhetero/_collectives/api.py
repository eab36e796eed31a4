"""The collectives: pytrees in, pytrees out, inside ``jax.jit`` or outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxhetero._collectives.buckets import DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES
from jaxhetero._collectives.buckets import make_buckets as make_buckets
from jaxhetero._collectives.index_groups import IndexGroups, classify_in_groups, refuse_groups
from jaxhetero._collectives.kinds import Kind
from jaxhetero._collectives.labels import op_label
from jaxhetero._collectives.mesh_axes import AxisName, ReducedAxes, classify
from jaxhetero._collectives.moved import in_words, said_by_no_word
from jaxhetero._collectives.participants import Tally, Who, weighted
from jaxhetero._collectives.quanta import quanta_of
from jaxhetero._collectives.reduce_tree import (
    gather_arrays,
    make_varying,
    prepare_leaves,
    reduce_tree,
    scatter_arrays,
)
from jaxhetero._collectives.refuse_invariant import refuse_invariant, typed_axes
from jaxhetero._collectives.together import with_gradients_together
from jaxhetero._collectives.unreduced import has_unreduced, over_mesh
from jaxhetero._collectives.wire_dtypes import describe_leaf, wire_bytes
from jaxhetero._job import world
from jaxhetero.errors import ConfigError, from_message

Tree = TypeVar("Tree")


@overload
def psum(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    workers: Sequence[int] | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    who: Literal[False] = False,
    name: str | None = None,
) -> Tree: ...
@overload
def psum(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    workers: Sequence[int] | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    who: Literal[True],
    name: str | None = None,
) -> tuple[Tree, Who]: ...
def psum(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    workers: Sequence[int] | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    who: bool = False,
    name: str | None = None,
) -> Any:
    """Sum every leaf of ``x`` over all workers: the two-hop counterpart of ``jax.lax.psum``.

    The sum is taken in rank order, ``((x_0 + x_1) + x_2) + ...``, so it has the same bits in every run, with any number
    of reducers and any bucket size. float16 and bfloat16 are summed in float32 and rounded once. Integers wrap.

    Under ``jax.shard_map(check_vma=True)`` it refuses floats and complex numbers whose type does not vary over
    ``axis_name``, which ``jax.lax.psum`` takes. Such a leaf is mostly the gradient of a replicated parameter: JAX has
    summed it already, and a second sum would multiply it. Integers, bools and constants are counted once for each
    device, as in ``jax.lax``.

    Args:
      x: a pytree of arrays or numbers: float16/32/64, bfloat16, int8-64, uint8-64, complex64/128, or bool, which is
        summed as int32. All workers must call with the same structure, shapes and dtypes.
      axis_name: ``None`` in a program that runs on one device (plain ``jax.jit``). Under ``jax.shard_map``, the mesh
        axis or axes to sum over; the result no longer varies over them. In a mesh over all workers
        (``jax.distributed``), one of the axes is made of the workers. In a mesh of this process's own devices, the sum
        goes over those and over all workers. XLA sums the devices of a worker first, and each device sends its equal
        part. Global arrays whose type is "unreduced" over an axis need no name: they are summed over that axis.
      axis_index_groups: groups of places along ``axis_name``, or of ranks without it, that are summed each by itself:
        ``[[0, 2], [1, 3]]``. All workers give the same groups, which have each place once. A group is made of whole
        workers or lies inside one. In typed ``shard_map`` the result varies over ``axis_name``.
      workers: the ranks of the workers that take part, for a sum over a *group* of them, without ``axis_name``. Each of
        these workers calls with the same ranks, and nobody else calls. Sums of other groups, or of all workers, may run
        at the same time. A group of this worker alone gives ``x`` itself.
      wire_dtype: ``jnp.bfloat16`` or ``jnp.float16`` sends leaves of float32 in half the bytes, and of float64 in a
        quarter. A number is rounded once before it is sent, summed in float32, and the total is rounded once more. The
        result has the dtype of ``x``. A number above 65504 is infinity in float16. Other leaves are sent as they are.
        ``jnp.int8``, ``jnp.float8_e4m3fn`` and ``jnp.int4`` send all floats in blocks of small numbers, a quarter or an
        eighth of float32's bytes; the bits are others, and as well defined: see docs/how_to/eight_bits.md.
      bucket_bytes: how many bytes of leaves one custom call carries, about, from the last leaf to the first; see
        ``jaxhetero.make_buckets``. A call starts as soon as its leaves are computed. Must be the same on all workers.
      who: whether to tell as well who has taken part, which in an elastic job is known only then.
      name: the name of this op in error messages and traces. Default: the file and function of the caller.

    Returns:
      A pytree like ``x``, of the same shapes and dtypes. With ``axis_name``, a tree of constants gives constants:
      ``psum(1, axis_name)`` is the static number of workers, but in an elastic job an array. With ``who``, a pair of
      that and a ``jaxhetero.Who``.

    Does not block: as with any JAX computation, the caller waits when it looks at the result.

    Raises:
      NotInitializedError: before ``jaxhetero.initialize()``.
      ConfigError: for a dtype or mesh that is not supported; for a float that does not vary over ``axis_name``; for
        ``workers`` that lack this worker, or are no ranks; or, when the program is compiled, for an array that is
        sharded over several devices outside ``shard_map``.
      jax.errors.JaxRuntimeError: when the program runs and a peer fails; see ``jaxhetero.errors``.

    Example:
      A data-parallel train step. Each worker has its own batch; all of them take the same step:

      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params["w"]) ** 2)
      >>> @jax.jit
      ... def train_step(params, batch):
      ...     grads = jaxhetero.psum(jax.grad(loss_fn)(params, batch))
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g / jaxhetero.size(), params, grads)
      >>> train_step({"w": jnp.ones(2)}, jnp.array([[1.0, 0.0], [0.0, 2.0]]))
      {'w': Array([0.9, 0.6], dtype=float32)}
    """
    label = op_label("psum", name)
    if has_unreduced(x):
        options = {"workers": workers, "wire_dtype": wire_dtype, "bucket_bytes": bucket_bytes, "name": label}
        refuse_groups(axis_index_groups, label)
        return over_mesh(x, axis_name, label, functools.partial(psum, who=who, **options))
    axes = classify_in_groups(axis_name, axis_index_groups, label, workers, of_one_size=False)
    refuse_invariant(x, axis_name, label, mean=False)
    if not who:
        return _sum(x, axes, label, bucket_bytes, wire_dtype)
    tally = _tally(axes, None, mean=False, label=label)
    return _sum(x, axes, label, bucket_bytes, wire_dtype, tally=tally), _who(x, axes, label, tally)


@overload
def pmean(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    workers: Sequence[int] | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    weight: Any = None,
    who: Literal[False] = False,
    name: str | None = None,
) -> Tree: ...
@overload
def pmean(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    workers: Sequence[int] | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    weight: Any = None,
    who: Literal[True],
    name: str | None = None,
) -> tuple[Tree, Who]: ...
def pmean(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    workers: Sequence[int] | None = None,
    wire_dtype: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    weight: Any = None,
    who: bool = False,
    name: str | None = None,
) -> Any:
    """The mean of every leaf over all workers, as ``jax.lax.pmean``: ``psum`` divided by the number of workers.

    Arguments, shapes, blocking and errors are those of ``psum``. Integers give floats, as division does. With
    ``workers`` it is the mean over those, and with ``axis_index_groups``, all of one size, that over each group. In an
    elastic job each bucket is divided by the number of those who have taken part in it.

    Args:
      weight: of this worker's ``x``, a number or a scalar array, such as its number of examples. The mean is then the
        sum of the weighted trees over the sum of the weights, and NaN where that is zero or not finite. In leaves of 16
        bits, and with such a ``wire_dtype``, weights are rounded as those are: in float16 none may be above 65504.

    Example:
      The loss and the number of correct answers of a batch, as means over all workers:

      >>> jaxhetero.pmean({"loss": jnp.float32(2.5), "correct": jnp.int32(12)})
      {'correct': Array(12., dtype=float32), 'loss': Array(2.5, dtype=float32)}
    """
    label = op_label("pmean", name)
    if has_unreduced(x):
        options = {"workers": workers, "wire_dtype": wire_dtype, "bucket_bytes": bucket_bytes, "name": label}
        refuse_groups(axis_index_groups, label)
        return over_mesh(x, axis_name, label, functools.partial(pmean, weight=weight, who=who, **options))
    axes = classify_in_groups(axis_name, axis_index_groups, label, workers)
    refuse_invariant(x, axis_name, label, mean=True)
    if weight is None and not who:
        return _mean(x, axes, label, bucket_bytes, wire_dtype)
    tally = _tally(axes, weight, mean=True, label=label)
    contribution = x
    if weight is not None:
        sent_dtype = wire_dtype if axes.spans_workers else None
        contribution = jax.tree.map(lambda leaf: weighted(leaf, weight, sent_dtype), x)
    mean = _sum(contribution, axes, label, bucket_bytes, wire_dtype, tally=tally)
    return (mean, _who(x, axes, label, tally)) if who else mean


def pmax(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    workers: Sequence[int] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """The largest value of every element over all workers, as ``jax.lax.pmax``.

    A NaN of any worker gives NaN, and +0 is larger than -0. There is no derivative, as in ``jax.lax``. Arguments,
    shapes, dtypes, blocking and errors are those of ``psum``, with two differences: complex numbers are refused, and
    bools stay bools.

    Returns:
      A pytree like ``x``, of the same shapes and dtypes.

    Example:
      Whether any worker has met an infinite gradient:

      >>> jaxhetero.pmax(jnp.isinf(jnp.array([1.0, jnp.inf])).any())
      Array(True, dtype=bool)
    """
    label = op_label("pmax", name)
    axes = classify_in_groups(axis_name, axis_index_groups, label, workers, of_one_size=False)
    return _extreme(x, axes, Kind.MAX, label, bucket_bytes)


def pmin(
    x: Tree,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    workers: Sequence[int] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """The smallest value of every element over all workers, as ``jax.lax.pmin``.

    A NaN of any worker gives NaN, and -0 is smaller than +0. All else is as in ``pmax``.

    Returns:
      A pytree like ``x``, of the same shapes and dtypes.

    Example:
      How many steps every worker has data for:

      >>> jaxhetero.pmin(jnp.int32(120))
      Array(120, dtype=int32)
    """
    label = op_label("pmin", name)
    axes = classify_in_groups(axis_name, axis_index_groups, label, workers, of_one_size=False)
    return _extreme(x, axes, Kind.MIN, label, bucket_bytes)


def all_gather(
    x: Any,
    axis_name: AxisName = None,
    *,
    axis_index_groups: IndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Any:
    """Every worker's ``x`` on all workers, in the order of their ranks, as ``jax.lax.all_gather``.

    One round for each bucket: where the result has ``S`` bytes, a worker sends its ``S / n``, and receives those of the
    others.

    Args:
      x: a pytree of arrays or numbers of any dtype, since nothing is added: also typed keys of ``jax.random``, bool,
        int4 and float8.
      axis_name: as in ``psum``; with several axes, the order of the result is theirs. In a mesh of this process's own
        devices the workers come first.
      axis_index_groups: as in ``psum``; the groups are of one size, and the result has the order of the own group.
      bucket_bytes, name: as in ``psum``.
      axis: the position of the workers' axis in the result.
      tiled: ``True`` joins the workers' arrays along their own ``axis`` instead of stacking them along a new one.
      to: "varying" or "invarying", the type of the result in typed ``shard_map``; see ``jax.lax.all_gather``.

    Returns:
      A pytree like ``x``. Each leaf has a new axis, as long as there are workers; if ``tiled``, its own axis is longer
      by that factor. The transpose is ``psum_scatter``, or, with "invarying", a slice.

    Blocking and errors are those of ``psum``, but that no dtype is refused. Cotangents of float8 are summed in float32.

    Example:
      With ``n`` workers these shapes are ``(n, 3)`` and ``(3 * n,)``:

      >>> logits = jnp.arange(3.0)
      >>> jaxhetero.all_gather(logits).shape
      (1, 3)
      >>> jaxhetero.all_gather(logits, tiled=True).shape
      (3,)
    """
    label = op_label("all_gather", name) + said_by_no_word(x)
    world.refuse_elastic(label)
    if to not in ("varying", "invarying"):
        raise ConfigError(f"{label}: to is {to!r}; it can be 'varying' or 'invarying'")
    if to == "invarying":
        refuse_groups(axis_index_groups, label)
    axes = classify_in_groups(axis_name, axis_index_groups, label)
    places = [_normalize_axis(axis, jnp.ndim(leaf) + (not tiled)) for leaf in jax.tree.leaves(x)]

    def gather(words: list[jax.Array]) -> list[jax.Array]:
        leaves, _ = prepare_leaves(words, label, bucket_bytes, are_summed=False)
        stacks = gather_arrays(leaves, axes, label=label, bucket_bytes=bucket_bytes, to=to)
        results = [jnp.moveaxis(stack, 0, place) for stack, place in zip(stacks, places, strict=True)]
        if tiled:
            results = [_merge(result, place) for result, place in zip(results, places, strict=True)]
        return results

    return in_words(gather, x)


def psum_scatter(
    x: Any,
    axis_name: AxisName = None,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: IndexGroups = None,
    tiled: bool = False,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Any:
    """The sum of ``x`` over all workers, of which each worker keeps the part of its rank, as ``jax.lax.psum_scatter``.

    Of ``S`` bytes a worker sends ``S`` and receives ``S / n``. The devices of a worker share those bytes. In a mesh
    whose workers are not in the order of their ranks, it is a ``psum`` and a slice, and a worker receives ``S``.

    Args:
      x: a pytree of arrays of the dtypes of ``psum``.
      axis_name, axis_index_groups, bucket_bytes, name: as in ``all_gather``.
      scatter_dimension: the axis that is cut. Its size is the number of workers, or, if ``tiled``, a multiple.
      tiled: ``True`` keeps the axis, shorter by the number of workers; else it is gone.

    Returns:
      A pytree like ``x``. The transpose is ``all_gather``.

    Blocking and errors are those of ``psum``, which refuses the same operands.

    Example:
      Each worker keeps an equal part of the summed gradient; of ``n`` workers rank 0 has the first ``4 / n`` numbers:

      >>> jaxhetero.psum_scatter(jnp.arange(4.0), tiled=True)
      Array([0., 1., 2., 3.], dtype=float32)
    """
    label = op_label("psum_scatter", name)
    world.refuse_elastic(label)
    axes = classify_in_groups(axis_name, axis_index_groups, label)
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
    workers: Sequence[int] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str | None = None,
) -> Tree:
    """Worker ``root``'s ``x`` on all workers, bit by bit: for initial parameters.

    If workers have several devices along ``axis_name``, all get what the first device of worker ``root`` has.

    Args:
      x: a pytree of arrays or numbers of any dtype, as in ``all_gather``: a whole train state, or an NNX state with its
        keys. The other workers pass a tree of the same structure, shapes and dtypes; its values are not used.
      root: the rank of the worker whose values all workers get.
      axis_name, workers, bucket_bytes, name: as in ``psum``.

    Returns:
      A pytree like ``x``, of the same shapes and dtypes.

    Blocking and errors are those of ``psum``.

    Raises:
      ConfigError: there is no such ``root``, ``workers`` has it not, or ``axis_name`` lies inside a worker.

    Example:
      Each worker draws parameters from its own seed, and all start from those of rank 0:

      >>> params = {"w": jax.random.normal(jax.random.key(jaxhetero.rank()), (2, 3))}
      >>> params = jaxhetero.broadcast(params)
      >>> jax.tree.map(jnp.shape, params)
      {'w': (2, 3)}
    """
    if not isinstance(root, int | np.integer):
        raise ConfigError(f"broadcast: root is {root!r}; give the rank of a worker")
    if not 0 <= root < world.capacity():
        raise ConfigError(f"broadcast: root {root} is not in 0..{world.capacity() - 1}")
    label = op_label("broadcast", name) + said_by_no_word(x)
    axes = classify(axis_name, label, workers)
    if workers is not None and root not in workers:
        raise ConfigError(f"{label}: root {root} is not one of workers {tuple(workers)}")
    if world.capacity() > 1 and axes.are_named and not axes.spans_workers:
        raise ConfigError(f"{label}: {axis_name!r} lies inside each worker; name the axis of the workers")

    def send(words: list[jax.Array]) -> Any:
        return reduce_tree(words, axes, Kind.BROADCAST, label=label, bucket_bytes=bucket_bytes, root=root)

    return in_words(send, x)


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

    Apply it to parameters that are the same on every worker, inside the function that is differentiated. Each bucket's
    round starts when the backward pass has computed the cotangents of its leaves, and runs beside the backward pass of
    earlier layers.

    Args:
      params: a pytree of float or complex arrays, the same on every worker.
      axis_name, wire_dtype, bucket_bytes, name: as in ``psum``. Under ``jax.shard_map`` with ``check_vma=True`` the
        result varies over ``axis_name``, which keeps JAX from summing the gradients a second time.
      mean: ``True`` makes gradients the mean over the workers, ``False`` the sum.

    Returns:
      ``params``, of the same shapes and dtypes.

    Does not block. Errors are those of ``psum``, raised where the gradient is taken.

    Example:
      >>> def loss_fn(params, batch):
      ...     params = jaxhetero.replicated(params, mean=True)
      ...     return jnp.mean((batch @ params["w"]) ** 2)
      >>> loss, grads = jax.value_and_grad(loss_fn)({"w": jnp.ones(2)}, jnp.array([[1.0, 0.0], [0.0, 2.0]]))
      >>> grads                                                      # the mean over all workers already
      {'w': Array([1., 4.], dtype=float32)}
    """
    label = op_label("replicated", name)
    # Not the public psum and pmean: they refuse gradients that JAX may have summed, and these it has not summed yet.
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
    results: list[Any] = list(with_gradients_together(*leaves)) if leaves else []
    for bucket in make_buckets(arrays, bucket_bytes):
        for index, result in zip(bucket, identity(*(results[index] for index in bucket)), strict=True):
            results[index] = result
    same: Tree = jax.tree.unflatten(structure, results)
    return same


def barrier(*, workers: Sequence[int] | None = None, name: str | None = None) -> None:
    """Wait until every worker has called this: for the host, between programs, for example around files.

    Args:
      workers: the ranks of those that call it and wait for each other, as in ``psum``. Default: all.
      name: the name of this op in error messages. Default: the file and function of the caller.

    Blocks, without holding the GIL, for at most ``timeout_ms`` (``start_timeout_ms`` the first time).

    Raises:
      NotInitializedError: before ``jaxhetero.initialize()``.
      ConfigError: inside a traced function, where there is nothing to block; for ``workers`` that lack this worker, or
        are no ranks.
      JaxheteroError: a worker did not come, or was lost.

    Example:
      Rank 0 writes a file, and no worker reads it before it is complete:

      >>> import pathlib
      >>> file = pathlib.Path("vocabulary.txt")
      >>> if jaxhetero.rank() == 0:
      ...     _ = file.write_text("the a of")
      >>> jaxhetero.barrier()
      >>> file.read_text().split()
      ['the', 'a', 'of']
    """
    label = op_label("barrier", name)
    arrived = psum(jax.device_put(np.ones((), np.int32)), workers=workers, name=label)
    if isinstance(arrived, jax.core.Tracer):
        raise ConfigError(f"{label}: inside a traced function there is nothing to block; call barrier() outside")
    try:
        jax.block_until_ready(arrived)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise from_message(str(error)) from error
    world.check()


def _sum(
    x: Tree,
    axes: ReducedAxes,
    label: str,
    bucket_bytes: int,
    wire_dtype: Any,
    call_bytes: int = 0,
    tally: Tally | None = None,
    quanta_are_means: bool = False,
) -> Tree:
    if _is_constant(x, axes, tally):
        # As in jax.lax.psum: a value that the traced program does not compute is the same on every device. So
        # psum(1, axis_name) is the static number of workers.
        constants: Tree = jax.tree.map(lambda leaf: leaf * axes.count, x)
        return constants
    if axes.local_groups and typed_axes(axes.local_axes):
        raise ConfigError(
            f"{label}: these groups lie inside each worker, where jax.lax.psum takes no axis_index_groups in typed "
            "jax.shard_map; pass check_vma=False"
        )
    integers = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32) if _is_bool(leaf) else leaf, x)
    total: Tree = reduce_tree(
        integers,
        axes,
        Kind.SUM,
        label=label,
        bucket_bytes=bucket_bytes,
        wire_dtype=wire_dtype,
        call_bytes=call_bytes,
        tally=tally,
        quanta_are_means=quanta_are_means,
    )
    return total


def _who(x: Any, axes: ReducedAxes, label: str, tally: Tally) -> Who:
    if world.is_elastic() and not jax.tree.leaves(x):  # no bucket tells who has come to it
        _sum(jnp.float32(0), axes, label, DEFAULT_BUCKET_BYTES, None, tally=tally)
    return tally.who()


def _is_constant(x: Any, axes: ReducedAxes, tally: Tally | None = None) -> bool:
    """Whether the sum of ``x`` is known while the program is traced."""
    counts_later = tally is not None or (world.is_elastic() and axes.spans_workers)
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))
    return axes.are_named and not is_traced and not counts_later


def _mean(x: Tree, axes: ReducedAxes, label: str, bucket_bytes: int, wire_dtype: Any, call_bytes: int = 0) -> Tree:
    if world.is_elastic() and axes.spans_workers:
        tally = _tally(axes, None, mean=True, label=label)
        return _sum(x, axes, label, bucket_bytes, wire_dtype, call_bytes, tally)
    in_quanta = quanta_of(wire_dtype) is not None and axes.spans_workers and not _is_constant(x, axes)
    total = _sum(x, axes, label, bucket_bytes, wire_dtype, call_bytes, quanta_are_means=in_quanta)

    def divided(leaf: jax.Array) -> jax.Array:
        is_mean = in_quanta and jnp.issubdtype(leaf.dtype, jnp.floating)  # over the workers, not over their devices
        return leaf / (axes.local_count if is_mean else axes.count)

    with jax.transfer_guard("allow"):  # for the count
        mean: Tree = jax.tree.map(divided, total)
    return mean


def _tally(axes: ReducedAxes, weight: Any, *, mean: bool, label: str) -> Tally:
    if axes.worker_axis is not None or axes.local_groups or (not axes.spans_workers and world.capacity() > 1):
        raise ConfigError(
            f"{label}: weight and who are for all workers, each with its own devices, and not for a mesh over several "
            "workers or for groups inside one"
        )
    return Tally(weight, mean, axes.local_axes if axes.local_count > 1 else ())


def _extreme(x: Tree, axes: ReducedAxes, kind: Kind, label: str, bucket_bytes: int) -> Tree:
    for leaf in jax.tree.leaves(x):
        if jnp.iscomplexobj(leaf):
            raise ConfigError(
                f"{label}: a leaf is {describe_leaf(leaf)}, and complex numbers have no order; "
                "take that of jnp.abs, or of its real and imaginary parts"
            )
    return _with_bools_as_bytes(lambda tree: reduce_tree(tree, axes, kind, label=label, bucket_bytes=bucket_bytes), x)


def _with_bools_as_bytes(function: Callable[[Any], Any], x: Tree) -> Tree:
    """``function`` of ``x`` with bools as uint8; its results are bools where ``x`` has them."""
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
    """Join axis ``place`` and the axis after it."""
    size = array.shape[place] * array.shape[place + 1]
    return array.reshape(*array.shape[:place], size, *array.shape[place + 2 :])


def _cut(array: jax.Array, place: int, count: int) -> jax.Array:
    """Cut axis ``place`` in ``count`` equal rows: ``[..., count * size, ...]`` to ``[count, size, ...]``."""
    rows = jnp.moveaxis(array, place, 0)
    return rows.reshape(count, rows.shape[0] // count, *rows.shape[1:])
