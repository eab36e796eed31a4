"""Collectives over groups of four workers against NumPy, to the bit; prints what was wrong.

Disjoint groups, overlapping ones and all workers, in one program and in programs that differ from worker to worker.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxhetero

GROUPS = [(0, 1), (2, 3), (0, 2, 3), (1, 3), None]
COUNTS = (1, 1023, 300_000)
DTYPES = [np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("int32")]

Group = tuple[int, ...] | None
wrong: list[str] = []


def members(group: Group) -> tuple[int, ...]:
    return group or tuple(range(jaxhetero.size()))


def contribution(rank: int, dtype: np.dtype, count: int) -> np.ndarray:
    values = np.random.default_rng([rank, count]).standard_normal(count, np.float32)
    return (1000 * values if dtype.kind == "i" else values).astype(dtype)


def expected(group: Group, dtype: np.dtype, count: int, add: Callable[..., Any] = np.add) -> np.ndarray:
    """In rank order; 16 bits in float32."""
    wide = np.dtype("float32") if dtype.itemsize == 2 else dtype
    parts = [contribution(rank, dtype, count).astype(wide) for rank in members(group)]
    return np.asarray(functools.reduce(add, parts)).astype(dtype)


def check(name: str, got: Any, want: np.ndarray) -> None:
    array = np.asarray(got)
    if array.dtype != want.dtype or array.tobytes() != want.tobytes():
        wrong.append(name)


def check_reductions() -> None:
    """All at once, in a program that only the workers of the same groups have."""
    rank = jaxhetero.rank()
    own = [group for group in GROUPS if rank in members(group)]
    operators = {"psum": np.add, "pmax": np.maximum, "pmin": np.minimum}
    tree = {f"{dtype}[{count}]": contribution(rank, dtype, count) for dtype in DTYPES for count in COUNTS}

    @jax.jit
    def run(tree: Any) -> Any:
        return {f"{name} {group}": getattr(jaxhetero, name)(tree, workers=group) for name in operators for group in own}

    for _ in range(2):
        results = run(tree)
        for name, operator in operators.items():
            for group in own:
                for dtype in DTYPES:
                    for count in COUNTS:
                        leaf = f"{dtype}[{count}]"
                        got = results[f"{name} {group}"][leaf]
                        check(f"{name} {group} {leaf}", got, expected(group, dtype, count, operator))


def check_mean_and_broadcast() -> None:
    rank = jaxhetero.rank()
    float32 = np.dtype("float32")
    for group in GROUPS:
        if rank not in members(group):
            continue
        x = contribution(rank, float32, 1023)
        total = expected(group, float32, 1023)
        mean = np.asarray(jnp.asarray(total) / len(members(group)))  # XLA divides by 3 in its own way
        check(f"pmean {group}", jaxhetero.pmean(x, workers=group), mean)
        root = members(group)[-1]
        got = jaxhetero.broadcast(x, root, workers=group)
        check(f"broadcast {group}", got, contribution(root, float32, 1023))
        jaxhetero.barrier(workers=group)
    check("alone", jaxhetero.psum(contribution(rank, float32, 7), workers=[rank]), contribution(rank, float32, 7))


def check_transforms() -> None:
    """As for a sum over all workers: a sum over a group is its own transpose, and linear."""
    rank = jaxhetero.rank()
    group = (0, 2) if rank % 2 == 0 else (1, 3)

    def total(x: jax.Array) -> jax.Array:
        return jaxhetero.psum(x, workers=group)

    x = jnp.arange(6.0).reshape(2, 3) + rank
    both = 2 * jnp.arange(6.0).reshape(2, 3) + sum(group)
    check("jvp", jax.jvp(total, (x,), (2 * x,))[1], np.asarray(2 * both))
    check("vmap", jax.vmap(total)(x), np.asarray(both))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum((rank + 1) * total(x))))(x)
    check("grad", gradient, np.full((2, 3), sum(group) + 2, np.float32))
    doubled = jax.lax.scan(lambda carry, row: (carry, total(row)), None, x)[1]
    check("scan", doubled, np.asarray(both))


def check_programs_that_differ() -> None:
    """The members of a group have their own calls before the common one, and compile them in other orders."""
    rank = jaxhetero.rank()

    def sums(x: jax.Array, *groups: Group) -> list[jax.Array]:
        return [jaxhetero.psum(x, workers=group, name="same") for group in groups]

    programs: dict[int, list[list[Group]]] = {
        0: [[(0, 1), (0, 3), (0, 3)], [(0, 1)]],
        1: [[(0, 1)], [(1, 2), (0, 1)]],
        2: [[(1, 2)]],
        3: [[(0, 3), (0, 3)]],
    }
    for groups in programs[rank]:
        for group, got in zip(groups, jax.jit(lambda x, groups=groups: sums(x, *groups))(jnp.ones(5)), strict=True):
            check(f"program {groups}", got, np.full(5, len(members(group)), np.float32))


def main() -> None:
    jaxhetero.initialize()
    check_reductions()
    check_mean_and_broadcast()
    check_transforms()
    check_programs_that_differ()
    jaxhetero.shutdown()
    print(json.dumps(wrong))


main()
