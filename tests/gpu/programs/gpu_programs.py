"""Programs for a GPU, on a machine without one: how they are lowered, and in which order XLA runs their instructions.

Prints, for each way to reduce gradients, the streams and result counts of the calls and the operand counts of the
barriers in the lowered program. With the argument "compile" and JAX for CUDA, compiles for an H100 as well, and prints
the order: "g" for a matrix product, "S" and "D" for the begin and the end of a bucket's call, "u" for a subtraction.
With the argument "across", prints that order of a step whose sums go on under the next one's forward pass.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

COMPILES = sys.argv[1:] in (["compile"], ["across"])
if COMPILES:
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import jaxhetero  # noqa: E402
from jaxhetero._job import ffi  # noqa: E402

LAYERS, WIDTH, BATCH = 6, 2048, 8192
LAYERS_IN_BUCKET = 2
BUCKET_BYTES = LAYERS_IN_BUCKET * 4 * WIDTH * WIDTH

H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: 1 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  device_memory_size: 84978434048 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
}
"""

Weights = list[jax.Array]


def loss(weights: Weights, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x.sum()


def by_psum(weights: Weights, x: jax.Array) -> Weights:
    totals: Weights = jaxhetero.psum(jax.grad(loss)(weights, x), bucket_bytes=BUCKET_BYTES)
    return totals


def by_psum_in_bfloat16(weights: Weights, x: jax.Array) -> Weights:
    totals: Weights = jaxhetero.psum(
        jax.grad(loss)(weights, x), wire_dtype=jnp.bfloat16, bucket_bytes=BUCKET_BYTES // 2
    )
    return totals


def by_replicated(weights: Weights, x: jax.Array) -> Weights:
    def reduced(weights: Weights) -> jax.Array:
        return loss(jaxhetero.replicated(weights, mean=True, bucket_bytes=BUCKET_BYTES), x)

    return jax.grad(reduced)(weights)


def by_reducers(weights: Weights, x: jax.Array) -> Weights:
    """New weights in the place of gradients."""
    tx = jaxhetero.optimizers.on_reducers(optax.sgd(0.1), bucket_bytes=BUCKET_BYTES)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(tx.init, weights))
    updates, _ = tx.update(jax.grad(loss)(weights, x), state)
    return [weight + update for weight, update in zip(weights, updates, strict=True)]


def describe(gradients_of: Callable[[Weights, jax.Array], Weights], device: jax.Device | None) -> dict[str, Any]:
    def step(weights: Weights, x: jax.Array) -> Weights:
        return [weight - 0.1 * total for weight, total in zip(weights, gradients_of(weights, x), strict=True)]

    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=sharding)] * LAYERS
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=sharding)
    lowered = jax.jit(step, donate_argnums=0).trace(weights, x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    calls = re.findall(r"%\d+(?::(\d+))? = call @\w+\(.*_xla_stream_annotation = \"(\d+)\"", text)
    # One of a single operand only keeps XLA from seeing a constant.
    counts = [operands.count("%") for operands in re.findall(r"optimization_barrier ([^:]*) :", text)]
    return {
        "result_counts": [int(count or 1) for count, _ in calls],
        "streams": [int(stream) for _, stream in calls],
        "barriers": [count for count in counts if count > 1],
        "order": order_of(lowered.compile().as_text()) if COMPILES else None,
    }


def describe_across(device: jax.Device) -> str:
    """Without what is computed for updates: XLA fuses it in several ways."""
    optimizer = jaxhetero.optimizers.across_steps(optax.adamw(0.1), bucket_bytes=BUCKET_BYTES)

    def step(state: Any, x: jax.Array) -> Any:
        weights, state = optimizer.weights(state)
        return optimizer.send(state, jax.grad(loss)(weights, x))

    def on_device(tree: Any) -> Any:
        sharding = jax.sharding.SingleDeviceSharding(device)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    x = on_device(jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
    first = jax.eval_shape(optimizer.init, [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS)
    state = on_device(jax.eval_shape(step, first, x))
    lowered = jax.jit(step, donate_argnums=0).trace(state, x).lower(lowering_platforms=("cuda",))
    return order_of(lowered.compile().as_text()).replace("u", "")


def order_of(text: str) -> str:
    entry = text[text.index("\nENTRY ") :]
    letters = {"gemm": "g", "custom-call": "g", "call-start": "S", "call-done": "D", "loop_subtract": "u"}
    names = re.findall(r"^  (?:ROOT )?%([\w-]+)[^ ]* = ", entry, re.MULTILINE)
    return "".join(letter for name in names for start, letter in letters.items() if name.startswith(start))


def main() -> None:
    device = None
    if COMPILES:
        device = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=H100).devices[0]
    jaxhetero.initialize()
    if COMPILES:
        ffi.register_for_gpus()
    if sys.argv[1:] == ["across"]:
        assert device is not None
        print(json.dumps(describe_across(device)))
        jaxhetero.barrier()
        return jaxhetero.shutdown()
    ways = (by_psum, by_psum_in_bfloat16, by_replicated, by_reducers)
    print(json.dumps({way.__name__: describe(way, device) for way in ways}))
    jaxhetero.barrier()
    jaxhetero.shutdown()


main()
