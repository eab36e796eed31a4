"""Collective x transform x dtype x size against jax.lax, on a mesh of as many devices in one process.

Every worker has as many CPU devices as all workers have together. Ours run on the first few of them, and on those of
the other workers; jax.lax runs on all of them, in rank 0, which compares. The floats are whole numbers, so that sums
are exact in any order and everything must be equal to the bit.

Whole numbers do not tell in which order they were added, or how precisely. The transform "rough" is jit of floats whose
sums are rounded, against the definition: over a worker's devices, then in rank order, 16 bits in float32.
"""

import functools
import itertools
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

WORKERS, DEVICES, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
PLACES = WORKERS * DEVICES
ROOT = 1

FLOATS = ("bfloat16", "float16", "float32", "float64", "complex64")
REALS = FLOATS[:4]
INTEGERS = ("int8", "int32", "uint16", "int64")
OF_FLOATS = ("jvp", "vjp")
FEW = ("bfloat16", "int32")
SHAPES = ((), (0,), (3, 5))

Tree = dict[str, Any]
Function = Callable[[Tree], Tree]


def rows(tree: Tree, join: Callable[..., Any]) -> Tree:
    """A row for every place, to be scattered."""
    return {name: join([leaf * factor for factor in range(PLACES)]) for name, leaf in tree.items()}


def collectives(library: Any, axes: Any) -> dict[str, Function]:
    found: dict[str, Function] = {
        "psum": lambda x: library.psum(x, axes),
        "pmean": lambda x: library.pmean(x, axes),
        "pmax": lambda x: library.pmax(x, axes),
        "pmin": lambda x: library.pmin(x, axes),
        "all_gather": lambda x: library.all_gather(x, axes, axis=-1),
        "all_gather tiled": lambda x: library.all_gather(x, axes, axis=-1, tiled=True),
        "psum_scatter": lambda x: library.psum_scatter(rows(x, jnp.stack), axes),
        "psum_scatter tiled": lambda x: library.psum_scatter(rows(x, jnp.concatenate), axes, tiled=True),
    }
    if library is jaxhetero and DEVICES == 1:
        found["broadcast"] = lambda x: library.broadcast(x, ROOT, axes)
    elif DEVICES == 1:
        found["broadcast"] = lambda x: jax.tree.map(lambda leaf: leaf[ROOT], library.all_gather(x, axes))
    return found


def dtypes_of(name: str, transform: str) -> list[str]:
    """What jax.lax takes; where it is not about dtypes, one of each sort."""
    dtypes = [*FLOATS, *INTEGERS, "bool"]
    if name in ("pmax", "pmin"):
        dtypes = [*REALS, *INTEGERS, "bool"]
    elif "scatter" in name:
        dtypes.remove("bool")
    if transform == "rough":
        return list(FLOATS)
    if transform == "jit":
        return dtypes
    few = FEW[:-1] if transform in OF_FLOATS else FEW
    return [dtype for dtype in dtypes if dtype in few]


def shapes_of(name: str, transform: str) -> list[tuple[int, ...]]:
    """Scalars have nothing to be tiled along, and jax.lax cannot gather or scatter nothing."""
    without = [()] * ("tiled" in name) + [(0,)] * ("scatter" in name or "gather" in name or name == "broadcast")
    return [shape for shape in SHAPES if shape not in without]


def twice(tree: Tree) -> Tree:
    return {name: leaf + leaf for name, leaf in tree.items()}


def pull_back(function: Function, x: Tree, place: jax.Array) -> Tree:
    """The transpose, of cotangents that differ from element to element and from place to place."""
    results, transpose = jax.vjp(function, x)
    cotangents = {
        name: (jnp.arange(leaf.size).reshape(leaf.shape) % 3 + place).astype(leaf.dtype)
        for name, leaf in results.items()
    }
    (pulled,) = transpose(cotangents)
    return dict(pulled)


Transform = Callable[[Function, Tree, jax.Array], Any]
TRANSFORMS: dict[str, Transform] = {
    "jit": lambda function, x, _: function(x),
    "rough": lambda function, x, _: function(x),
    "jvp": lambda function, x, _: jax.jvp(function, (x,), (twice(x),)),
    "vjp": pull_back,
    "vmap": lambda function, x, _: jax.vmap(function)(x),
    "scan": lambda function, x, _: jax.lax.scan(lambda carry, row: (carry, function(row)), None, x)[1],
}
BATCHED = ("vmap", "scan")


def contribution(place: int, dtype: str, shape: tuple[int, ...], rough: bool) -> np.ndarray:
    generator = np.random.default_rng([place, len(shape), sum(shape)])
    if rough:
        real, imaginary = generator.standard_normal((2, *shape))
        return np.asarray(real + 1j * imaginary if dtype.startswith("complex") else real).astype(jnp.dtype(dtype))
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, shape, dtype, endpoint=True)
    numbers = generator.integers(-3, 3, shape, endpoint=True)
    if dtype.startswith("complex"):
        numbers = numbers + 1j * generator.integers(-3, 3, shape)
    return np.asarray(numbers > 0 if dtype == "bool" else numbers).astype(jnp.dtype(dtype))


def inputs(name: str, transform: str, places: range) -> Tree:
    """A tree of all dtypes and sizes, with the places as first axis."""
    tree = {}
    for dtype in dtypes_of(name, transform):
        for shape in shapes_of(name, transform):
            leaf = np.stack([contribution(place, dtype, shape, transform == "rough") for place in places])
            if transform in BATCHED:
                leaf = np.stack([leaf, leaf + leaf], axis=1)
            tree[f"{dtype}{list(shape)}"] = leaf
    return tree


def on_mesh(function: Function, transform: str, mesh: jax.sharding.Mesh, check_vma: bool) -> Callable[..., Any]:
    """The transformed function of every place, and the results with the places as first axis."""

    def shard(x: Tree, place: jax.Array) -> Any:
        results = TRANSFORMS[transform](function, jax.tree.map(lambda leaf: leaf[0], x), place[0])
        return jax.tree.map(lambda leaf: leaf[None], results)

    specs = jax.P(mesh.axis_names)
    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma))


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def cases() -> list[tuple[str, str, str]]:
    """Name, transform and where: in plain jit, or in shard_map with and without types."""
    found = []
    for name, transform in itertools.product(collectives(jaxhetero, "devices"), TRANSFORMS):
        if transform in OF_FLOATS and name in ("pmax", "pmin"):
            continue
        if transform == "rough" and name not in ("psum", "psum_scatter"):
            continue
        if (name, transform) == ("psum_scatter", "vmap"):  # that of jax.lax 0.10 mistakes the batch axis
            continue
        # Without types a transpose is another one; jax.lax, which does not know of the workers, has none for these.
        typed = transform not in OF_FLOATS
        found.append((name, transform, "jit" if DEVICES == 1 else f"shard_map, check_vma={typed}"))
    return found


def run_ours(name: str, transform: str, where: str) -> Any:
    places = range(jaxhetero.rank() * DEVICES, (jaxhetero.rank() + 1) * DEVICES)
    x, numbers = inputs(name, transform, places), np.array(places)
    if where == "jit":
        step = jax.jit(functools.partial(TRANSFORMS[transform], collectives(jaxhetero, None)[name]))
        results = step(jax.tree.map(lambda leaf: leaf[0], x), numbers[0])
        return jax.tree.map(lambda leaf: np.asarray(leaf)[None], results)
    mesh = make_mesh((DEVICES,), ("devices",))
    step = on_mesh(collectives(jaxhetero, "devices")[name], transform, mesh, where.endswith("True"))
    return jax.tree.map(np.asarray, step(x, numbers))


def run_lax(name: str, transform: str) -> Any:
    mesh = make_mesh((WORKERS, DEVICES), ("workers", "devices"))
    step = on_mesh(collectives(jax.lax, mesh.axis_names)[name], transform, mesh, check_vma=False)
    results = step(inputs(name, transform, range(PLACES)), np.arange(PLACES))
    return jax.tree.map(np.asarray, results)


def add_in_rank_order(leaf: np.ndarray) -> np.ndarray:
    """The sum over the places, its first axis."""
    of_workers = [functools.reduce(np.add, leaf[rank * DEVICES : (rank + 1) * DEVICES]) for rank in range(WORKERS)]
    wide = np.float32 if leaf.dtype.itemsize == 2 else leaf.dtype
    return functools.reduce(np.add, [part.astype(wide) for part in of_workers]).astype(leaf.dtype)


def run_definition(name: str) -> Tree:
    """The sums of rough floats."""
    x = inputs(name, "rough", range(PLACES))
    if name == "psum":
        return {key: np.stack([add_in_rank_order(leaf)] * PLACES) for key, leaf in x.items()}
    factors = [np.asarray(place) for place in range(PLACES)]
    return {key: np.stack([add_in_rank_order(leaf * f.astype(leaf.dtype)) for f in factors]) for key, leaf in x.items()}


def differences(ours: Any, theirs: Any) -> list[str]:
    wrong = []
    for (path, leaf), expected in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        if leaf.dtype != expected.dtype or leaf.shape != expected.shape or not np.array_equal(leaf, expected):
            wrong.append(f"{jax.tree_util.keystr(path)}: {leaf.dtype}{leaf.shape} {expected.dtype}{expected.shape}")
    return wrong


def main() -> None:
    jax.config.update("jax_num_cpu_devices", PLACES)
    jax.config.update("jax_enable_x64", True)
    jaxhetero.initialize()
    ours = {case: run_ours(*case) for case in cases()}
    (FOLDER / f"{jaxhetero.rank()}.pickle").write_bytes(pickle.dumps(ours))
    jaxhetero.barrier()
    wrong, rank = {}, jaxhetero.rank()
    jaxhetero.shutdown()
    if rank == 0:
        of_ranks = [pickle.loads((FOLDER / f"{r}.pickle").read_bytes()) for r in range(WORKERS)]
        pairs = dict.fromkeys((name, transform) for name, transform, _ in ours)
        expected = {
            (name, transform): run_definition(name) if transform == "rough" else run_lax(name, transform)
            for name, transform in pairs
        }
        for name, transform, where in ours:
            parts = [results[name, transform, where] for results in of_ranks]
            together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
            if found := differences(together, expected[name, transform]):
                wrong[f"{transform} of {name} in {where}"] = found
    print(json.dumps({"wrong": wrong, "count": len(ours)}))


main()
