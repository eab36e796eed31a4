"""An op is what it is, not how often a process has compiled it; and workers that differ are told, with both sides."""

from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Outcome, run
from tests.support.patience import PATIENCE
from tests.support.programs_on_disk import FAST_COMPILATION

TWO_DEVICES = {"XLA_FLAGS": f"{FAST_COMPILATION} --xla_force_host_platform_device_count=2"}


def test_a_worker_that_compiles_more_than_the_others_goes_on_with_the_same_ops() -> None:
    """Restored arrays, cleared caches, compilation ahead of time, another batch, another device, a notebook."""
    for wrong in run("ops.py", "alone", workers=2, reducers=2, JAXHETERO_STRANDS="2", **TWO_DEVICES):
        assert wrong == []


def test_a_worker_that_compiles_anew_for_a_second_life_goes_on_with_the_same_ops() -> None:
    for wrong in run("ops.py", "lives", workers=2, reducers=0, JAXHETERO_TIMEOUT_MS="10000"):
        assert wrong == []


def test_a_worker_that_loads_a_program_from_disk_goes_on_with_the_same_ops(tmp_path: Path) -> None:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for is_first in (True, False):
        with Cluster(2, 1) as cluster:
            cluster.start_reducers()
            cluster.start_worker(0, "ops.py", "functions", **cache)
            cluster.start_worker(1, "ops.py", "functions")
            for outcome in cluster.wait_workers():
                assert not any(outcome.result)
        assert any(tmp_path.iterdir()), is_first


def test_a_function_that_is_called_twice_has_two_ops() -> None:
    """In a function of a function, in the bodies of loops and in branches as well."""
    for wrong in run("ops.py", "functions", workers=2, reducers=1):
        assert not any(wrong)


def test_two_calls_of_a_function_are_never_mixed_up() -> None:
    """Constants that only one worker has may make XLA run two calls in another order there: an error, or both sums."""
    for outcome in run_apart("order", start_timeout_ms=round(10_000 * PATIENCE)):
        if outcome.code != 0:
            assert "jaxhetero.RoundTimeout" in outcome.exception_line
            assert "same bucket 0" in outcome.exception_line
        else:
            assert outcome.result == [2, 200]


def run_apart(case: str, start_timeout_ms: int) -> list[Outcome]:
    settings = {"JAXHETERO_TIMEOUT_MS": "4000", "JAXHETERO_START_TIMEOUT_MS": str(start_timeout_ms)}
    with Cluster(2, 3, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers("ops.py", case)
        return cluster.wait_workers()


@pytest.mark.parametrize(
    ("case", "sides"),
    [
        ("shape", ["sum of float32[3] (metric bucket 0", "sum of float32[4] (metric bucket 0"]),
        ("size", ["sum of float32[3] (metric bucket 0", "sum of float32[300000] (metric bucket 0"]),
        ("compiled", ["sum of float32[3] (step bucket 0 (float32[3,1]))", "sum of float32[6] (step bucket 0"]),
        ("kind", ["sum of float32[3] (metric bucket 0", "maximum of float32[3] (metric bucket 0"]),
    ],
)
def test_workers_that_differ_from_some_round_on_are_told_at_once(case: str, sides: list[str]) -> None:
    """With a start_timeout_ms that nobody waits for."""
    for outcome in run_apart(case, start_timeout_ms=600_000):
        message = outcome.exception_line
        assert "jaxhetero.MismatchError" in message
        for part in [*sides, "round 1", "rank 0 (host ", "rank 1 (host "]:
            assert part in message


@pytest.mark.parametrize(
    ("case", "rounds"),
    [
        ("program", ["training bucket 0 (float32[3]) round 0", "evaluation bucket 0 (float32[4]) round 0"]),
        ("dtype", ["metric of float8_e4m3fn bucket 0", "metric of float8_e5m2 bucket 0"]),
        ("branch", ["metric bucket 0 (float32[3]) round 1", "metric bucket 0 call 2 (float32[3]) round 0"]),
    ],
)
def test_workers_that_run_different_programs_are_told_what_each_waits_in(case: str, rounds: list[str]) -> None:
    for outcome in run_apart(case, start_timeout_ms=round(10_000 * PATIENCE)):
        message = outcome.exception_line
        assert "jaxhetero.RoundTimeout" in message
        assert ", which waits in " in message
        for part in [*rounds, "rank 0 (host ", "rank 1 (host "]:
            assert part in message
