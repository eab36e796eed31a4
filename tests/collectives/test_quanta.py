"""8 and 4 bits on the wire: every bit is as docs/how_to/eight_bits.md says, however the job is made."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import jaxhetero
from jaxhetero.errors import ConfigError
from jaxhetero.optimizers import error_feedback, on_reducers
from tests.support.cluster import Cluster

PROGRAM = "quanta.py"


def run(workers: int, reducers: int, *arguments: str, **settings: str) -> list[dict[str, Any]]:
    with Cluster(workers, reducers, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers(PROGRAM, *arguments)
        results = [outcome.result for outcome in cluster.wait_workers()]
        assert all(outcome.code == 0 for outcome in cluster.wait_reducers())
    assert all(result["digests"] == results[0]["digests"] for result in results)
    return results


def test_sums_are_as_defined_whoever_sums() -> None:
    results = run(3, 2)
    other = run(3, 0, JAXHETERO_CHUNK_BYTES="1024", JAXHETERO_STRANDS="3", JAXHETERO_SHARED_MEMORY="0")
    assert other[0]["digests"] == results[0]["digests"]
    for result in results:
        assert result["parts"]["int8"] < 0.26
        assert result["parts"]["float8_e4m3fn"] < 0.26
        assert result["parts"]["int4"] < 0.14


def test_equal_numbers_are_their_own_mean_also_of_seven_workers() -> None:
    """A product with 1/7 would have another last bit than the quotient."""
    run(7, 1, "exact")


def test_what_cannot_be_sent_so_is_refused() -> None:
    known = "it can be bfloat16, float16, int8, int4 or float8_e4m3fn"
    with pytest.raises(ConfigError, match=f"offload: wire_dtype is float8_e5m2; {known}"):
        jaxhetero.offload(wire_dtype=jnp.float8_e5m2)
    with pytest.raises(ConfigError, match=f"wire_dtype is int16; {known}"):
        error_feedback(jnp.int16)
    with pytest.raises(ConfigError, match=f"wire_dtype is uint8; {known}"):
        on_reducers(optax.sgd(1.0), wire_dtype=jnp.uint8)
