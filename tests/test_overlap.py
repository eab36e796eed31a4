"""Communication runs under the backward pass. For more than one step: ``python -m tests.overlap``."""

import pytest

from tests.overlap import LAYERS, Step, describe, measure


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return measure()


def test_a_round_begins_when_its_gradient_is_ready(steps: list[Step]) -> None:
    """From the last layer to the first; the first layers' backward pass is still to come when most rounds are over."""
    for step in steps:
        assert len(step.rounds) == LAYERS
        for times in step.rounds:
            assert times["requested_s"] <= times["first_push_s"] <= times["first_result_s"] <= times["end_s"]
            assert times["bytes"] == 512 * 512 * 4
        assert all(times["requested_s"] < step.backward_end_s for times in step.rounds[:-1])


def test_four_fifths_of_the_communication_are_hidden(steps: list[Step], capsys: pytest.CaptureFixture[str]) -> None:
    """Of all buckets but the last, where the backward pass takes longer than they do."""
    for rank, step in enumerate(steps):
        with capsys.disabled():
            print(f"\nrank {rank}: {describe(step)}")
        assert step.hidden_s >= 0.8 * step.communication_s


def test_the_backward_pass_goes_on_while_a_round_waits() -> None:
    """Of a worker that is early: a call that held XLA up would lie inside the backward pass as well."""
    early, _ = measure(late_s=3)
    assert early.waited_s > 0
