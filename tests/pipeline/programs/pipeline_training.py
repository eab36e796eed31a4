"""A few steps of training with a model that is cut, and with the whole one: initialisation, clipping, checkpoint.

python pipeline_training.py SETTINGS OF THE MODEL, SETTINGS OF THE CUT
"""

import json
import sys

import jax
import numpy as np
import optax

import jaxhetero
from tests.pipeline.pipeline_zoo import MICROBATCHES, errors, language_model, reference

jaxhetero.initialize()
model = language_model(**json.loads(sys.argv[1]))


def init(key: jax.Array) -> object:
    """Parameters that need computing, each from its own key."""
    leaves, structure = jax.tree.flatten(model.params)
    keys = jax.random.split(key, len(leaves))
    drawn = [0.2 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def update(optimizer, grads, opt_state, params):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


grad_fn = jaxhetero.pipeline.value_and_grad(
    model.loss, stages=jaxhetero.size(), microbatches=MICROBATCHES, **json.loads(sys.argv[2])
)
report = grad_fn.cut(jax.eval_shape(init, jax.random.key(0)), *model.arguments)
params = grad_fn.init(init, jax.random.key(0))
whole = jax.jit(init)(jax.random.key(0))
drawn = jaxhetero.pipeline.gather(params)
is_same = all(map(np.array_equal, jax.tree.leaves(drawn), jax.tree.leaves(whole)))

optimizer = optax.chain(grad_fn.clip_by_global_norm(0.05), optax.adamw(1e-2))
plain = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
opt_state, plain_state = optimizer.init(params), plain.init(whole)
step = jax.jit(lambda *arguments: update(optimizer, *arguments))
plain_step = jax.jit(lambda *arguments: update(plain, *arguments))
for _ in range(4):
    _, grads = grad_fn(params, *model.arguments)
    params, opt_state = step(grads, opt_state, params)
    _, grads = reference(model, whole, model.arguments)
    whole, plain_state = plain_step(grads, plain_state, whole)

found = jaxhetero.pipeline.gather((params, opt_state))
parted = jaxhetero.pipeline.part(found[1], opt_state)
is_same_part = jax.tree.structure(parted) == jax.tree.structure(opt_state)
is_same_part &= all(map(np.array_equal, jax.tree.leaves(parted), jax.tree.leaves(opt_state)))
print(
    json.dumps(
        {
            "same_start": is_same,
            "same_part": is_same_part,
            "own_leaves": len(jax.tree.leaves(params)),
            "own_elements": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "elements": sum(leaf.size for leaf in jax.tree.leaves(whole)),
            "reported_elements": [stage.parameter_count for stage in report.stages],
            "error": max(errors(found[0], whole)),
            "state_error": max(errors(found[1], plain_state)),
        }
    ),
    flush=True,
)
jaxhetero.shutdown()
