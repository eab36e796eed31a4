"""``jaxhetero estimate --from``: the step of a job's timeline, made by hand and by a job."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxhetero.cli import main
from jaxhetero.errors import ConfigError
from jaxhetero.simulator.recorded import read_step
from tests.support.cluster import ROOT, program_path
from tests.support.launcher import Run

STEPS = 12
MS = 1000  # microseconds
COUNTS = {"message_ns": 2000, "byte_ps": 250}


def trace(path: Path, slices: list[tuple[int, str, int, int, int, int]], about: dict[str, Any] | None = None) -> Path:
    """Of rounds: worker, op, number, bytes, when requested, and how long it took."""
    events = [
        {"ph": "X", "cat": "round", "pid": pid, "name": op, "ts": ts, "dur": us, "args": {"round": n, "bytes": size}}
        for pid, op, n, size, ts, us in slices
    ]
    path.write_text(json.dumps({"traceEvents": events, "otherData": about or {}}))
    return path


def steps(period_ms: int, workers: int = 2) -> list[tuple[int, str, int, int, int, int]]:
    """One bucket is ready after 20 ms and another after 30; both totals are there after 40. The first step is long."""
    slices = []
    for pid in range(workers):
        for number in range(STEPS):
            begin = number * period_ms * MS - (500 * MS if number == 0 else 0)
            slices.append((pid, "early", number, 4000, begin + 20 * MS, 15 * MS))
            slices.append((pid, "late", number, 8000, begin + 30 * MS, 10 * MS))
        slices.append((pid, "evaluation", 0, 10**5, 0, MS))
    return slices


def test_a_step_is_what_a_worker_does_beside_waiting(tmp_path: Path) -> None:
    step = read_step(trace(tmp_path / "trace.json", steps(40), {"worker 0": {"metrics": COUNTS}}))
    assert (step.worker_count, step.step_count, step.gradient_bytes) == (2, STEPS, 12_000)
    assert step.step_s == pytest.approx(0.03)
    assert [bucket.bytes for bucket in step.buckets] == [4000, 8000]
    assert [bucket.ready_s for bucket in step.buckets] == pytest.approx([0.02, 0.03])
    assert step.costs is not None
    assert step.costs.s_per_message == pytest.approx(2e-6)
    assert step.costs.s_per_gb == pytest.approx(0.25)


def test_what_has_no_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        read_step(path)
    with pytest.raises(ConfigError, match="no rounds"):
        read_step(trace(path, []))
    with pytest.raises(ConfigError, match="at least 5"):
        read_step(trace(path, [one for one in steps(40) if one[2] < 3]))
    with pytest.raises(ConfigError, match="without across_steps"):
        read_step(trace(path, steps(12)))


def test_a_job_is_asked_of_another_network(launch: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    program = (sys.executable, str(program_path("steps.py")), str(STEPS))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "JAXHETERO_COMPRESS": "never"}
    options = ("--workers", "2", "--reducers", "2", "--timeline", str(path))
    assert launch(*options, "--", *program, env=environment).returncode == 0
    step = read_step(path)
    assert (step.worker_count, step.step_count) == (2, STEPS)
    assert [bucket.bytes for bucket in sorted(step.buckets, key=lambda bucket: bucket.bytes)] == [4, 2**20, 2**21]

    efficiencies = []
    for rate in ("100mbit", "100gbit"):
        command = ["estimate", "--from", str(path), "--workers", "4", "--reducers", "4", "--nic", rate, "--json"]
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert "2 workers, 12 steps" in err
        (answer,) = json.loads(out)["answers"]
        assert answer["efficiency"] == pytest.approx(step.step_s / answer["step_s"])
        efficiencies.append(answer["efficiency"])
    assert efficiencies[0] < efficiencies[1]
    assert main(["estimate", "--from", str(path), "--nic", "1gbit", "--step-ms", "3"]) == 2
    assert "no --step-ms" in capsys.readouterr().err
