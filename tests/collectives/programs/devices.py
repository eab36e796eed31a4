"""Workers of two devices each: sums over the workers, over their devices, and over both, against jax.lax.

With a stand-in for a GPU's driver, what that saw as well.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero

sys.path.insert(0, str(Path(__file__).parents[3]))
from lab.fake_cuda import FakeCuda

KIND, JAX_COORDINATOR = sys.argv[1:3]
DEVICES = 2
COUNT = 50_001  # odd: the devices' parts are not equal without padding
P = jax.P
AXES = ("workers", "devices", ("workers", "devices"), ("devices", "workers"))
COLLECTIVES: dict[str, Any] = {
    "psum": lambda library, x, axes: library.psum(x, axes),
    "pmean": lambda library, x, axes: library.pmean(x, axes),
    "pmax": lambda library, x, axes: library.pmax(x, axes),
    "all_gather": lambda library, x, axes: library.all_gather(x, axes, axis=1, tiled=True, to="invarying"),
    "psum_scatter": lambda library, x, axes: library.psum_scatter(x[:, :60], axes, scatter_dimension=1, tiled=True),
}


def make_mesh(*shape: int, names: tuple[str, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def run(mesh: jax.sharding.Mesh, function: Any, x: np.ndarray, check_vma: bool, out_specs: Any) -> np.ndarray:
    """Apply ``function`` to each device's row of ``x``, this worker's part of the global array."""
    rows = P(mesh.axis_names)
    array = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, rows), x)
    step = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=out_specs, check_vma=check_vma))
    return np.stack([np.asarray(shard.data)[0] for shard in step(array).addressable_shards])


def global_mesh(rank: int, size: int) -> list[str]:
    """A mesh of workers x devices, which jax.lax can reduce as well."""
    mesh = make_mesh(size, DEVICES, names=("workers", "devices"))
    x = np.arange(DEVICES * COUNT, dtype=np.float32).reshape(DEVICES, COUNT) % 100 + rank
    wrong = []
    for axes, check_vma, name in itertools.product(AXES, (True, False), COLLECTIVES):
        if name not in ("psum", "pmean") and (isinstance(axes, str) or not check_vma):
            continue  # enough of them; the order of the axes is what matters to these
        names = (axes,) if isinstance(axes, str) else axes
        specs = P(tuple(name for name in mesh.axis_names if name not in names) or None)
        if name == "psum_scatter":
            specs = P(mesh.axis_names)
        function = COLLECTIVES[name]
        ours = run(mesh, lambda x, f=function, a=axes: f(jaxhetero, x, a), x, check_vma, specs)
        theirs = run(mesh, lambda x, f=function, a=axes: f(jax.lax, x, a), x, check_vma, specs)
        if not np.array_equal(ours, theirs):
            wrong.append(f"{name} over {axes}, check_vma={check_vma}")
    for check_vma in (True, False):
        got = run(mesh, lambda x: jaxhetero.broadcast(x, 1, ("workers", "devices")), x, check_vma, P())
        if not np.array_equal(got, np.broadcast_to(x[:1] - rank + 1, got.shape)):
            wrong.append(f"broadcast, check_vma={check_vma}")
    told = ""
    try:
        run(mesh, lambda x: jaxhetero.broadcast(x, 1, "devices"), x, True, P("workers"))
    except jaxhetero.errors.ConfigError as error:
        told = str(error)
    if "lies inside each worker; name the axis of the workers" not in told:
        wrong.append(f"broadcast inside each worker: {told}")
    return wrong


def own_mesh(rank: int, size: int) -> list[str]:
    """A mesh of this worker's devices alone: the sum goes over them and over the workers."""
    mesh = make_mesh(DEVICES, names=("devices",))
    x = np.arange(DEVICES * COUNT, dtype=np.float32).reshape(DEVICES, COUNT) % 100 + rank
    total = size * (x - rank).sum(0) + DEVICES * sum(range(size))
    wrong = []
    for check_vma in (True, False):
        got = run(mesh, lambda x: jaxhetero.psum(x, "devices"), x, check_vma, P())
        if not all(np.array_equal(row, total) for row in got):
            wrong.append(f"psum, check_vma={check_vma}")
        got = run(mesh, lambda x: jaxhetero.broadcast(x, 1, "devices"), x, check_vma, P())
        if not np.array_equal(got, np.broadcast_to(x[:1] - rank + 1, got.shape)):
            wrong.append(f"broadcast, check_vma={check_vma}")
    return wrong


def main() -> None:
    rank, size = int(os.environ["JAXHETERO_RANK"]), int(os.environ["JAXHETERO_WORKER_COUNT"])
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if KIND == "global":
        jax.distributed.initialize(JAX_COORDINATOR, size, rank)
    jaxhetero.initialize()
    wrong = global_mesh(rank, size) if KIND == "global" else own_mesh(rank, size)

    names = ("workers", "devices") if KIND == "global" else ("devices",)
    mesh = make_mesh(*((size, DEVICES) if KIND == "global" else (DEVICES,)), names=names)
    before = jaxhetero.metrics().sent_bytes
    run(mesh, lambda x: jaxhetero.psum(x, names), np.ones((DEVICES, COUNT), np.float32), True, P())
    ratio = (jaxhetero.metrics().sent_bytes - before) / (COUNT * jnp.float32(0).nbytes)
    stand_in = os.environ.get("JAXHETERO_CUDA_STAND_IN")
    jaxhetero.shutdown()
    result: dict[str, Any] = {"wrong": wrong, "sent": float(ratio)}
    if stand_in:
        driver = FakeCuda(stand_in)
        result |= {"pools": driver.call_count("cuMemHostAlloc"), "violations": driver.violations()}
    print(json.dumps(result))


main()
