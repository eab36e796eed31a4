"""What a program of a fixed job asks of the handlers does not change by chance: it is compiled into people's caches."""

import json
from pathlib import Path

from tests.support.cluster import run

GOLDEN = Path(__file__).parent / "lowered.json"


def test_the_calls_of_a_fixed_job_are_those_of_before() -> None:
    """Where a change is meant, change the golden file."""
    first, second = run("lowered.py", workers=2, reducers=1)
    assert first == second
    assert first == json.loads(GOLDEN.read_text())
