"""The best possible time of an all-reduce, as the native plan computes it for users, benchmarks and trainers."""

import pytest

import jaxhetero
from jaxhetero.errors import ConfigError


def best_factor(worker_count: int, reducer_count: int) -> float:
    """The formula of Jiang et al. (OSDI 2020): the time in units of S/B for interfaces of one rate."""
    n, k = worker_count, min(reducer_count, worker_count)
    return 2 * n * (n - 1) / (n * n + k * n - 2 * k)


@pytest.mark.parametrize(
    ("worker_count", "reducer_count", "factor"),
    [(8, 0, 1.75), (8, 2, 1.47), (8, 4, 1.27), (8, 8, 1.0), (8, 12, 1.0), (4, 0, 1.5), (2, 0, 1.0)],
)
def test_best_time_is_that_of_the_paper(worker_count: int, reducer_count: int, factor: float) -> None:
    found = jaxhetero.best_time_s(10e6, [5e6] * worker_count, [5e6] * reducer_count)
    assert found / 2 == pytest.approx(factor, abs=0.005)
    assert found / 2 == pytest.approx(best_factor(worker_count, reducer_count))


@pytest.mark.parametrize("worker_count", [2, 3, 8, 64])
@pytest.mark.parametrize("reducer_count", [0, 1, 2, 4, 8, 64, 99])
def test_equal_rates_are_a_case_of_any_rates(worker_count: int, reducer_count: int) -> None:
    found = jaxhetero.best_time_s(1, [5.0] * worker_count, [5.0] * reducer_count)
    assert found * 5 == pytest.approx(best_factor(worker_count, reducer_count))


def test_a_slow_worker_or_reducer_takes_its_time() -> None:
    # Everybody sends the whole gradient, the slowest worker at its own rate.
    assert jaxhetero.best_time_s(100, [10, 10, 5], [10, 10, 10], 0) == pytest.approx(20)
    # Dedicated reducers alone carry n S through the sum of their rates.
    assert jaxhetero.best_time_s(100, [10, 10, 10], [10, 5], 0) == pytest.approx(20)


def test_one_worker_needs_no_time() -> None:
    assert jaxhetero.best_time_s(1e9, [1e9]) == 0


@pytest.mark.parametrize(
    ("workers", "reducers", "colocated", "message"),
    [
        ([], [1.0], 0, "there are 0 workers"),
        ([1.0, 1.0], [], 3, "colocated_count is 3; there are 2 workers"),
        ([1.0, 1.0], [], 0, "nobody reduces"),
        ([1.0, 0.0], [1.0], 0, "every rate must be above 0"),
        ([1.0, 1.0], [-1.0], 0, "every rate must be above 0"),
        ([1.0, 1.0], [float("nan")], 0, "every rate must be above 0"),
    ],
)
def test_impossible_jobs_are_refused(workers: list[float], reducers: list[float], colocated: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jaxhetero.best_time_s(1, workers, reducers, colocated)
