"""Rounds of three ops, then this worker's metrics as JSON. `rounds N`: so many of two of them.

`profile FOLDER`: few, each below an annotation of jax.profiler, and then the timeline beside that profile.
`die N`: rank 1 kills itself after so many, unless the job has been restarted.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxhetero


@jax.jit
def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jaxhetero.psum(x, name="sum"), jaxhetero.pmean(2 * x, name="mean")


def run(count: int) -> None:
    for _ in range(count):
        jax.block_until_ready(step(jnp.ones(100)))


def profile(folder: Path) -> None:
    run(1)
    with jax.profiler.trace(folder):
        for number in range(5):
            with jax.profiler.TraceAnnotation(f"step {number}"):
                run(1)
    jaxhetero.write_timeline(folder / "merged.json", profile=folder)
    jaxhetero.write_timeline(folder / "own.json")


def main(mode: str, argument: str) -> None:
    jaxhetero.initialize()
    if mode == "profile":
        profile(Path(argument) / str(jaxhetero.rank()))
    else:
        run(int(argument))
    if mode == "die" and jaxhetero.rank() == 1 and jaxhetero.restart_count() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    jax.block_until_ready(jax.jit(lambda x: jaxhetero.psum(x, name="large"))(jnp.ones(1_000_000)))
    print(json.dumps(dataclasses.asdict(jaxhetero.metrics())))
    jaxhetero.shutdown()


main(*sys.argv[1:])
