"""Two steps of a model of the zoo that is cut over the workers: how far the gradients are from those of jax.grad."""

import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxhetero
from tests.pipeline.pipeline_zoo import MICROBATCHES, MODELS, Model, errors, reference


def digest(tree: Any) -> str:
    text = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        text.update(np.asarray(leaf).tobytes())
    return text.hexdigest()


def arguments_of(model: Model, replica: int) -> tuple[Any, ...]:
    """Each replica has a batch of its own: the same rows in another order, which makes other microbatches."""
    undivided = (*model.settings.get("whole_argnums", ()), model.settings.get("state_argnum"))
    return tuple(
        argument if number in undivided else jax.tree.map(lambda leaf: jnp.roll(leaf, replica, axis=0), argument)
        for number, argument in enumerate(model.arguments, 1)
    )


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    jaxhetero.initialize()
    model = MODELS[name]()
    grad_fn = jaxhetero.pipeline.value_and_grad(model.loss, microbatches=MICROBATCHES, **model.settings, **options)
    report = grad_fn.cut(model.params, *model.arguments)
    params = grad_fn.own(model.params)
    arguments = arguments_of(model, grad_fn.replica)
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
        replicas = [arguments_of(model, replica) for replica in range(grad_fn.replica_count)]
        grads_of = [reference(model, model.params, own)[1] for own in replicas]
        wanted = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *grads_of)
        found["error"] = max(errors(whole, wanted))
    print(json.dumps(found), flush=True)
    jaxhetero.shutdown()


main()
