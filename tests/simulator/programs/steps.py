"""So many steps with three buckets: two of gradients and the loss. Then one round that is in no step."""

import sys

import jax
import jax.numpy as jnp

import jaxhetero


@jax.jit
def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    loss, grads = jax.value_and_grad(lambda ws: jnp.mean(jnp.tanh(x @ ws[0]) @ ws[1]))(params)
    grads = jaxhetero.psum(grads, bucket_bytes=1, name="grads")
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], jaxhetero.pmean(loss, name="loss")


def main(count: str) -> None:
    jaxhetero.initialize()
    params = [jnp.ones((512, 512)), jnp.ones((512, 1024))]
    x = jnp.ones((64, 512))
    for _ in range(int(count)):
        params, loss = step(params, x)
        jax.block_until_ready(loss)
    jax.block_until_ready(jax.jit(lambda x: jaxhetero.psum(x, name="evaluation"))(jnp.ones(10)))
    jaxhetero.shutdown()


main(*sys.argv[1:])
