"""Train steps on global arrays in plain ``jax.jit``: parameters as XLA's, and none of XLA's all-reduces.

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
from jax.experimental import multihost_utils

import jaxhetero
from jaxhetero.errors import ConfigError

P = jax.P
DEVICES = int(sys.argv[2])
ROWS = 16
WRONG: list[str] = []


def check(what: str, holds: bool) -> None:
    if not holds:
        WRONG.append(what)


def make_mesh(kind: jax.sharding.AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((jaxhetero.size(), DEVICES), ("data", "model"), axis_types=(kind, kind))


def put(values: np.ndarray, spec: Any, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.make_array_from_callback(values.shape, jax.NamedSharding(mesh, spec), lambda index: values[index])


def inputs(mesh: jax.sharding.Mesh, weight_spec: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    numbers = np.random.default_rng(0)
    first, second, rows = (numbers.normal(size=s).astype(np.float32) for s in ((3, 8), (8, 2), (ROWS, 3)))
    return {"first": put(first, weight_spec, mesh), "second": put(second, P(), mesh)}, put(rows, P("data"), mesh)


def errors_of(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return (jnp.tanh(batch @ params["first"]) @ params["second"]) ** 2


def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean(errors_of(params, batch))


def updated(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def xla_step(params: Any, batch: jax.Array) -> Any:
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    return updated(params, gradients), loss


def explicit_step(params: Any, batch: jax.Array) -> Any:
    """The edits: the parameters are "reduced" while they are differentiated, and the gradients are summed."""

    def loss_and_part(params: Any, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        errors = errors_of(params, batch)
        return jnp.mean(errors), jax.lax.reduce_sum(errors, (0, 1), out_sharding=P(unreduced={"data"}))

    reduced = jax.tree.map(lambda p: jax.reshard(p, P(*jax.typeof(p).sharding.spec, reduced={"data"})), params)
    gradients, error_sum = jax.grad(loss_and_part, has_aux=True)(reduced, batch)
    gradients, error_sum = jaxhetero.psum((gradients, error_sum))
    return updated(params, gradients), error_sum / (2 * ROWS)


def automatic_step(params: Any, batch: jax.Array) -> Any:
    """The edit: loss and gradients are those of each device's rows, and their mean is ours."""

    def mean(params: Any, batch: jax.Array) -> Any:
        return jaxhetero.pmean(jax.value_and_grad(loss_fn)(params, batch), ("data", "model"))

    rows = P(("data", "model"))
    loss, gradients = jax.shard_map(mean, in_specs=(P(), rows), out_specs=P(), check_vma=False)(params, batch)
    return updated(params, gradients), loss


def parts(tree: Any) -> list[np.ndarray]:
    """What this worker's devices have."""
    return [np.asarray(shard.data) for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


def close(left: Any, right: Any) -> bool:
    """What is summed may be rounded in another way: XLA compiles it into another program."""
    return all(np.allclose(a, b, rtol=1e-5) for a, b in zip(parts(left), parts(right), strict=True))


def compiled(step: Callable[..., Any], arguments: Any) -> str:
    return str(jax.jit(step).lower(*arguments).compile().as_text())


def same_sharding(left: jax.Array, right: jax.Array) -> bool:
    return left.sharding.is_equivalent_to(right.sharding, left.ndim)


def compare(name: str, step: Callable[..., Any], kind: jax.sharding.AxisType, weight_spec: Any) -> None:
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        arguments = inputs(mesh, weight_spec)
        ours, theirs = jax.jit(step)(*arguments), jax.jit(xla_step)(*arguments)
        check(f"{name}: values", close(ours, theirs))
        check(f"{name}: shardings", jax.tree.all(jax.tree.map(same_sharding, ours, theirs)))
        text = compiled(step, arguments)
        check(f"{name}: one call", text.count('custom_call_target="jaxhetero_all_reduce"') == 1)
        check(f"{name}: XLA's own step has an all-reduce", "all-reduce(" in compiled(xla_step, arguments))
        if weight_spec == P() or DEVICES == 1:  # else activations are summed inside each worker
            check(f"{name}: no all-reduce of XLA's", "all-reduce(" not in text)


def refused(text: str, function: Callable[[], Any]) -> bool:
    try:
        function()
    except ConfigError as error:
        return text in str(error)
    return False


def details() -> None:
    mesh = make_mesh(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, batch = inputs(mesh, P())
        reduced = jax.reshard(params, P(reduced={"data"}))
        gradients = jax.jit(jax.grad(loss_fn))(reduced, batch)
        whole = jax.jit(jax.grad(loss_fn))(params, batch)
        total = jaxhetero.psum(gradients)
        check("eager", close(total, whole))
        addends = multihost_utils.process_allgather(parts(gradients))  # by leaf and device, of each worker
        sums = [functools.reduce(np.add, of_workers) for of_workers in addends]
        check("eager, to the bit", all(map(np.array_equal, sums, parts(total))))
        check("named axis", close(jaxhetero.psum(gradients, "data"), whole))
        half = jax.tree.map(lambda g: g * jaxhetero.size(), jaxhetero.pmean(gradients))
        check("mean", jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.allclose(a, b)), half, whole)))
        narrow = jaxhetero.psum(gradients, wire_dtype=jnp.bfloat16)
        check("16 bits", jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, 1e-1, 1e-2)), narrow, whole)))
        mixed = {"summed": whole["first"], "unreduced": gradients["second"]}
        check("mixed", refused("is unreduced over no axis", lambda: jaxhetero.psum(mixed)))
        check("another axis", refused("the sum goes over ['model']", lambda: jaxhetero.psum(gradients, "model")))


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rank, size = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    jax.distributed.initialize(sys.argv[1], size, rank)
    jaxhetero.initialize()
    explicit, automatic = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    compare("explicit", explicit_step, explicit, P())
    compare("explicit, sharded weights", explicit_step, explicit, P(None, "model"))
    compare("automatic", automatic_step, automatic, P())
    details()
    with jax.set_mesh(make_mesh(explicit)):
        jaxhetero.shutdown()
    print(json.dumps(WRONG))


main()
