"""What users do with an optimizer on reducers beside a training step: it is right, or refused with the reason."""

from __future__ import annotations

import functools

import pytest

from tests.support.cluster import run

REFUSED = {
    "whole gradients": ["gradients['w'] is int32"],
    "behind, scale": ["scale (", "called from reducers_refusals.py", "optax.apply_updates alone"],
    "behind, weight decay": ["add_decayed_weights ("],
    "behind, ema": ["tree_update_moment (", "called from reducers_refusals.py"],
    "MultiSteps": ["called from reducers_refusals.py"],
    "apply_if_finite": ["apply_if_finite (", "in a branch of jax.lax.cond"],
    "lookahead": ["lookahead"],
    "inject_hyperparams": ["on_reducers(optax.inject_hyperparams("],
    "their norm": ["norm (", "called from reducers_refusals.py"],
    "incremental_update": ["incremental_update ("],
    "a map": ["reducers_refusals.py"],
    "a difference": ["arithmetic in", "reducers_refusals.py"],
    "a decay by hand": ["a sum with other parameters", "reducers_refusals.py"],
    "a branch": ["in a branch of jax.lax.cond"],
    "ravel_pytree": ["new weights, for optax.apply_updates alone"],  # by JAX
    "vmap": ["jax.vmap", "once for each model"],
    "a derivative": ["a derivative", "on reducers"],
    "value": ["reduce_on_plateau", "'value'", "no extra arguments"],
    "value, in front": ["is given value"],
    "gradients of another": ["gradients are those of another model"],
}
RIGHT = """
    mixed
    mixed, weights in bfloat16
    mixed, float16 on the wire
    gradients of other dtypes
    gradients of float32
    the norm of norms
    sums of other leaves
    apply_if_finite inside
    apply_updates
    jitted apply_updates
    a sum by hand
    NumPy's parameters
    shard_map
    scan
    donated
    in front
    behind, identity
    partition
    value, unused
    two
    two, not jitted
    two by one compiled init
    two, and a shape on one worker
    two that are pushed
    of several shapes
"""


@functools.cache
def outcomes() -> list[dict[str, str]]:
    """By case, of each worker."""
    found: list[dict[str, str]] = run("reducers_refusals.py", workers=2, reducers=1)
    return found


@pytest.mark.parametrize("name", [name.strip() for name in RIGHT.strip().splitlines()])
def test_weights_are_those_of_the_optimizer_on_workers(name: str) -> None:
    assert [outcome[name] for outcome in outcomes()] == ["right"] * 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_give_other_weights_is_refused(name: str) -> None:
    for outcome in outcomes():
        for word in REFUSED[name]:
            assert word in outcome[name]


def test_no_case_is_forgotten() -> None:
    assert {name.strip() for name in RIGHT.strip().splitlines()} | set(REFUSED) == set(outcomes()[0])
