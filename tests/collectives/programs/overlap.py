"""What of the communication runs under the backward pass: prints the times of each step's rounds and pass."""

import json
import sys
import time

import jax
import jax.numpy as jnp

import jaxhetero

LAYERS, WIDTH, BATCH = 8, 512, 4096
STEPS, LATE_S, HOW = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]

marks: list[float] = []


@jax.custom_vjp
def mark(x: jax.Array) -> jax.Array:
    """The identity; notes when its cotangent is there."""
    return x


def _mark_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    jax.debug.callback(lambda _: marks.append(time.monotonic()), cotangent[0, 0])
    return (cotangent,)


mark.defvjp(lambda x: (x, None), _mark_backward)


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    x = mark(x)
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def reduced_gradients(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Of the parameters, summed, in a bucket of its own for each layer, and of ``x``."""
    if HOW == "replicated":
        return jax.grad(lambda p, x: loss_fn(jaxhetero.replicated(p, bucket_bytes=1), x), argnums=(0, 1))(params, x)
    of_params, of_x = jax.grad(loss_fn, argnums=(0, 1))(params, x)
    return jaxhetero.psum(of_params, bucket_bytes=1), of_x


def main() -> None:
    jaxhetero.initialize()
    keys = jax.random.split(jax.random.key(jaxhetero.rank()), LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[1:]]
    x = jax.random.normal(keys[0], (BATCH, WIDTH))
    step = jax.jit(reduced_gradients)
    steps = []
    for _ in range(STEPS):
        jaxhetero.barrier()
        begin = time.monotonic()
        time.sleep(LATE_S * jaxhetero.rank())
        jax.block_until_ready(step(params, x))
        jax.effects_barrier()
        rounds = [times._asdict() for times in jaxhetero.timeline() if times.requested_s >= begin]
        steps.append({"backward_end_s": marks[-1], "rounds": rounds})
    print(json.dumps(steps[1:]))  # the first one compiles
    jaxhetero.shutdown()


main()
