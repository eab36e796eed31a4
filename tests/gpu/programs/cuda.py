"""What arrays of a GPU go through, with a stand-in for the driver: prints what the driver saw."""

import json
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

sys.path.insert(0, str(Path(__file__).parents[3]))
from lab.fake_cuda import FakeCuda

LEAVES, COUNT, STEPS = 6, 50_000, 5


def step(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    # A bucket for each leaf, all in flight together, and a use of the operands besides.
    sums = jaxhetero.psum(tree, bucket_bytes=4 * COUNT, name="sums")
    return {name: sums[name] - tree[name] for name in tree}


def across(pending: jaxhetero.Pending, tree: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jaxhetero.Pending]:
    """Takes the totals of the program before, and starts new ones."""
    return jaxhetero.psum_done(pending), start(tree)


def start(tree: dict[str, jax.Array]) -> jaxhetero.Pending:
    return jaxhetero.psum_start(tree, bucket_bytes=4 * COUNT, wire_dtype="bfloat16", name="across")


def main() -> None:
    jaxhetero.initialize()
    driver = FakeCuda(os.environ["JAXHETERO_CUDA_STAND_IN"])
    driver.set_speed(2e9, 20)
    rank = jaxhetero.rank()
    generator = np.random.default_rng(7)
    leaves = {str(leaf): generator.integers(-9, 9, (2, COUNT)).astype(np.float32) for leaf in range(LEAVES)}
    others = {name: leaf[1 - rank] for name, leaf in leaves.items()}
    compiled = jax.jit(step)
    tree = {name: jnp.asarray(leaf[rank]) for name, leaf in leaves.items()}
    wrong = 0
    for _ in range(STEPS):
        results = compiled(tree)
        wrong += sum(not np.array_equal(np.asarray(results[name]), others[name]) for name in others)
    root = jaxhetero.broadcast(tree["0"], root=1)
    wrong += not np.array_equal(np.asarray(root), leaves["0"][1])
    jaxhetero.check()
    text = compiled.trace(tree).lower(lowering_platforms=("cuda",)).as_text()
    streams = re.findall(r'_xla_stream_annotation = "(\d+)"', text)
    of_next = jax.jit(across).trace(jax.eval_shape(start, tree), tree).lower(lowering_platforms=("cuda",)).as_text()
    jaxhetero.shutdown()
    counts = {
        name: driver.call_count(name)
        for name in ("cuMemHostAlloc", "cuMemsetD8Async", "cuStreamWaitValue32_v2", "cuMemcpyDtoHAsync_v2")
    }
    calls = text.count("@jaxhetero_all_reduce(")
    calls_across = [of_next.count(f"@jaxhetero_{name}(") for name in ("start", "done")]
    calls_across.append(of_next.count("_xla_stream_annotation"))
    print(
        json.dumps(
            {
                "wrong": wrong,
                "violations": driver.violations(),
                "counts": counts,
                "streams": streams,
                "calls": calls,
                "calls_across": calls_across,
            }
        )
    )


main()
