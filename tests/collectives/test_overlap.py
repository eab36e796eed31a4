"""Communication runs under the backward pass. For more than one step: ``python -m tests.long.overlap``."""

import statistics
from typing import get_args

import pytest

from tests.long.overlap import LAYERS, How, Step, describe, measure


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return [step for steps_of_rank in measure(steps=5) for step in steps_of_rank]


def test_a_round_is_asked_for_when_its_gradient_is_ready(steps: list[Step]) -> None:
    """From the last layer to the first, and each once."""
    for step in steps:
        assert len(step.rounds) == LAYERS
        for times in step.rounds:
            assert times["requested_s"] <= times["first_push_s"] <= times["first_result_s"] <= times["end_s"]
            assert times["bytes"] == 512 * 512 * 4
        assert step.rounds[0]["requested_s"] < step.backward_end_s


def test_four_fifths_of_the_communication_are_hidden(steps: list[Step], capsys: pytest.CaptureFixture[str]) -> None:
    """Of all buckets but the last, where the backward pass takes longer than they do: in most steps.

    Where one worker got no processor for a while the other's rounds wait for it, with nothing left to hide that.
    """
    with capsys.disabled():
        print("", *map(describe, steps), sep="\n")
    assert statistics.median(step.hidden_share for step in steps) >= 0.8


@pytest.mark.parametrize("how", get_args(How))
def test_the_backward_pass_goes_on_while_a_round_waits(how: How) -> None:
    """Of a worker that is early: it computes all its gradients, and asks for their rounds, before the first is over."""
    (early,) = measure(late_s=3, how=how)[0]
    assert early.waited_s > 0
    assert early.asked_for_count == LAYERS
