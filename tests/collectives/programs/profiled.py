"""What a profile of a step shows of the collectives: prints the names of the operations in it."""

import json
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxhetero


@jax.jit
def step(x: jax.Array) -> jax.Array:
    total = jaxhetero.psum(x)
    jax.debug.print("the sum begins with {}", total[0])
    return total


def operations(folder: Path) -> list[str]:
    # Python 3.13 says this of a type of jaxlib 0.12 when it is first used; as an error, it would end the process.
    warnings.filterwarnings("ignore", "builtin type event_stats has no __module__", DeprecationWarning)
    (file,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    return sorted({str(value) for event in events for name, value in event.stats if name == "hlo_op"})


def main() -> None:
    jaxhetero.initialize()
    x = jnp.ones(1000)
    jax.block_until_ready(step(x))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(x))
            jax.effects_barrier()
        found = operations(Path(folder))
    jaxhetero.shutdown()
    print(json.dumps(found))


main()
