"""Compiles a train step and prints what of it concerns the collective."""

import itertools
import json
import re

import jax
import jax.numpy as jnp

import jaxhetero

BUCKET_BYTES = 300_000
WIDTHS = [64, 256, 256, 32]


def loss(params: list[jax.Array], inputs: jax.Array) -> jax.Array:
    for weight in params:
        inputs = jnp.tanh(inputs @ weight)
    return jnp.sum(inputs)


@jax.jit
def step(params: list[jax.Array], inputs: jax.Array) -> list[jax.Array]:
    gradients = jaxhetero.psum(jax.grad(loss)(params, inputs), bucket_bytes=BUCKET_BYTES)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


@jax.jit
def sum_of_argument(x: jax.Array) -> jax.Array:
    return jaxhetero.psum(x.reshape(-1))


@jax.jit
def sum_in_half_the_bytes(x: jax.Array) -> jax.Array:
    return jaxhetero.psum(x, wire_dtype=jnp.bfloat16)


def moved_elements(hlo: str) -> list[int]:
    """The sizes of all arrays that the program copies, concatenates or converts, in elements."""
    sizes = []
    for dimensions in re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|concatenate|copy-start|convert)\(", hlo):
        size = 1
        for dimension in filter(None, dimensions.split(",")):
            size *= int(dimension)
        sizes.append(size)
    return sizes


def main() -> None:
    jaxhetero.initialize()
    params = [jnp.ones((m, n)) for m, n in itertools.pairwise(WIDTHS)]
    hlo = step.lower(params, jnp.ones((8, WIDTHS[0]))).compile().as_text()
    of_argument = sum_of_argument.lower(jnp.ones((256, 256))).compile().as_text()
    in_half = sum_in_half_the_bytes.lower(jnp.ones((256, 256))).compile().as_text()
    in_half_on_gpu = sum_in_half_the_bytes.trace(jnp.ones((256, 256))).lower(lowering_platforms=("cuda",)).as_text()
    jaxhetero.shutdown()
    calls = re.findall(r"custom_call_target=\"(jaxhetero\w*)\"", hlo)
    scopes = re.findall(r"custom_call_target=\"jaxhetero.*op_name=\"([^\"]*)\"", hlo)
    result = {"scopes": scopes, "calls": calls, "moved": moved_elements(hlo), "sizes": [p.size for p in params]}
    result["moved_of_argument"], result["moved_in_half"] = moved_elements(of_argument), moved_elements(in_half)
    result["operand_on_gpu"] = re.findall(r"@jaxhetero_all_reduce.*: \(tensor<(\w+)>", in_half_on_gpu)
    print(json.dumps(result))


main()
