"""``jaxhetero estimate --failures``: its formulas against jobs whose failures are drawn."""

from __future__ import annotations

import heapq
import json
import random

import pytest

from jaxhetero.cli import main
from jaxhetero.errors import ConfigError
from jaxhetero.simulator.goodput import Failures, best_interval_s, elastic_goodput, fixed_goodput, goodput

FAILURES = Failures(24, restart_s=300, checkpoint_s=30)  # one an hour
DRAWN = 20_000


def test_a_fixed_job_that_is_played_has_this_goodput() -> None:
    """Its state machine: work and a checkpoint, or a failure in it, and restarts that may fail as well."""
    draw, every_s, spent_s = random.Random(0), 900.0, 0.0

    def try_for(wanted_s: float) -> bool:
        nonlocal spent_s
        left_s = draw.expovariate(1 / FAILURES.apart_s)
        spent_s += min(left_s, wanted_s)
        return left_s > wanted_s

    for _ in range(DRAWN):
        while not try_for(every_s + FAILURES.checkpoint_s):
            while not try_for(FAILURES.restart_s):
                pass
    assert DRAWN * every_s / spent_s == pytest.approx(fixed_goodput(FAILURES, every_s), rel=0.01)


def test_an_elastic_job_that_is_played_has_this_goodput() -> None:
    """Eight workers, of whom each that is lost is away for a while."""
    draw, workers, pause_s = random.Random(0), 8, 20.0
    time_s = work = paused_s = 0.0
    back: list[float] = []
    for _ in range(DRAWN):
        next_s = time_s + draw.expovariate(1 / FAILURES.apart_s)
        while back and back[0] < next_s:
            comes_s = heapq.heappop(back)
            work += (comes_s - time_s) * (workers - len(back) - 1)
            time_s = comes_s
        work += (next_s - time_s) * (workers - len(back))
        time_s = next_s
        heapq.heappush(back, time_s + FAILURES.restart_s)
        paused_s += pause_s
    played = work / workers / (time_s + paused_s)
    assert played == pytest.approx(elastic_goodput(FAILURES, workers, pause_s), rel=0.01)


def test_the_interval_of_checkpoints_is_the_best_one() -> None:
    """And near the square root that everybody knows."""
    best_s = best_interval_s(FAILURES)
    assert all(fixed_goodput(FAILURES, best_s) >= fixed_goodput(FAILURES, best_s * factor) for factor in (0.9, 1.1))
    assert best_s == pytest.approx((2 * 30 * 3600) ** 0.5, rel=0.1)


def test_rare_failures_cost_nothing_and_an_elastic_job_loses_less() -> None:
    job = {"workers": 8, "step_s": 0.3, "gradient_bytes": 10**9, "worker_gbits": 25.0}
    rare = goodput(Failures(1e-6), **job)
    assert min(rare.fixed, rare.elastic) > 0.999
    often = goodput(Failures(24), **job)
    assert often.fixed < often.elastic < rare.elastic


def test_what_the_command_shows(capsys: pytest.CaptureFixture[str]) -> None:
    step = ["estimate", "--workers", "4", "--gradient-bytes", "50MB", "--step-ms", "60", "--nic", "10gbit"]
    step += ["--reducers", "0", "--failures", "24"]
    assert main(step) == 0
    shown = capsys.readouterr().out
    assert "with 24 failures a day, and 300 s until a lost worker is back:" in shown
    assert "a fixed job with a checkpoint of 30 s every 7 min: " in shown
    assert main([*step, "--restart-s", "60", "--checkpoint-s", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    assert found["fixed"] == pytest.approx(fixed_goodput(Failures(24, 60, 5), found["checkpoint_every_s"]))


def test_a_wrong_request_is_named() -> None:
    with pytest.raises(ConfigError, match="failures above 0"):
        Failures(0)
    step = ["estimate", "--workers", "4", "--gradient-bytes", "50MB", "--step-ms", "60", "--nic", "10gbit"]
    assert main([*step, "--restart-s", "60"]) == 2
