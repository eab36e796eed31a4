"""Prints means with weights of many kinds."""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxhetero

jaxhetero.initialize()
mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
means = {}


def mean_over_devices(weight: jax.Array) -> jax.Array:
    def mean(row: jax.Array) -> jax.Array:
        result: jax.Array = jaxhetero.pmean(row, "devices", weight=weight, name=str(weight.dtype))
        return result

    in_parts = jax.shard_map(mean, mesh=mesh, in_specs=PartitionSpec("devices"), out_specs=PartitionSpec())
    return jax.jit(in_parts)(jnp.arange(8.0))


for weight in (jnp.uint8(200), jnp.int8(100), jnp.int32(1 << 30), jnp.float16(40000), jnp.bool_(True)):
    means[str(weight.dtype)] = mean_over_devices(weight)

# Weights that both round to 2048.
for wire_dtype, weight in ((jnp.float16, 2049), (jnp.bfloat16, 2054)):
    name = f"equal {jnp.dtype(wire_dtype)}"
    means[name] = jaxhetero.pmean(jnp.full(4, 0.75), weight=weight, wire_dtype=wire_dtype, name=name)
small = jnp.full(4, 1e-3)
means["too large for float16"] = jaxhetero.pmean(small, weight=70_000, wire_dtype=jnp.float16, name="large")
means["zero"] = jaxhetero.pmean(small, weight=0, name="zero")
jaxhetero.shutdown()
# JSON has no NaN.
print(json.dumps({name: ["nan" if np.isnan(x) else float(x) for x in mean] for name, mean in means.items()}))
