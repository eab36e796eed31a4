"""Sums that outlive their programs; prints whether each is as with psum, and the error of each mistake."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxhetero
from jaxhetero.errors import JaxheteroError

Tree = Any


def tree_of(rank: int, seed: int = 0) -> Tree:
    generator = np.random.default_rng([rank, seed])
    return {
        "large": jnp.asarray(generator.normal(size=(700, 500)), jnp.float32),
        "half": jnp.asarray(generator.normal(size=33), jnp.bfloat16),
        "count": jnp.asarray(generator.integers(0, 9, 5), jnp.int32),
        "is_good": jnp.asarray(generator.integers(0, 2, 3), jnp.bool_),
        "empty": jnp.zeros((0, 4), jnp.float32),
        "scalar": jnp.float32(generator.normal()),
    }


def same(a: Tree, b: Tree) -> bool:
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(leaves, others, strict=True)
    )


def in_one_program() -> bool:
    x = tree_of(jaxhetero.rank())
    both = jax.jit(lambda x: (jaxhetero.psum_done(jaxhetero.psum_start(x, bucket_bytes=300_000)), jaxhetero.psum(x)))
    return same(*both(x))


def in_two_programs() -> bool:
    """Several steps. The rounds go on between the programs: the second one runs when they are over."""
    start = jax.jit(lambda x: jaxhetero.psum_start(x, mean=True, wire_dtype=jnp.bfloat16, name="two"))
    done = jax.jit(jaxhetero.psum_done)
    mean = jax.jit(lambda x: jaxhetero.pmean(x, wire_dtype=jnp.bfloat16))
    agree = True
    for seed in range(3):
        x = tree_of(jaxhetero.rank(), seed)
        pending = start(x)
        buckets = len(jax.tree.leaves(pending))
        while sum(times.op.startswith("two bucket") for times in jaxhetero.timeline()) < buckets * (seed + 1):
            time.sleep(0.001)
        agree = agree and same(done(pending), mean(x))
    return agree


def outside_of_jit() -> bool:
    x = tree_of(jaxhetero.rank(), 7)
    return same(jaxhetero.psum_done(jaxhetero.psum_start(x)), jaxhetero.psum(x))


def in_a_scan() -> bool:
    """Each iteration finishes what the one before has started."""

    def step(carry: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
        total = jaxhetero.psum_done(carry)
        return jaxhetero.psum_start(x, name="scanned"), total

    def run(xs: jax.Array) -> tuple[Tree, jax.Array]:
        return jax.lax.scan(step, jaxhetero.psum_start(xs[0], name="scanned"), xs[1:])

    xs = jnp.arange(4 * 3000, dtype=jnp.float32).reshape(4, 3000) * (1 + jaxhetero.rank())
    last, totals = jax.jit(run)(xs)
    return same(jnp.concatenate([totals, jaxhetero.psum_done(last)[None]]), jaxhetero.psum(xs))


def several_of_an_op() -> bool:
    """Finished in another order than they were started in."""
    start = jax.jit(lambda x: jaxhetero.psum_start(x, name="several"))
    pendings = [start(jnp.full(1000, 10.0**number)) for number in range(3)]
    totals = [jaxhetero.psum_done(pendings[number])[0] for number in (2, 0, 1)]
    return [float(total) for total in totals] == [200.0, 2.0, 20.0]


def in_a_group() -> bool:
    rank = jaxhetero.rank()
    pending = jax.jit(lambda x: jaxhetero.psum_start(x, workers=[rank]))(jnp.arange(9.0))
    return same(jaxhetero.psum_done(pending), jnp.arange(9.0))


def on_a_mesh() -> bool:
    """Two devices of each worker: each sends its half. Two programs, with types and without."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("local",))
    varying = PartitionSpec("local")
    agree = True
    for typed in (True, False):

        def mapped(function: Any, in_specs: Any, out_specs: Any, typed: bool = typed) -> Any:
            return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=typed))

        start = mapped(lambda x: jaxhetero.psum_start(x, "local", mean=True, name="meshed"), varying, varying)
        done = mapped(jaxhetero.psum_done, varying, PartitionSpec())
        mean = mapped(lambda x: jaxhetero.pmean(x, "local", name="mean"), varying, PartitionSpec())
        x = jnp.arange(2 * 999, dtype=jnp.float32).reshape(2, 999) * (1 + jaxhetero.rank())
        agree = agree and same(done(start(x)), mean(x))
    return agree


def is_counted() -> bool:
    before = jaxhetero.metrics()
    pending = jax.block_until_ready(jax.jit(lambda x: jaxhetero.psum_start(x, name="counted"))(jnp.ones(5000)))
    during = jaxhetero.metrics()
    jax.block_until_ready(jaxhetero.psum_done(pending))
    after = jaxhetero.metrics()
    assert after.done_wait_us >= before.done_wait_us
    return [m.pending_count for m in (before, during, after)] == [0, 1, 0] and during.pending_bytes == 20_000


def is_kept_unused() -> bool:
    """A start whose result nobody uses runs, as the other worker may use its own."""
    rank = jaxhetero.rank()
    pending = jax.jit(lambda x: jaxhetero.psum_start(x, name="unused"))

    @jax.jit
    def drop(x: jax.Array) -> jax.Array:
        jaxhetero.psum_start(x, name="unused")
        return x + 1

    if rank == 0:
        jax.block_until_ready(drop(jnp.ones(3000)))
        return jaxhetero.metrics().pending_count == 1
    return same(jaxhetero.psum_done(pending(jnp.ones(3000))), jnp.full(3000, 2.0))


def is_asked_for_as_needed() -> bool:
    """XLA has what comes later in a program wait for memory that had been used before: for other totals."""
    x = {"last": jnp.ones(30), "first": jnp.ones(40), "middle": jnp.ones(50)}
    priority = {"last": 3, "first": 1, "middle": 2}
    pending = jax.jit(lambda x: jaxhetero.psum_start(x, priority=priority, bucket_bytes=1, name="ordered"))(x)
    finish = jax.jit(jaxhetero.psum_done).lower(pending).compile()
    calls = re.findall(r"= f32\[(\d+)\]\S* custom-call\(%pending", finish.as_text())
    return same(finish(pending), jax.tree.map(lambda leaf: 2 * leaf, x)) and calls == ["40", "50", "30"]


def is_finished_unused() -> bool:
    """A program that does not look at a total has finished the round all the same."""
    pending = jax.jit(lambda x: jaxhetero.psum_start(x, name="not looked at"))(jnp.ones(3000))

    @jax.jit
    def finish(pending: jaxhetero.Pending, x: jax.Array) -> jax.Array:
        jaxhetero.psum_done(pending)
        return x + 1

    before = jaxhetero.metrics().pending_count
    jax.block_until_ready(finish(pending, jnp.ones(3000)))
    return jaxhetero.metrics().pending_count == before - 1


def error_of(run: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(run())
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"


def mistakes() -> dict[str, str]:
    x = jnp.ones(3000)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("local",))
    spec = PartitionSpec("local")

    def start(x: jax.Array, **options: Any) -> Any:
        return jaxhetero.psum_start(x, name="grads", **options)

    def start_within(x: jax.Array) -> jax.Array:
        start(jax.lax.stop_gradient(x))
        return jnp.sum(jnp.sin(x))

    def start_on_mesh(x: jax.Array) -> Any:
        return jaxhetero.psum_start(x, "local", name="meshed")

    on_mesh = jax.jit(jax.shard_map(start_on_mesh, mesh=mesh, in_specs=spec, out_specs=spec))
    finish = jax.jit(jax.shard_map(jaxhetero.psum_done, mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))
    meshed = on_mesh(jnp.ones((2, 3000)))
    found = {
        "elsewhere": error_of(lambda: jaxhetero.psum_done(meshed)),
        "checkpoint": error_of(lambda: jax.jit(jax.grad(jax.checkpoint(start_within)))(x)),
        "vmap": error_of(lambda: jax.vmap(start)(jnp.ones((2, 3)))),
        "gradient": error_of(lambda: jax.grad(lambda x: jnp.sum(jaxhetero.psum_done(start(x))))(x)),
        "no pending": error_of(lambda: jaxhetero.psum_done(x)),
        "priority": error_of(lambda: start(x, priority="high")),
        "float8": error_of(lambda: start(jnp.ones(3, jnp.float8_e4m3fn))),
    }
    jax.block_until_ready(finish(meshed))
    pending = jax.jit(start)(x)
    jax.block_until_ready(jaxhetero.psum_done(pending))
    found["twice"] = error_of(lambda: jaxhetero.psum_done(pending))
    found["stored"] = error_of(lambda: jaxhetero.psum_done(jax.tree.map(lambda ticket: ticket.at[0].add(1), pending)))
    return found


def main() -> None:
    jaxhetero.initialize()
    cases = [in_one_program, in_two_programs, outside_of_jit, in_a_scan, several_of_an_op, in_a_group, on_a_mesh]
    cases += [is_asked_for_as_needed, is_counted, is_finished_unused, is_kept_unused]
    found: dict[str, Any] = {case.__name__: case() for case in cases}
    found["mistakes"] = mistakes()
    try:
        jaxhetero.shutdown()
        found["shutdown"] = "nothing"
    except JaxheteroError as error:
        found["shutdown"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


main()
