"""Models of the zoo in several schedules, over the workers of one job: ``MODELS SCHEDULES DRAWS``, each JSON.

Rank 0 prints a line for each: the digest of the gradients, and their errors against float64 over those of jax.grad.
"""

import hashlib
import json
import statistics
import sys
from typing import Any

import jax
import numpy as np

import jaxhetero
from jaxhetero.errors import ConfigError
from tests.pipeline.pipeline_zoo import MICROBATCHES, MODELS, Model, errors, perturbed, reference, truth_of


def gradients(schedule: str, draws: list[Model]) -> list[Any]:
    """Of each draw, whole. The same programs compute them all."""
    model = draws[0]
    grad_fn = jaxhetero.pipeline.value_and_grad(
        model.loss,
        stages=jaxhetero.size(),
        microbatches=MICROBATCHES,
        schedule=schedule,
        stages_per_worker=2 if schedule in ("virtual", "breadth_first") else 1,
        **model.settings,
    )
    grad_fn.cut(model.params, *model.arguments)
    each = (grad_fn(grad_fn.own(draw.params), *draw.arguments) for draw in draws)
    return [jaxhetero.pipeline.gather(grads) for _, grads in each]


def pooled(of_draws: list[list[float]]) -> list[float]:
    """For each leaf the RMS over the draws."""
    return [float(error) for error in np.sqrt(np.mean(np.square(of_draws), axis=0))]


def digest(trees: list[Any]) -> str:
    text = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        text.update(np.asarray(leaf).tobytes())
    return text.hexdigest()


def main() -> None:
    names, schedules, draw_count = map(json.loads, sys.argv[1:4])
    jaxhetero.initialize()
    is_first = jaxhetero.rank() == 0
    for name in names:
        model = MODELS[name]()
        draws = [perturbed(model, number) for number in range(draw_count)]
        if is_first:
            truths = [truth_of(name, draw) for draw in draws]
            found = [reference(draw, draw.params, draw.arguments)[1] for draw in draws]
            theirs = pooled([errors(*pair) for pair in zip(found, truths, strict=True)])
        for schedule in schedules:
            line: dict[str, Any] = {"model": name, "schedule": schedule}
            try:
                found = gradients(schedule, draws)
            except ConfigError as error:
                if is_first:
                    print(json.dumps(line | {"refused": str(error)}), flush=True)
                continue
            if is_first:
                ours = pooled([errors(*pair) for pair in zip(found, truths, strict=True)])
                # A leaf that jax.grad computes exactly has no error to compare with.
                ratios = [own / other for own, other in zip(ours, theirs, strict=True) if other > 1e-9]
                sizes = {"mean": statistics.mean(ratios), "largest": max(ratios), "error": max(ours)}
                print(json.dumps(line | {"digest": digest(found)} | sizes), flush=True)
    print("null", flush=True)
    jaxhetero.shutdown()


main()
