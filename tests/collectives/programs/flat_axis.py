"""Collectives along one mesh axis of all devices of all workers, equal to those of jax.lax; prints which are not.

Arguments: the coordinator of jax.distributed, and the number of devices of each worker.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

P = jax.P
AXIS = "devices"
DEVICES = int(sys.argv[2])
Case = Callable[[Any, jax.Array], Any]


def gradient(collective: Callable[..., Any], **options: Any) -> Case:
    def loss(library: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(getattr(library, collective.__name__)(x, AXIS, **options)))

    return lambda library, x: jax.grad(functools.partial(loss, library))(x)


def in_two_halves(library: Any, x: jax.Array) -> Any:
    """A sum that could outlive its program."""
    tree = {"a": x, "b": x[0, 0], "empty": x[:0]}
    return jaxhetero.psum_done(jaxhetero.psum_start(tree, AXIS)) if library is jaxhetero else library.psum(tree, AXIS)


CASES: dict[str, Case] = {
    "psum": lambda library, x: library.psum({"a": x, "b": x[0, 0]}, AXIS),
    "psum_start and psum_done": in_two_halves,
    "psum of integers": lambda library, x: library.psum(jnp.int32(10 * x), AXIS),
    "psum of nothing": lambda library, x: library.psum(x[:0], AXIS),
    "psum(1)": lambda library, x: library.psum(1, AXIS) * x,
    "pmean": lambda library, x: library.pmean(x, AXIS),
    "pmax": lambda library, x: library.pmax(x, AXIS),
    "pmin": lambda library, x: library.pmin(x, AXIS),
    "all_gather": lambda library, x: library.all_gather(x, AXIS),
    "all_gather, tiled": lambda library, x: library.all_gather(x, AXIS, axis=1, tiled=True),
    "psum_scatter": lambda library, x: library.psum_scatter(x, AXIS, scatter_dimension=1),
    "psum_scatter, tiled": lambda library, x: library.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True),
    "gradient of psum": gradient(jax.lax.psum),
    "gradient of all_gather": gradient(jax.lax.all_gather),
    "gradient of psum_scatter": gradient(jax.lax.psum_scatter, scatter_dimension=1),
}


def broadcast(typed: bool, library: Any, x: jax.Array) -> jax.Array:
    """What the first device of rank 1 has."""
    if library is jaxhetero:
        return jaxhetero.broadcast(x, 1, AXIS)
    return jax.lax.all_gather(x, AXIS, to="invarying" if typed else "varying")[DEVICES]


def wrong_broadcasts(typed: bool) -> list[str]:
    """As those above, but for ``offload``: JAX has no broadcast."""
    found = []
    for name, case in {
        "broadcast": functools.partial(broadcast, typed),
        "broadcast of nothing": lambda library, x: broadcast(typed, library, x[:0]),
        "gradient of broadcast": lambda library, x: jax.grad(lambda x: jnp.sum(jnp.sin(broadcast(typed, library, x))))(
            x
        ),
    }.items():
        ours, theirs = (results(functools.partial(case, library), typed) for library in (jaxhetero, jax.lax))
        if not all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(ours, theirs, strict=True)):
            found.append(f"{name}, {'typed' if typed else 'untyped'}")
    return found


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def results(case: Callable[[jax.Array], Any], typed: bool) -> list[np.ndarray]:
    """Of this worker's devices."""
    mesh, count = make_mesh(), jax.device_count()
    values = np.random.default_rng(0).normal(size=(count, 3, count, 5)).astype(np.float32)
    rows = jax.make_array_from_callback(values.shape, jax.NamedSharding(mesh, P(AXIS)), lambda index: values[index])

    def one(rows: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: varying(leaf)[None], case(rows[0]))

    def varying(leaf: jax.Array) -> jax.Array:
        constant = typed and AXIS not in jax.typeof(leaf).mat.varying
        return jax.lax.pcast(leaf, AXIS, to="varying") if constant else leaf

    mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=typed))
    return [np.asarray(shard.data) for leaf in jax.tree.leaves(mapped(rows)) for shard in leaf.addressable_shards]


def wrong(name: str, case: Case, typed: bool) -> list[str]:
    theirs = results(functools.partial(case, jax.lax), typed)
    offloaded = jaxhetero.offload(functools.partial(case, jax.lax))
    ways = {"ours": functools.partial(case, jaxhetero), "offloaded": offloaded}
    kind = "typed" if typed else "untyped"
    found, moved = [], []
    for way, function in ways.items():
        rounds = jaxhetero.metrics().round_count
        pairs = zip(results(function, typed), theirs, strict=True)
        if not all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs):
            found.append(f"{name}, {way}, {kind}")
        moved.append(jaxhetero.metrics().round_count > rounds)
    if moved[0] != moved[1]:  # JAX's own collectives would give the same results
        found.append(f"{name}, left to JAX, {kind}")
    return found


def sent_bytes_of_psum() -> float:
    """What this worker sends, in units of what a device sums."""
    count, size = jax.device_count(), 1 << 20
    ones = jax.make_array_from_callback(
        (count, size), jax.NamedSharding(make_mesh(), P(AXIS)), lambda index: np.ones((1, size), np.float32)
    )
    before = jaxhetero.metrics().sent_bytes
    summed = jax.shard_map(lambda x: jaxhetero.psum(x, AXIS), mesh=make_mesh(), in_specs=P(AXIS), out_specs=P())
    jax.block_until_ready(jax.jit(summed)(ones))
    return (jaxhetero.metrics().sent_bytes - before) / (4 * size)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)  # the time is that of compilations
    rank, size = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    jax.distributed.initialize(sys.argv[1], size, rank)
    jaxhetero.initialize()
    found = [text for typed in (True, False) for name, case in CASES.items() for text in wrong(name, case, typed)]
    found += [text for typed in (True, False) for text in wrong_broadcasts(typed)]
    sent = sent_bytes_of_psum()
    jaxhetero.shutdown()
    print(json.dumps({"wrong": found, "sent": sent}))


main()
