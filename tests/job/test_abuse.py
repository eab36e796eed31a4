"""Strangers at every port of a job: nobody fails, and the rounds go on. Timed: ``python -m tests.long.abuse``."""

from __future__ import annotations

import re

from tests.long.abuse import STRANGERS, abused_job, attack, bystander

# Of each kind, at each port.
ATTEMPTS = 200


def test_strangers_do_not_disturb_a_job_that_runs() -> None:
    """1,000 of them at each port: the coordinator's, those of reducers, and those of metrics. Some of them stay."""
    with abused_job() as (ports, begin, end):
        begin("attack")
        attack(ports, ATTEMPTS, half_open=50)
        abuse = end()
    for result in abuse.results:
        assert result["wrong"] == 0
        assert len(result["times_ms"]["attack"]) > 0
    counted = re.search(r"refused_count=(\d+)", abuse.reducer_log)
    assert counted, abuse.reducer_log
    assert "bad_frame_count" not in abuse.reducer_log  # only what is not 0 is told
    assert int(counted[1]) >= len(STRANGERS) * ATTEMPTS
    refused_count = abuse.results[0]["refused_count"]
    assert refused_count >= 2 * len(STRANGERS) * ATTEMPTS, "the coordinator's and those of the reducer inside"
    assert abuse.reducer_code == 0
    # Rare lines say it, not one for each.
    assert 1 <= abuse.reducer_log.count("refused a connection") <= 20, abuse.reducer_log


def test_a_bystander_shows_the_same_strangers_out() -> None:
    """The control of the measurement."""
    with bystander(2) as ports:
        assert attack(ports, attempts=2, half_open=3) == 2 * (3 + 2 * len(STRANGERS))
