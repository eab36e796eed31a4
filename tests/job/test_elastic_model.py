"""The protocol of elastic jobs keeps its promises in all schedules tried, and each protocol without a rule breaks one.

``python -m tests.long.elastic_schedules`` tries more.
"""

from __future__ import annotations

import pytest

from tests.job.elastic_model import BREAKS, first_break

SCHEDULES = 1200
SCHEDULES_OF_A_BREAK = 200


def test_the_protocol_keeps_its_promises() -> None:
    assert first_break("", range(SCHEDULES)) is None


@pytest.mark.parametrize("broken", BREAKS)
def test_the_checks_find_a_missing_rule(broken: str) -> None:
    first = BREAKS[broken].first_seed
    assert first_break(broken, range(first, first + SCHEDULES_OF_A_BREAK)) is not None, BREAKS[broken].what
