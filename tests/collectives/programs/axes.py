"""Meshes of odd shapes and axes of odd names, against jax.lax on the same global mesh; prints what is wrong.

Which axes are made of the workers is told from the sizes of a mesh's axes. Here these are misleading: axes of one
device, as many devices in a worker as there are workers, shard_map inside shard_map, and names that vmap gave.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from jaxhetero.errors import ConfigError

DEVICES = 2
P = jax.P
ROUNDS = 10  # a wrong pairing of devices is a race, which some rounds win

Sizes = dict[str, int]
Function = Callable[[Any, jax.Array], Any]

GRID = {"workers": 2, "devices": 2}
MESHES: dict[str, Sizes] = {
    "one device of each worker": {"workers": 2, "devices": 1},
    "an axis of one device in front": {"model": 1, **GRID},
    "an axis of one device between": {"workers": 2, "model": 1, "devices": 2},
    "an axis of one device at the end": {**GRID, "model": 1},
}


def make_mesh(sizes: Sizes) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()).reshape(-1, DEVICES)[:, : sizes["devices"]].reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))


def choices(names: tuple[str, ...]) -> list[Any]:
    """Each axis by its name, and all of them, in both orders."""
    return [*names, names, names[::-1]]


def put(mesh: jax.sharding.Mesh) -> jax.Array:
    """Three rows for each device."""
    numbers = np.arange(mesh.size * 9, dtype=np.float32).reshape(-1, 3)
    rows = jax.sharding.NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(numbers.shape, rows, lambda index: numbers[index])


def make_step(mesh: jax.sharding.Mesh, function: Function, library: Any, check_vma: bool = True) -> Any:
    rows = P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(lambda x: function(library, x), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
    )


def local_values(array: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def same(mesh: jax.sharding.Mesh, function: Function, check_vma: bool, make: Any = make_step) -> bool:
    x = put(mesh)
    ours, theirs = (make(mesh, function, library, check_vma) for library in (jaxhetero, jax.lax))
    expected = local_values(theirs(x))
    return all(np.array_equal(local_values(ours(x)), expected) for _ in range(ROUNDS))


def is_refused(mesh: jax.sharding.Mesh, function: Function, text: str, make: Any = make_step) -> bool:
    try:
        make(mesh, function, jaxhetero)(put(mesh))
    except ConfigError as error:
        return text in str(error)
    return False


def sums(axes: Any) -> Function:
    """With what varies along all axes again."""
    return lambda library, x: library.psum(x, axes) + library.pmean(2 * x, axes) + 0 * x


def all_kinds(axes: Any) -> Function:
    def function(library: Any, x: jax.Array) -> jax.Array:
        gathered = library.all_gather(x, axes, tiled=True)
        return jnp.concatenate([sums(axes)(library, x), library.pmax(x, axes) + 0 * x, gathered + 0 * x[:1]])

    return function


def scattered(axes: Any) -> Function:
    def function(library: Any, x: jax.Array) -> jax.Array:
        rows = jnp.tile(x, (jax.lax.axis_size(axes), 1)) * jnp.arange(jax.lax.axis_size(axes) * x.shape[0])[:, None]
        part: jax.Array = library.psum_scatter(rows, axes, tiled=True)
        return part

    return function


def nested(mesh: jax.sharding.Mesh, function: Function, library: Any, check_vma: bool = True) -> Any:
    """One shard_map for each axis, the second inside the first, which knows the shape of the mesh only."""

    def outer(x: jax.Array) -> Any:
        rows = P(None, "devices")
        inner = jax.shard_map(
            lambda y: function(library, y.reshape(1, 9)).reshape(9, 1),
            in_specs=rows,
            out_specs=rows,
            axis_names={"devices"},
            check_vma=check_vma,
        )
        return inner(x.reshape(9, -1))

    rows = P("workers")
    return jax.jit(
        jax.shard_map(outer, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"workers"}, check_vma=check_vma)
    )


@contextlib.contextmanager
def axes_of_one_device_removed_from_types() -> Iterator[None]:
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", True)
    yield
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", False)


def odd_shapes() -> Iterator[tuple[str, bool]]:
    for (name, sizes), check_vma in itertools.product(MESHES.items(), (True, False)):
        mesh = make_mesh(sizes)
        for axes in choices(mesh.axis_names):
            yield f"{name}, {axes}, check_vma={check_vma}", same(mesh, all_kinds(axes), check_vma)
            if check_vma:
                with axes_of_one_device_removed_from_types():
                    # jax.lax gathers nothing and takes no maximum along an axis that its types do not have.
                    yield f"{name}, {axes}, removed from types", same(mesh, sums(axes), check_vma)


def nested_maps() -> Iterator[tuple[str, bool]]:
    grid, thin = make_mesh(GRID), make_mesh(MESHES["one device of each worker"])
    for axes, check_vma in itertools.product(choices(grid.axis_names), (True, False)):
        with jax.set_mesh(grid):
            yield f"nested, {axes}, check_vma={check_vma}", same(grid, sums(axes), check_vma, nested)
        yield f"nested, one device of each, {axes}", same(thin, sums(axes), check_vma, nested)
    for axes in ("workers", grid.axis_names):
        yield f"nested, unknown devices, {axes}", is_refused(grid, sums(axes), "jax.set_mesh(mesh)", nested)


def names_of_vmap() -> Iterator[tuple[str, bool]]:
    mesh = make_mesh(GRID)

    def over(axes: Any, name: str) -> Function:
        return lambda library, x: jax.vmap(lambda row: library.psum(row, axes), axis_name=name)(x) + 0 * x

    for axes, check_vma in itertools.product(choices(mesh.axis_names), (True, False)):
        yield f"inside vmap, {axes}, check_vma={check_vma}", same(mesh, over(axes, "rows"), check_vma)
    for axes, name in (("rows", "rows"), (("workers", "rows"), "rows"), *((name, name) for name in GRID)):
        yield f"an axis of vmap, {axes}", is_refused(mesh, over(axes, name), "is not one of a mesh")


def workers_that_are_not_in_front() -> Iterator[tuple[str, bool]]:
    """With as many devices in a worker as there are workers, the first axis is taken for theirs, and found not to be.

    The sum over the second alone is that of JAX.
    """
    mesh = make_mesh(GRID)
    turned = jax.sharding.Mesh(mesh.devices.T, ("devices", "workers"), axis_types=mesh.axis_types)
    own = jax.sharding.Mesh(np.array(jax.local_devices()), ("devices",), axis_types=mesh.axis_types[:1])
    for where, axes in ((turned, "devices"), (turned, ("devices", "workers")), (own, "devices")):
        yield f"not in front, {where.axis_names}", is_refused(where, sums(axes), "with the workers as its first axis")
    yield "not in front, workers", same(turned, sums("workers"), True)


def workers_that_are_not_in_the_order_of_ranks() -> Iterator[tuple[str, bool]]:
    """A worker's row is that of its place on the axis, and not of its rank."""
    grid = make_mesh(GRID)
    turned = jax.sharding.Mesh(grid.devices[::-1], grid.axis_names, axis_types=grid.axis_types)
    for mesh, axes in itertools.product((grid, turned), ("workers", grid.axis_names)):
        yield f"scattered, {mesh.devices.ravel()}, {axes}", same(mesh, scattered(axes), True)
    yield "gathered out of order", is_refused(turned, all_kinds("workers"), "in the order of jax.devices()")
    thin = make_mesh(MESHES["one device of each worker"])
    yield "scattered, nested, unknown devices", same(thin, scattered("workers"), True, nested)


def main() -> None:
    rank, size = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)  # the time is that of compilations
    jax.distributed.initialize(sys.argv[1], size, rank)
    jaxhetero.initialize()
    groups = (
        odd_shapes,
        nested_maps,
        names_of_vmap,
        workers_that_are_not_in_front,
        workers_that_are_not_in_the_order_of_ranks,
    )
    results = [found for group in groups for found in group()]
    jaxhetero.shutdown()
    print(json.dumps({"wrong": [name for name, right in results if not right], "count": len(results)}))


main()
