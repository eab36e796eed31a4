"""A data-parallel train step, for `jaxhetero launch --workers 2 --reducers 2`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxhetero

GLOBAL_BATCH = 60
STEPS = 100

jaxhetero.initialize()
rank, size = jaxhetero.rank(), jaxhetero.size()

rngs = nnx.Rngs(rank)  # another seed on each worker
layers = nnx.Linear(8, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 1, rngs=rngs)
graphdef, params = nnx.split(nnx.Sequential(*layers), nnx.Param)
params = jaxhetero.broadcast(params)
optimizer = optax.chain(jaxhetero.all_reduce_gradients(), optax.adam(1e-2))
opt_state = optimizer.init(params)


@jax.jit
def train_step(params, opt_state, x, y):
    """An ordinary step: the optimizer reduces the gradients."""

    def loss_fn(params):
        return jnp.mean((nnx.merge(graphdef, params)(x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jaxhetero.pmean(loss)


def batch(step):
    """This worker's rows of the global batch, whatever the number of workers."""
    x = np.random.default_rng(step).normal(size=(GLOBAL_BATCH, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))
    return x[rank::size], y[rank::size]


for step in range(STEPS):
    params, opt_state, loss = train_step(params, opt_state, *batch(step))
    if rank == 0 and (step % 20 == 0 or step == STEPS - 1):
        print(f"step {step}: loss {loss:.4f}")

jax.block_until_ready(params)  # so that the rounds of the last steps are counted
if rank == 0:
    print(f"{jaxhetero.metrics().round_count} rounds")
jaxhetero.shutdown()
