"""What reducers keep of optimizers in elastic jobs is right in all schedules tried, and without a rule it is not."""

from __future__ import annotations

import pytest

from tests.job.states_model import BREAKS, first_break

SCHEDULES = 1200
SCHEDULES_OF_A_BREAK = 400


def test_the_protocol_keeps_its_promises() -> None:
    assert first_break("", range(SCHEDULES)) is None


@pytest.mark.parametrize("broken", BREAKS)
def test_the_checks_find_a_missing_rule(broken: str) -> None:
    assert first_break(broken, range(SCHEDULES_OF_A_BREAK)) is not None, BREAKS[broken]
