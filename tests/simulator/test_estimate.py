"""``jaxhetero estimate``: what a user types, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxhetero.cli import main
from jaxhetero.cli.estimate import _Gbits
from jaxhetero.cluster.prices import read_prices
from jaxhetero.simulator.estimate import SETUPS

STEP = ["estimate", "--workers", "4", "--gradient-bytes", "50MB", "--step-ms", "60"]


def test_it_answers_for_each_number_of_reducers(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*STEP, "--worker-type", "p3.16xlarge", "--nic", "10gbit", "--reducer-type", "c5n.9xlarge", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    answers = found["answers"]
    assert [answer["reducer_count"] for answer in answers] == [0, 1, 2, 4]
    assert found["recommended"] in answers
    prices = read_prices()
    for answer in answers:
        assert answer["efficiency"] == pytest.approx(0.06 / answer["step_s"])
        hourly = 4 * prices["p3.16xlarge"].usd_per_hour + answer["reducer_count"] * prices["c5n.9xlarge"].usd_per_hour
        assert answer["usd_per_hour"] == pytest.approx(hourly)
        assert answer["usd_per_step"] == pytest.approx(hourly / 3600 * answer["step_s"])
    assert found["recommended"]["usd_per_step"] == min(answer["usd_per_step"] for answer in answers)


def test_it_answers_for_steps_whose_all_reduce_goes_on_under_the_next_one(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*STEP, "--nic", "10gbit", "--reducers", "4", "--across-steps"]
    assert main([*command, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["across_efficiency"] == pytest.approx(0.06 / answer["across_step_s"])
    assert answer["efficiency"] < answer["across_efficiency"] <= 1
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"{100 * answer['efficiency']:.1f} %" in out
    assert f"{100 * answer['across_efficiency']:.1f} %" in out


@pytest.mark.parametrize("rate", ["25gbit", "25gbps", "25 Gbit/s", "25Gb/s", "25000mbit", "25000Mbps"])
def test_a_rate_may_be_written_in_many_ways(rate: str) -> None:
    assert _Gbits().convert(rate, None, None) == 25


def test_the_table_names_what_it_recommends(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "steps.png"
    assert main([*STEP, "--nic", "10gbit", "--reducers", "2", "--reducers", "4", "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    assert err == "simulating train steps of 4 workers ...\n"
    assert "simulated" in out
    assert "recommended: 2 c6in.8xlarge" in out, "the cheapest host as fast as a worker, and few of them"
    assert plot.stat().st_size > 0


def test_slower_messages_make_slower_steps(capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for message_us in ("0", "100"):
        assert main([*STEP, "--nic", "10gbit", "--reducers", "4", "--message-us", message_us, "--json"]) == 0
        steps.append(json.loads(capsys.readouterr().out)["answers"][0]["step_s"])
    assert steps[0] < steps[1]


def test_a_reducer_with_a_faster_network_has_the_strands_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It carries what all four workers send, five times the rate that one strand of theirs needs."""
    command = ["estimate", "--workers", "4", "--nic", "10gbit", "--gradient-bytes", "400MB", "--step-ms", "300"]
    assert main([*command, "--reducer-type", "c6in.8xlarge", "--reducers", "0", "--reducers", "1", "--json"]) == 0
    none, one = json.loads(capsys.readouterr().out)["answers"]
    assert one["step_s"] < 0.8 * none["step_s"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "4"], "missing --nic, --gradient-bytes, --step-ms"),
        (["--setup", "none"], "p3-64+m4"),
        ([*STEP[1:], "--nic", "fast"], "100gbit"),
        ([*STEP[1:], "--nic", "10"], "100gbit, 100gbps or 800mbit"),
        ([*STEP[1:], "--nic", "10GB/s"], "100gbit, 100gbps or 800mbit"),
        ([*STEP[1:], "--nic", "1.2.3gbit"], "100gbit, 100gbps or 800mbit"),
        ([*STEP[1:], "--nic", "10gbit", "--reducer-type", "none"], "c6in.16xlarge"),
        ([*STEP[1:], "--worker-type", "none"], "p3.16xlarge"),
        ([*STEP[1:5], "--step-ms", "0", "--nic", "10gbit", "--across-steps"], "no forward pass"),
        ([*STEP[1:], "--nic", "10gbit", "--gradient-bytes", "much"], "1.3GB"),
    ],
)
def test_what_cannot_be_estimated_is_said(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *options]) == 2
    assert said in capsys.readouterr().err


def test_the_types_of_the_set_ups_have_prices() -> None:
    for setup in SETUPS.values():
        assert {setup["worker_type"], *setup["reducer_types"]} <= read_prices().keys()
