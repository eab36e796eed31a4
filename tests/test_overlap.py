"""Communication runs under the backward pass."""

from typing import Any

import pytest
from cluster import run

LAYERS = 8


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    return run("overlap.py", workers=2, reducers=1)


def test_a_round_begins_when_its_gradient_is_ready(steps: list[dict[str, Any]]) -> None:
    """From the last layer to the first; the first layers' backward pass is still to come when most rounds are over."""
    for step in steps:
        rounds = sorted(step["rounds"], key=lambda times: times["requested_s"])
        assert len(rounds) == LAYERS
        for times in rounds:
            assert times["requested_s"] <= times["first_push_s"] <= times["first_result_s"] <= times["end_s"]
            assert times["bytes"] == 512 * 512 * 4
        assert all(times["requested_s"] < step["backward_end_s"] for times in rounds[:-1])


def test_four_fifths_of_the_communication_are_hidden(
    steps: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all buckets but the last, where the backward pass takes longer than they do."""
    for rank, step in enumerate(steps):
        rounds = sorted(step["rounds"], key=lambda times: times["requested_s"])[:-1]
        total = sum(times["end_s"] - times["first_push_s"] for times in rounds)
        hidden = sum(max(0, min(times["end_s"], step["backward_end_s"]) - times["first_push_s"]) for times in rounds)
        with capsys.disabled():
            print(
                f"\nrank {rank}: {hidden / total:.0%} of the {1e3 * total:.1f} ms of communication of all buckets "
                "but the last lay inside backward"
            )
        assert hidden >= 0.8 * total
