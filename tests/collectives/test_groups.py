"""Collectives over some of the workers: the bits, what goes on beside them, and how they fail."""

import pytest

from tests.long.chaos import run_job
from tests.support.cluster import Cluster, Outcome, run
from tests.support.patience import PATIENCE

PATIENCE_MS = 6000


@pytest.mark.parametrize(
    ("reducers", "settings"),
    [
        (1, {"JAXHETERO_STRANDS": "1"}),
        (3, {"JAXHETERO_STRANDS": "2", "JAXHETERO_SHARED_MEMORY": "0"}),
        (2, {"JAXHETERO_COLOCATED_COUNT": "2", "JAXHETERO_STRANDS": "2"}),
        (0, {"JAXHETERO_STRANDS": "1"}),
        (1, {"JAXHETERO_COLOCATED_COUNT": "4", "JAXHETERO_FAILOVER": "0"}),
    ],
    ids=["one reducer", "no shared memory", "mixed", "inside", "all inside and one"],
)
def test_a_group_has_the_bits_of_its_members(reducers: int, settings: dict[str, str]) -> None:
    """In rank order, whatever sums, and whatever other groups do at the same time."""
    assert run("groups.py", workers=4, reducers=reducers, **settings) == [[]] * 4


@pytest.mark.parametrize("seed", [2, 3])
def test_deaths_of_reducers_change_no_bit(seed: int) -> None:
    toll = run_job(seed, strikes=4, workers=4, program="group_bits.py")
    assert toll.kills >= 4
    assert toll.views >= 4
    assert toll.same_bits


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_members_may_begin_rounds_in_opposite_orders(shared_memory: str) -> None:
    """The programs of members may differ. No window may stay full of rounds that another member holds back."""
    settings = {"JAXHETERO_SHARED_MEMORY": shared_memory, "JAXHETERO_START_TIMEOUT_MS": str(round(20_000 * PATIENCE))}
    for result in run("group_orders.py", workers=3, reducers=2, **settings):
        assert result["wrong"] == 0


def run_mistake(mistake: str, start_timeout_ms: int = 60_000) -> list[Outcome]:
    settings = {"JAXHETERO_TIMEOUT_MS": str(PATIENCE_MS), "JAXHETERO_START_TIMEOUT_MS": str(start_timeout_ms)}
    with Cluster(4, 2, settings) as cluster:
        cluster.start_reducers()
        cluster.start_workers("group_mistakes.py", mistake)
        return cluster.wait_workers()


def test_a_member_that_dies_is_named() -> None:
    outcomes = run_mistake("killed")
    for rank in (0, 1, 2):
        assert "jaxhetero.WorkerLost" in outcomes[rank].exception_line
        assert "rank 3 (host " in outcomes[rank].exception_line


def test_a_member_that_does_not_come_is_named() -> None:
    for outcome in run_mistake("silent")[:2]:
        message = outcome.exception_line
        assert "jaxhetero.RoundTimeout" in message
        assert "waiting for rank 2 (host " in message
        assert "of ranks 0, 2 round 1" in message


def test_workers_that_disagree_about_shapes_are_told_who_sent_what() -> None:
    for outcome in run_mistake("shape"):
        message = outcome.exception_line
        assert "jaxhetero.MismatchError" in message
        assert "sum of float32[5] over ranks 0, 2" in message
        assert "sum of float32[6] over ranks 0, 2" in message


def test_workers_that_name_different_groups_are_told_both() -> None:
    """Each waits for a worker that does not come: the error comes with the deadline of the round."""
    start_timeout_ms = round(10_000 * PATIENCE)  # as long as a first round may take
    for outcome in run_mistake("groups", start_timeout_ms)[:3]:
        message = outcome.exception_line
        assert "jaxhetero.MismatchError" in message
        assert "which waits in sums bucket 0 (float32[5]) of ranks 0, " in message
        for group in ("of ranks 0, 2", "of ranks 0, 1, 2"):
            assert group in message


def test_whoever_is_not_in_the_group_may_not_call() -> None:
    outcomes = run_mistake("outside")
    assert "ConfigError: sums: workers is (0, 2), and this is rank 1" in outcomes[1].exception_line
