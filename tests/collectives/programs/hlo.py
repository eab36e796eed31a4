"""Compiles a train step and prints what of it concerns the collective."""

import functools
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


@jax.jit
def gradients_of_replicated(params: list[jax.Array], inputs: jax.Array) -> list[jax.Array]:
    replicated = functools.partial(jaxhetero.replicated, wire_dtype=jnp.bfloat16, bucket_bytes=BUCKET_BYTES)
    return jax.grad(lambda params: loss(replicated(params), inputs))(params)


@jax.jit
def gather_and_scatter(rows: list[jax.Array]) -> list[jax.Array]:
    whole = jaxhetero.all_gather(rows, bucket_bytes=BUCKET_BYTES)
    return jaxhetero.psum_scatter(whole, bucket_bytes=2 * BUCKET_BYTES)


def call_bytes(hlo: str) -> list[int]:
    """What the collective that each call is a bucket of takes on the wire."""
    return [int(number) for number in re.findall(r"call_bytes = (\d+)", hlo)]


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
    inputs = jnp.ones((8, WIDTHS[0]))
    hlo = step.lower(params, inputs).compile().as_text()
    of_replicated = gradients_of_replicated.lower(params, inputs).compile().as_text()
    of_argument = sum_of_argument.lower(jnp.ones((256, 256))).compile().as_text()
    in_half = sum_in_half_the_bytes.lower(jnp.ones((256, 256))).compile().as_text()
    in_half_on_gpu = sum_in_half_the_bytes.trace(jnp.ones((256, 256))).lower(lowering_platforms=("cuda",)).as_text()
    of_rows = gather_and_scatter.lower(params).compile().as_text()
    of_rows_on_gpu = gather_and_scatter.trace(params).lower(lowering_platforms=("cuda",)).as_text()
    jaxhetero.shutdown()
    calls = re.findall(r"custom_call_target=\"(jaxhetero\w*)\"", hlo)
    scopes = re.findall(r"custom_call_target=\"jaxhetero.*op_name=\"([^\"]*)\"", hlo)
    result = {"scopes": scopes, "calls": calls, "moved": moved_elements(hlo), "sizes": [p.size for p in params]}
    result["moved_of_argument"], result["moved_in_half"] = moved_elements(of_argument), moved_elements(in_half)
    result["call_bytes"], result["replicated_call_bytes"] = call_bytes(hlo), call_bytes(of_replicated)
    result["operand_on_gpu"] = re.findall(r"@jaxhetero_all_reduce.*: \(tensor<(\w+)>", in_half_on_gpu)
    result["calls_of_rows"] = re.findall(r"custom_call_target=\"jaxhetero.*op_name=\"[^\"]*/(\w*)\"", of_rows)
    result["moved_of_rows"] = moved_elements(of_rows)
    result["calls_of_rows_on_gpu"] = len(re.findall(r"@jaxhetero_all_reduce", of_rows_on_gpu))
    print(json.dumps(result))


main()
