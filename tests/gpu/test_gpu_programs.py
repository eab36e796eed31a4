"""Programs for a GPU, on a machine without one: every bucket's round runs beside the rest of the program."""

import importlib.util
from typing import Any

import pytest

from tests.support.cluster import run

BUCKETS, LAYERS = 3, 6
WAYS = ["by_psum", "by_psum_in_bfloat16", "by_replicated", "by_reducers"]


@pytest.fixture(scope="module")
def lowered() -> Any:
    return run("gpu_programs.py", workers=2, reducers=1)[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_bucket_is_a_call_of_one_result_on_a_stream_of_its_own(lowered: Any, way: str) -> None:
    """XLA takes several results of a call apart right behind it, and so waits for it at once."""
    assert lowered[way]["result_counts"] == [1] * BUCKETS
    assert len(set(lowered[way]["streams"])) == BUCKETS


@pytest.mark.parametrize("way", WAYS)
def test_no_weight_is_updated_before_all_buckets_are_there(lowered: Any, way: str) -> None:
    """Else XLA, which schedules for the least memory, waits for a bucket before it computes other gradients."""
    assert lowered[way]["barriers"] == [BUCKETS]


needs_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="needs JAX for CUDA, which has the compiler; it needs no GPU",
)


@needs_compiler
def test_xla_waits_for_no_bucket_before_the_last_gradient_is_there() -> None:
    """With the flags of docs/gpu.md."""
    flags = "--xla_gpu_enable_latency_hiding_scheduler=false"
    for way, program in run("gpu_programs.py", "compile", workers=2, reducers=1, XLA_FLAGS=flags)[0].items():
        backward, _, end = program["order"].rpartition("g")
        assert "D" not in backward, way
        assert backward.count("S") >= BUCKETS - 1, way
        assert end.lstrip("S").rstrip("u") == "D" * BUCKETS, way


@needs_compiler
def test_across_steps_a_bucket_is_waited_for_in_front_of_its_first_layer() -> None:
    """With AdamW, and without flags. A letter "S" in front is for a total, and one behind for a bucket of gradients."""
    order = run("gpu_programs.py", "across", workers=2, reducers=1, XLA_FLAGS="")[0]
    layers = "g" * (LAYERS // BUCKETS)
    assert order.startswith("S" * BUCKETS + f"D{layers}" * BUCKETS), order
