"""Gradients that JAX has summed already are refused, and what the refusal advises gives the right ones."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxhetero
from jaxhetero.errors import ConfigError

KIND, DEVICES, JAX_COORDINATOR = sys.argv[1], int(sys.argv[2]), sys.argv[3]
P = jax.P
WEIGHTS = {"bias": np.float32(0.5), "kernel": np.arange(3, dtype=np.float32)}

Params = dict[str, Any]
Step = Callable[[Params, jax.Array], Any]


def example(place: int) -> np.ndarray:
    """What the device at ``place`` among those of all workers learns from."""
    return np.arange(3, dtype=np.float32) + place


def loss(params: Params, x: Any) -> jax.Array:
    return jnp.sum(jnp.sin(x * params["kernel"] + params["bias"]) ** 2)


def make_mesh(size: int) -> tuple[jax.sharding.Mesh, Any]:
    """The mesh, and its axes to sum over."""
    shape, names = ((DEVICES,), ("devices",)) if KIND == "own" else ((size, DEVICES), ("workers", "devices"))
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    return mesh, names if len(names) > 1 else names[0]


def advised(axes: Any) -> dict[str, Step]:
    """Each gives the mean gradient with and without types."""

    def of_cast_parameters(params: Params, x: jax.Array) -> Any:
        return jaxhetero.pmean(jax.grad(loss)(jax.lax.pcast(params, axes, to="varying"), x), axes)

    def through_the_hook(params: Params, x: jax.Array) -> Any:
        return jax.grad(lambda params: loss(jaxhetero.replicated(params, axes, mean=True), x))(params)

    def chained(params: Params, x: jax.Array) -> Any:
        gradients = jax.grad(loss)(jax.lax.pcast(params, axes, to="varying"), x)
        return jaxhetero.all_reduce_gradients(axes).update(gradients, optax.EmptyState())[0]

    def sums(params: Params, x: jax.Array) -> Any:
        count = jaxhetero.psum(1, axes)
        cast = jaxhetero.psum(jax.grad(loss)(jax.lax.pcast(params, axes, to="varying"), x), axes)
        hooked = jax.grad(lambda params: loss(jaxhetero.replicated(params, axes), x))(params)
        return jax.tree.map(lambda one, other: (one + other) / (2 * count), cast, hooked)

    return {function.__name__: function for function in (of_cast_parameters, through_the_hook, chained, sums)}


def mistaken(axes: Any) -> dict[str, Step]:
    """Each takes the mean of what JAX may have summed."""

    def pmean(params: Params, x: jax.Array) -> Any:
        return jaxhetero.pmean(jax.grad(loss)(params, x), axes)

    def psum(params: Params, x: jax.Array) -> Any:
        total = jaxhetero.psum(jax.grad(loss)(params, x), axes)
        return jax.tree.map(lambda leaf: leaf / jaxhetero.psum(1, axes), total)

    def all_reduce_gradients(params: Params, x: jax.Array) -> Any:
        return jaxhetero.all_reduce_gradients(axes).update(jax.grad(loss)(params, x), optax.EmptyState())[0]

    def psum_scatter(params: Params, x: jax.Array) -> Any:
        count = jaxhetero.psum(1, axes)
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), jax.grad(loss)(params, x))
        rows = jaxhetero.psum_scatter(copies, axes)
        return jax.tree.map(lambda leaf: leaf / count, jaxhetero.pmean(rows, axes))

    return {function.__name__: function for function in (pmean, psum, all_reduce_gradients, psum_scatter)}


def counts(axes: Any) -> Step:
    def step(params: Params, x: jax.Array) -> Any:
        del params
        same = jnp.where(jaxhetero.pmax(x, axes)[0] > -1, 1, 0)
        copies = jax.lax.pcast(same.astype(jnp.float32), axes, to="varying")
        return jaxhetero.psum((same, same == 1, 1, 1.0, np.float32(1), copies), axes)

    return step


def is_right(step: Step, mesh: jax.sharding.Mesh, expected: Any, **options: Any) -> bool:
    rows = jax.sharding.NamedSharding(mesh, P(mesh.axis_names))
    places = range(jaxhetero.rank() * DEVICES, (jaxhetero.rank() + 1) * DEVICES)
    x = jax.make_array_from_process_local_data(rows, np.stack([example(place) for place in places]))

    def shard(params: Params, x: jax.Array) -> Any:
        return step(params, x[0])

    specs = P(), P(mesh.axis_names)
    results = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P(), **options))(WEIGHTS, x)
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    return all(np.allclose(result.addressable_data(0), value, rtol=1e-5) for result, value in pairs)


def is_refused(step: Step, mesh: jax.sharding.Mesh, axes: Any) -> bool:
    """With a leaf, the axes and the way out."""
    several = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)
    named = repr(several if len(several) > 1 else several[0])
    try:
        is_right(step, mesh, WEIGHTS)
    except ConfigError as error:
        texts = (f"at ['bias'] does not vary over mesh axis {named}.", f"pcast(params, {named},", f"(params, {axes!r}")
        return all(text in str(error) for text in texts)
    return False


def main() -> None:
    rank, size = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if KIND == "global":
        jax.distributed.initialize(JAX_COORDINATOR, size, rank)
    jaxhetero.initialize()
    mesh, axes = make_mesh(size)
    gradients = [jax.grad(loss)(WEIGHTS, example(place)) for place in range(size * DEVICES)]
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *gradients)

    wrong = []
    for check_vma in (True, False):
        found = {name: is_right(step, mesh, mean, check_vma=check_vma) for name, step in advised(axes).items()}
        found["counts"] = is_right(counts(axes), mesh, (size * DEVICES,) * 6, check_vma=check_vma)
        # Where JAX has nothing to sum over, in its own mesh of one device, the sum over the workers is still to come.
        summed = check_vma and mesh.size > 1
        for name, step in mistaken(axes).items():
            found[name] = is_refused(step, mesh, axes) if summed else is_right(step, mesh, mean, check_vma=check_vma)
        wrong += [f"{name}, check_vma={check_vma}" for name, right in found.items() if not right]
    jaxhetero.shutdown()
    print(json.dumps(wrong))


main()
