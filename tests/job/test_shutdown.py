"""Shutting down finishes what the program has asked for, also what XLA has not run yet."""

import re

import pytest

from tests.support.cluster import Cluster


@pytest.mark.parametrize("results", ["kept", "dropped"])
def test_rounds_of_launched_programs_are_finished(results: str) -> None:
    with Cluster(workers=2, reducers=1, settings={"JAXHETERO_MEASURE_RATES": "0"}) as cluster:
        cluster.start_reducers()
        cluster.start_workers("unread.py", results)
        outcomes = cluster.wait_workers()
        if results == "kept":
            assert outcomes[0].result == outcomes[1].result > 0
        assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
        (reducer,) = cluster.wait_reducers()
        rounds = re.search(r"done: .*\bround_count=(\d+)", reducer.errors)
        assert rounds is not None
        assert int(rounds[1]) == 1 + 8, "a round for each step"
