"""An elastic job on a Ray cluster: three workers that count steps, until there is a file ``end``.

Each notes in a file where it runs. Prints what the workers return: the last step, and the sum of all steps.
"""

import json
import os
import sys
import time
from pathlib import Path

import ray

from jaxhetero.cluster.ray import JaxheteroConfig, run_elastic

FOLDER = Path.cwd()
END = FOLDER / "end"


def train() -> tuple[int, float]:
    """Add up the numbers of the steps."""
    import jax
    import jax.numpy as jnp

    import jaxhetero

    jaxhetero.initialize()
    rank = jaxhetero.rank()

    @jax.jit
    def advance(total: jax.Array, mine: jax.Array) -> tuple[jax.Array, jax.Array]:
        step, asked = jaxhetero.pmean(mine)
        return total + step, asked

    total, step, asked = jnp.float32(0), 0, 0.0
    advance_compiled = advance.lower(total, jnp.zeros(2)).compile()
    note = FOLDER / f"{rank}-{os.getpid()}.json"
    while not asked:
        (total,), step, team = jaxhetero.elastic.gate((total,), step)
        if not note.exists():
            node = ray.get_runtime_context().get_node_id()
            part = note.with_suffix(".part")
            part.write_text(
                json.dumps({"rank": rank, "pid": os.getpid(), "node": node, "step": step, "ranks": team.ranks})
            )
            part.rename(note)
        total, asked = jax.block_until_ready(advance_compiled(total, jnp.array([step, END.exists()], jnp.float32)))
        step += 1
        time.sleep(0.02)
    jaxhetero.shutdown()
    return step, float(total)


ray.init()
print("driver on", ray.get_runtime_context().get_node_id(), flush=True)
found = run_elastic(
    train,
    workers=3,
    elastic="2:3",
    config=JaxheteroConfig(reducers=int(sys.argv[1]), settings={"lost_after_ms": 5000}),
)
print("found", json.dumps(found), flush=True)
