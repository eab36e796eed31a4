"""A few steps of training with a model that is cut, and with the whole one: initialisation, clipping, checkpoint."""

import json

import jax
import numpy as np
import optax
from pipeline_zoo import MICROBATCHES, errors, language_model, reference

import jaxhetero

jaxhetero.initialize()
model = language_model(tied=True, layers=2)


def init(key: jax.Array) -> object:
    """Parameters that need computing, each from its own key."""
    leaves, structure = jax.tree.flatten(model.params)
    keys = jax.random.split(key, len(leaves))
    drawn = [0.2 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def update(optimizer, grads, opt_state, params):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


grad_fn = jaxhetero.pipeline.value_and_grad(model.loss, stages=2, microbatches=MICROBATCHES)
grad_fn.cut(jax.eval_shape(init, jax.random.key(0)), *model.arguments)
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
print(
    json.dumps(
        {
            "same_start": is_same,
            "own_leaves": len(jax.tree.leaves(params)),
            "error": max(errors(found[0], whole)),
            "state_error": max(errors(found[1], plain_state)),
        }
    ),
    flush=True,
)
jaxhetero.shutdown()
