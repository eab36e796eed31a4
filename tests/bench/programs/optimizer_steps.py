"""A step of the optimizer benchmark, with the update on workers and on reducers: ``LIBRARY``. How far they differ."""

import json
import sys
from typing import Any

import numpy as np

import jaxhetero
from bench.engines.optimizer import OPTIMIZERS, OptimizerStep


def weights_after_a_step(optimizer: str, backups: int | None) -> list[np.ndarray]:
    counts = (1000, 300_000)
    step = OptimizerStep(
        optimizer=optimizer,
        backups=backups,
        counts=counts,
        ready_s=(0.0, 0.01),
        dtype="float32",
        library=sys.argv[1],
    )
    weights: Any = step._state[0][::-1] if backups is None else step._gradients
    assert tuple(len(array) for array in weights) == counts
    return [np.asarray(array) for array in weights]


jaxhetero.initialize()
differences = {}
for name in OPTIMIZERS:
    here = weights_after_a_step(name, None)
    assert all((array < 1).all() for array in here), "the weights have moved"
    for backups in (0, 1):
        there = weights_after_a_step(name, backups)
        differences[f"{name}, {backups}"] = max(
            float(np.max(np.abs(one - other))) for one, other in zip(here, there, strict=True)
        )
jaxhetero.shutdown()
print(json.dumps(differences))
