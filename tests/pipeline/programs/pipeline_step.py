"""Two steps of a model of the zoo that is cut over the workers: how far the gradients are from those of jax.grad.

Arguments: the model, and a JSON list with the options of each cut. Prints what it has found of each, as a list.
"""

import functools
import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from tests.pipeline.pipeline_zoo import MICROBATCHES, MODELS, errors, reference

MODEL = MODELS[sys.argv[1]]()


def digest(tree: Any) -> str:
    text = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        text.update(np.asarray(leaf).tobytes())
    return text.hexdigest()


def arguments_of(replica: int) -> tuple[Any, ...]:
    """Each replica has a batch of its own: the same rows in another order, which makes other microbatches."""
    undivided = (*MODEL.settings.get("whole_argnums", ()), MODEL.settings.get("state_argnum"))
    return tuple(
        argument if number in undivided else jax.tree.map(lambda leaf: jnp.roll(leaf, replica, axis=0), argument)
        for number, argument in enumerate(MODEL.arguments, 1)
    )


def step(options: dict[str, Any]) -> dict[str, Any]:
    grad_fn = jaxhetero.pipeline.value_and_grad(MODEL.loss, microbatches=MICROBATCHES, **MODEL.settings, **options)
    report = grad_fn.cut(MODEL.params, *MODEL.arguments)
    params = grad_fn.own(MODEL.params)
    arguments = arguments_of(grad_fn.replica)
    first = grad_fn(params, *arguments)
    value, grads = grad_fn(params, *arguments)
    assert digest(first) == digest((value, grads)), "a step that is repeated has the same bits"
    whole = jaxhetero.pipeline.gather(grads)
    found = {
        "value": jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), jax.tree.leaves(value)[:1]),
        "digest": digest(whole),
        "stages": len(report.stages),
        "replica": [grad_fn.replica, grad_fn.replica_count],
    }
    if jaxhetero.rank() == 0:
        of_replicas = [whole_grads(replica) for replica in range(grad_fn.replica_count)]
        wanted = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *of_replicas)
        found["error"] = max(errors(whole, wanted))
    return found


@functools.cache
def whole_grads(replica: int) -> Any:
    """Of the model that is not cut, for the batch of a replica."""
    return reference(MODEL, MODEL.params, arguments_of(replica))[1]


def main() -> None:
    jaxhetero.initialize()
    found = [step(options) for options in json.loads(sys.argv[2])]
    print(json.dumps(found), flush=True)
    jaxhetero.shutdown()


main()
