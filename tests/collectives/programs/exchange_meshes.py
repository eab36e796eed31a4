"""Exchanges, and reductions in groups of axes, in a global mesh of 2 workers of 2 devices, against jax.lax there.

With types and without. jax.lax takes groups without types alone.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

WORKERS = DEVICES = 2
AXES = ("workers", "devices")
TURNED = ("devices", "workers")
SWAP = [(0, 1), (1, 0)]
CHAIN = [(0, 1), (1, 2), (2, 3)]

Function = Callable[[Any, jax.Array], jax.Array]


def of_product(function: Function) -> Function:
    """The gradient of what all devices have of a product with its own operand."""
    return lambda library, x: jax.grad(lambda x: jnp.sum(function(library, x) * x))(x)


EXCHANGES: dict[str, Function] = {
    "permute workers": lambda library, x: library.ppermute(x, "workers", SWAP),
    "permute some": lambda library, x: library.ppermute(x, "workers", SWAP[:1]),
    "permute devices": lambda library, x: library.ppermute(x, "devices", SWAP[:1]),
    "permute all": lambda library, x: library.ppermute(x, AXES, CHAIN),
    "all to workers": lambda library, x: library.all_to_all(x[:2], "workers", 0, 1),
    "all to devices": lambda library, x: library.all_to_all(x[:2], "devices", 0, 1),
    "all to all": lambda library, x: library.all_to_all(x, AXES, 0, 1),
    "all to turned": lambda library, x: library.all_to_all(x, TURNED, 1, 1, tiled=True),
}
EXCHANGES |= {f"gradient of {name}": of_product(EXCHANGES[name]) for name in ("permute workers", "permute all")}

GROUPS: dict[str, Function] = {
    "psum of each worker": lambda library, x: library.psum(x, "workers", axis_index_groups=[[0], [1]]),
    "psum of both": lambda library, x: library.psum(x, "workers", axis_index_groups=[[1, 0]]),
    "psum of all": lambda library, x: library.psum(x, AXES, axis_index_groups=[[1, 0, 3, 2]]),
    "pmax inside": lambda library, x: library.pmax(x, TURNED, axis_index_groups=[[0, 2], [3, 1]]),
    "all_gather inside": lambda library, x: library.all_gather(x, AXES, axis_index_groups=[[1, 0], [2, 3]]),
    "all_gather of all": lambda library, x: library.all_gather(x, TURNED, axis_index_groups=[[1, 0, 2, 3]]),
    "psum_scatter inside": lambda library, x: library.psum_scatter(x[:2], TURNED, axis_index_groups=[[0, 2], [3, 1]]),
    "psum_scatter of all": lambda library, x: library.psum_scatter(x, AXES, axis_index_groups=[[3, 1, 2, 0]]),
    "all_to_all across": lambda library, x: library.all_to_all(x[:2], AXES, 0, 0, axis_index_groups=[[0, 2], [3, 1]]),
}
GROUPS |= {f"gradient of {name}": of_product(GROUPS[name]) for name in ("psum of both", "psum of all")}
UNTYPED: dict[str, Function] = {
    "psum inside": lambda library, x: library.psum(x, AXES, axis_index_groups=[[1, 0], [2, 3]]),
}


def turned(library: Any, x: jax.Array) -> Any:
    return library.ppermute(x, TURNED, CHAIN)


offloaded_turned = jaxhetero.offload(lambda x: turned(jax.lax, x))

REFUSED: dict[str, Function] = {
    "name several axes in the order of the mesh": turned,
    "in typed jax.shard_map; pass check_vma=False": UNTYPED["psum inside"],
    "cuts workers, of which each has 2 devices": lambda library, x: library.psum(
        x, AXES, axis_index_groups=[[0, 2], [1, 3]]
    ),
    "must be in one group": lambda library, x: library.psum(x, "workers", axis_index_groups=[[0], [0]]),
    "the groups must be of one size": lambda library, x: library.all_gather(
        x, AXES, axis_index_groups=[[0], [1, 2, 3]]
    ),
}


def run(mesh: jax.sharding.Mesh, function: Function, library: Any, x: jax.Array, check_vma: bool) -> np.ndarray:
    """The results of this worker's devices."""

    def shard(x: jax.Array) -> jax.Array:
        return function(library, x[0])[None]

    step = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=jax.P(AXES), out_specs=jax.P(AXES), check_vma=check_vma))
    return np.stack([np.asarray(shard.data)[0] for shard in step(x).addressable_shards])


def main() -> None:
    rank = int(os.environ["JAXHETERO_RANK"])
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(sys.argv[1], WORKERS, rank)
    jaxhetero.initialize()
    mesh = jax.make_mesh((WORKERS, DEVICES), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = np.arange(2 * 4 * 4 * 3, dtype=np.float32).reshape(2, 4, 4, 3) + 1000 * rank
    x = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, jax.P(AXES)), rows)
    wrong = []
    for name, function in (EXCHANGES | GROUPS | UNTYPED).items():
        expected = run(mesh, function, jax.lax, x, check_vma=False)
        for check_vma in (False, True)[: 1 + (name not in UNTYPED)]:
            if not np.array_equal(run(mesh, function, jaxhetero, x, check_vma), expected):
                wrong.append(f"{name}, check_vma={check_vma}")
    if jax.__version_info__ < (0, 12):  # which refuses it as well
        expected = run(mesh, turned, jax.lax, x, check_vma=False)
        if not np.array_equal(run(mesh, lambda _, x: offloaded_turned(x), jax.lax, x, check_vma=False), expected):
            wrong.append("turned, by offload")
    for text, function in REFUSED.items():
        try:
            run(mesh, function, jaxhetero, x, check_vma=True)
            wrong.append(f"not refused: {text}")
        except jaxhetero.errors.ConfigError as error:
            wrong.extend([str(error)] * (text not in str(error)))
    jaxhetero.shutdown()
    print(json.dumps(wrong))


main()
