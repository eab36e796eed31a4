"""Models of the zoo in several schedules, over the workers of one job: ``MODELS SCHEDULES``, each JSON.

Rank 0 prints a line for each: the digest of the gradients, and their errors against float64 over those of jax.grad.
"""

import hashlib
import json
import statistics
import sys
from typing import Any

import jax
import numpy as np
from pipeline_zoo import MICROBATCHES, MODELS, errors, reference, truth_of

import jaxhetero
from jaxhetero.errors import ConfigError


def digest(tree: Any) -> str:
    text = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        text.update(np.asarray(leaf).tobytes())
    return text.hexdigest()


def main() -> None:
    names, schedules = map(json.loads, sys.argv[1:3])
    jaxhetero.initialize()
    is_first = jaxhetero.rank() == 0
    for name in names:
        model = MODELS[name]()
        if is_first:
            truth = truth_of(name, model)
            theirs = errors(reference(model, model.params, model.arguments)[1], truth)
        for schedule in schedules:
            several = 2 if schedule in ("virtual", "breadth_first") else 1
            grad_fn = jaxhetero.pipeline.value_and_grad(
                model.loss,
                stages=jaxhetero.size(),
                microbatches=MICROBATCHES,
                schedule=schedule,
                stages_per_worker=several,
                **model.settings,
            )
            try:
                grad_fn.cut(model.params, *model.arguments)
            except ConfigError as error:
                if is_first:
                    print(json.dumps({"model": name, "schedule": schedule, "refused": str(error)}), flush=True)
                continue
            _, grads = grad_fn(grad_fn.own(model.params), *model.arguments)
            whole = jaxhetero.pipeline.gather(grads)
            if is_first:
                ours = errors(whole, truth)
                # A leaf that jax.grad computes exactly has no error to compare with.
                ratios = [own / other for own, other in zip(ours, theirs, strict=True) if other > 1e-9]
                found = {"mean": statistics.mean(ratios), "largest": max(ratios), "error": max(ours)}
                print(json.dumps({"model": name, "schedule": schedule, "digest": digest(whole), **found}), flush=True)
    print("null", flush=True)
    jaxhetero.shutdown()


main()
