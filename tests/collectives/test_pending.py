"""Sums that outlive the program that starts them, 2 workers of 2 devices each, 2 reducers."""

from typing import Any

import pytest

from tests.support.cluster import THROUGH_LANES, run

CASES = [
    *("in_one_program", "in_two_programs", "outside_of_jit", "in_a_scan", "several_of_an_op", "in_a_group"),
    *("on_a_mesh", "is_asked_for_as_needed", "is_counted", "is_finished_unused", "is_kept_unused"),
]
MISTAKES = {
    "twice": "grads bucket 0: the round has been finished already; each can be finished once",
    "stored": "the round was started by another process, or before this one has joined the job",
    "elsewhere": "ConfigError: meshed: it was started over axis_name='local' under jax.shard_map",
    "checkpoint": "psum_start of grads bucket 0",
    "vmap": "ConfigError: grads bucket 0: jax.vmap cannot go through psum_start",
    "gradient": "ConfigError: grads bucket 0: psum_start has no derivative",
    "no pending": "ConfigError: psum_done: got ",
    "priority": "ConfigError: grads: priority is 'high'",
    "float8": "ConfigError: grads: a leaf is float8_e4m3fn[3], a dtype that reducers cannot sum",
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    return run("pending.py", workers=2, reducers=2, **flags)


@pytest.mark.parametrize("case", CASES)
def test_it_is_as_with_psum(found: list[dict[str, Any]], case: str) -> None:
    if THROUGH_LANES and case == "is_asked_for_as_needed":
        return  # a matter of the memory of CPU programs
    assert [of_rank[case] for of_rank in found] == [True, True]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_a_clear_error(found: list[dict[str, Any]], mistake: str) -> None:
    if THROUGH_LANES and mistake == "stored":
        return  # one failure before it, and rounds on a GPU have ended
    for of_rank in found:
        assert MISTAKES[mistake] in of_rank["mistakes"][mistake]


def test_shutdown_names_what_was_never_finished(found: list[dict[str, Any]]) -> None:
    """Rank 0 has thrown away what `is_kept_unused` has started."""
    assert (
        "ConfigError: rounds were started and never finished: unused bucket 0 (float32[3000]);" in found[0]["shutdown"]
    )
    assert found[1]["shutdown"] == "nothing"
