"""Exchanges, and reductions in groups of an axis, against jax.lax; prints what was wrong.

Each worker has as many CPU devices as all workers have together. Ours run on the first few of them, and on those of the
other workers; jax.lax runs on all of them. Each worker compares its own rows. The floats are whole numbers. All
collectives of a transform are in one program, so that many are under way at once.
"""

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

WORKERS, DEVICES, CHOSEN = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
PLACES = WORKERS * DEVICES

Tree = dict[str, Any]
Function = Callable[[Tree], Tree]

RING = [(place, (place + 1) % PLACES) for place in range(PLACES)]
PARTIAL = [(0, PLACES - 1), (1, 1)][: PLACES - 1]
# Groups of places, in other orders: one of all, of whole workers, and inside workers.
ALL = [[*range(1, PLACES), 0]]
HALVES = [list(reversed(range(PLACES // 2))), list(range(PLACES // 2, PLACES))]
INSIDE = [list(reversed(range(first, first + DEVICES))) for first in range(0, PLACES, DEVICES)]
EVEN = [ALL, INSIDE, *[HALVES] * (WORKERS == 4)]
UNEVEN = [list(range(DEVICES)), list(range(DEVICES, PLACES))] if WORKERS > 2 else ALL
CUT = [list(range(0, PLACES, 2)), list(range(1, PLACES, 2))]  # which all_to_all alone takes

DTYPES = ("float32", "bfloat16", "int8", "complex64")
TYPES = {"pmax": DTYPES[:3], "pmin": DTYPES[:3], "jvp": DTYPES[:2], "vjp": DTYPES[:2]}


def by_leaf(function: Callable[[jax.Array], Any]) -> Function:
    return lambda tree: jax.tree.map(function, tree)


def rows(x: jax.Array, count: int, axis: int = 0) -> jax.Array:
    return jnp.stack([x + jnp.asarray(row).astype(x.dtype) for row in range(count)], axis)


def exchanges(library: Any, axis: Any) -> dict[str, Function]:
    found: dict[str, Function] = {
        "ring": lambda x: library.ppermute(x, axis, RING),
        "partial": lambda x: library.ppermute(x, axis, perm=PARTIAL),
        "shuffle": lambda x: library.pshuffle(x, axis, list(reversed(range(PLACES)))),
        "swap": by_leaf(lambda x: library.pswapaxes(rows(x, PLACES), axis, 0)),
        "tiled": by_leaf(lambda x: library.all_to_all(jnp.tile(x, (1, PLACES)), axis, 1, 0, tiled=True)),
    }
    if library is jaxhetero:
        found["moved"] = by_leaf(lambda x: library.all_to_all(rows(x, PLACES), axis, 0, 2))
    else:  # The transpose of jax.lax.all_to_all, untiled and with two axes, fails in JAX 0.10.
        found["moved"] = by_leaf(lambda x: jnp.moveaxis(library.all_to_all(rows(x, PLACES), axis, 0, 0), 0, 2))
    return found


def exchanges_in_groups(library: Any, axis: Any) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for groups in [*EVEN, *[CUT] * (PLACES % 2 == 0)]:
        found[f"all_to_all in {groups}"] = by_leaf(
            lambda x, g=groups: library.all_to_all(rows(x, len(g[0])), axis, 0, 0, axis_index_groups=g)
        )
    return found


def without_transpose(library: Any, axis: Any) -> dict[str, Function]:
    places = [(0, 1), (2, 0), (1, 2)]
    return {
        f"all_to_all {split} {concat}": by_leaf(
            lambda x, s=split, c=concat: library.all_to_all(rows(x, PLACES, s), axis, s, c)
        )
        for split, concat in places
    }


def reductions(library: Any, axis: Any) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for groups in EVEN:
        found[f"all_gather in {groups}"] = lambda x, g=groups: library.all_gather(
            x, axis, axis_index_groups=g, axis=1, tiled=True
        )
        found[f"psum_scatter in {groups}"] = by_leaf(
            lambda x, g=groups: library.psum_scatter(rows(x, len(g[0])), axis, axis_index_groups=g)
        )
    for groups in [*EVEN, UNEVEN]:
        found[f"psum in {groups}"] = lambda x, g=groups: library.psum(x, axis, axis_index_groups=g)
    return found


def without_derivative(library: Any, axis: Any) -> dict[str, Function]:
    """Also those whose derivative is rounded."""
    found: dict[str, Function] = {}
    for groups in [*EVEN, UNEVEN]:
        found[f"pmax in {groups}"] = lambda x, g=groups: library.pmax(x, axis, axis_index_groups=g)
        found[f"pmin in {groups}"] = lambda x, g=groups: library.pmin(x, axis, axis_index_groups=g)
    for groups in EVEN:
        found[f"pmean in {groups}"] = lambda x, g=groups: library.pmean(x, axis, axis_index_groups=g)
    return found


def pull_back(function: Function, x: Tree, place: jax.Array) -> Tree:
    """The transpose, of cotangents that differ from element to element and from place to place."""
    results, transpose = jax.vjp(function, x)

    def cotangent(leaf: jax.Array) -> jax.Array:
        return (jnp.arange(leaf.size).reshape(leaf.shape) % 3 + place).astype(leaf.dtype)

    (pulled,) = transpose(jax.tree.map(cotangent, results))
    return dict(pulled)


TRANSFORMS: dict[str, Callable[[Function, Tree, jax.Array], Any]] = {
    "jit": lambda function, x, _: function(x),
    "jvp": lambda function, x, _: jax.jvp(function, (x,), (jax.tree.map(jnp.add, x, x),)),
    "vjp": pull_back,
    "vmap": lambda function, x, _: jax.vmap(function, 1, 1)(x),
    "scan": lambda function, x, _: jax.lax.scan(lambda carry, row: (carry, function(row)), None, x)[1],
}


def collectives(library: Any, axis: Any, transform: str) -> dict[str, Function]:
    found = exchanges(library, axis)
    if transform != "vmap":  # which jax.lax has not
        found |= exchanges_in_groups(library, axis)
    if transform in ("jit", "vjp"):
        found |= reductions(library, axis)
    if transform == "jit":
        found |= without_transpose(library, axis) | without_derivative(library, axis)
    return found


def inputs(name: str, transform: str, places: range) -> Tree:
    dtypes = TYPES.get(transform, TYPES.get(name.split()[0], DTYPES))
    shape = (3, 2, 3) if transform in ("vmap", "scan") else (2, 3)
    values = [np.random.default_rng([place, len(shape)]).integers(-9, 9, shape) for place in places]
    return {dtype: np.stack(values).astype(jnp.dtype(dtype)) for dtype in dtypes}


def run_all(
    library: Any,
    axis: str | None,
    transform: str,
    places: range,
    mesh: jax.sharding.Mesh | None,
    offloaded: bool = False,
) -> Any:
    """The results of all collectives, with the places as first axis."""
    functions = collectives(library, axis, transform)
    operands = {name: inputs(name, transform, places) for name in functions}

    def shard(operands: dict[str, Tree], place: jax.Array) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], operands)
        results = {name: TRANSFORMS[transform](function, own[name], place[0]) for name, function in functions.items()}
        return jax.tree.map(lambda leaf: leaf[None], results)

    specs = jax.P(axis)
    step = jaxhetero.offload(shard, axis_name=axis) if offloaded else shard
    if mesh is not None:
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(step)(operands, np.array(places)))


def make_mesh(count: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("places",))


def differences(transform: str, own_places: range) -> list[str]:
    mesh = None if DEVICES == 1 else make_mesh(DEVICES)
    if transform == "offload":  # of the program of jax.lax itself
        transform, library, axis = "jit", jax.lax, "places"
    else:
        library, axis = jaxhetero, None if DEVICES == 1 else "places"
    ours = run_all(library, axis, transform, own_places, mesh, offloaded=library is jax.lax)
    theirs = run_all(jax.lax, "places", transform, range(PLACES), make_mesh(PLACES))
    wrong = []
    for (path, leaf), expected in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        rows = expected[own_places.start : own_places.stop]
        if leaf.dtype != rows.dtype or leaf.shape != rows.shape or not np.array_equal(leaf, rows):
            wrong.append(f"{transform} {jax.tree_util.keystr(path)}: {leaf.dtype}{leaf.shape} {rows.dtype}{rows.shape}")
    return wrong


def main() -> None:
    jax.config.update("jax_num_cpu_devices", PLACES)
    jaxhetero.initialize()
    first = jaxhetero.rank() * DEVICES
    wrong = list(itertools.chain(*(differences(name, range(first, first + DEVICES)) for name in CHOSEN)))
    sent = jaxhetero.metrics().channel_sent_bytes
    jaxhetero.shutdown()
    print(json.dumps({"wrong": wrong, "channel_sent_bytes": sent}))


main()
