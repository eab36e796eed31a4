"""Workers that train by themselves and exchange weights now and then, 2 workers, 2 reducers."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, run

MISTAKES = {
    "overlap": "local_steps: overlap is 4; it must be from 0 to less than every, which is 4",
    "fragments": "local_steps: fragments is 8; it must be from 1 to every, which is 4",
    "traced": "call exchange() outside of jax.jit, with the number of the step as an int",
    "other model": "local_steps: the weights are those of another model than the state is of",
    "twice": "local_steps: fragment 0 is on its way; call exchange() once behind each step",
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run("local_steps.py", workers=2, reducers=2)


def check(found: list[dict[str, Any]]) -> None:
    assert found[0]["digest"] == found[1]["digest"]
    for of_rank in found:
        assert of_rank["moved"] > 0.1
        for name in ("overlap 0", "overlap 2", "on reducers"):
            assert of_rank[name] < 1e-5, name


def test_the_weights_are_those_of_the_same_arithmetic_in_one_process(found: list[dict[str, Any]]) -> None:
    """At once, streamed and overlapped, with the outer optimizer on workers and on reducers; settled half-way."""
    check(found)


def test_it_sends_a_hundredth_of_a_sum_in_each_step(found: list[dict[str, Any]]) -> None:
    assert all(of_rank["bytes"] < 1 / 100 for of_rank in found)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_a_clear_error(found: list[dict[str, Any]], mistake: str) -> None:
    for of_rank in found:
        assert MISTAKES[mistake] in of_rank["mistakes"][mistake]


def test_a_reducer_dies_while_differences_are_on_their_way(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    with Cluster(2, 2) as cluster:
        cluster.start_reducers()
        cluster.start_workers("local_steps.py", str(go_on))
        cluster.wait_for_output("worker 0", "pending")
        cluster.process("reducer 1").send_signal(signal.SIGKILL)
        for rank in range(2):
            cluster.wait_for_error(f"worker {rank}", "going on with 1 reducers")
        go_on.touch()
        results = [outcome.result for outcome in cluster.wait_workers()]
    check(results)
    assert [result["views"] for result in results] == [1, 1]
